// Tokens from logits: the greedy choice, and draws from a softmax.
//
//     weight[j] = e^((logit[j] - largest) / temperature),  token = the first j with sum(weight[..j]) > uniform * sum(weight)
//
// Sums are doubles, because a float is not precise enough for the sum over a vocabulary. There is one sum per stretch of
// tokens. So the second pass adds up stretches, and goes token by token through only one of them.
#pragma once
#include "rows.h"

namespace QUIRE_ISA {

constexpr long STRETCH = 256;  // tokens; a multiple of a vector

struct Largest {
    long place;
    float value;
};

// The largest number and its first index; if there is a NaN, the first NaN instead.
//
// Each lane keeps its largest number and the first stretch that has it, so that the second pass reads only one stretch.
inline Largest largest_of(const float* logits, long size) {
    constexpr int CHAINS = 4;  // independent maxima: a single chain would wait for its previous result
    Vec most = broadcast(-__builtin_inff());
    Ints stretch_of_most{}, is_nan{};
    for (long start = 0; start < size; start += STRETCH) {
        Vec found[CHAINS];
        for (Vec& each : found) each = broadcast(-__builtin_inff());
        const long stop = smaller(size, start + STRETCH);
        long i = start;
        for (; i + CHAINS * LANES <= stop; i += CHAINS * LANES)
            for (int c = 0; c < CHAINS; c++) {
                const Vec x = load(logits + i + c * LANES);
                is_nan |= x != x;
                found[c] = maximum(x, found[c]);
            }
        for (; i < stop; i += LANES) {
            float padded[LANES];
            store(padded, broadcast(-__builtin_inff()));
            memcpy(padded, logits + i, smaller(LANES, stop - i) * sizeof(float));
            const Vec x = load(padded);
            is_nan |= x != x;
            found[0] = maximum(x, found[0]);
        }
        const Vec largest = maximum(maximum(found[0], found[1]), maximum(found[2], found[3]));
        const Ints is_larger = largest > most;
        most = maximum(largest, most);
        stretch_of_most = (is_larger & (Ints{} + static_cast<int32_t>(start / STRETCH))) | (~is_larger & stretch_of_most);
    }
    const float best = maximum_of(most);
    bool has_nan = false;
    long first = size;
    for (int lane = 0; lane < LANES; lane++) {
        has_nan |= is_nan[lane] != 0;
        if (most[lane] == best) first = smaller(first, stretch_of_most[lane] * STRETCH);
    }
    if (has_nan) {
        long place = 0;
        while (logits[place] == logits[place]) place++;
        return {place, logits[place]};
    }
    while (first + 1 < size && logits[first] != best) first++;
    return {first, best};
}

inline void greedy(const QuireGreedy* arguments) {
    const QuireGreedy& a = *arguments;
    for_each_row_of(a.rows, a.vocabulary, [&](long row) {
        const Largest found = largest_of(a.logits + row * a.stride, a.vocabulary);
        a.tokens[row] = found.place;
        a.are_bounded[row] = __builtin_fabsf(found.value) <= a.bound;
    });
}

typedef double Doubles __attribute__((vector_size(LANES * 8)));

// Writes the weights of [first, first + count), and returns their sum.
inline double weigh_stretch(const float* logits, float* weights, long count, float largest, float factor) {
    Doubles sum{};
    for_each_vector(
        count,
        [&](long i) {
            const Vec weight = exponential((load(logits + i) - largest) * factor);
            store(weights + i, weight);
            sum += __builtin_convertvector(weight, Doubles);
        },
        [&](long i, long some) {
            store_some(weights + i, exponential((load_some(logits + i, some) - largest) * factor), some);
            for (long j = i; j < i + some; j++) sum[0] += weights[j];
        });
    double parts[LANES], total = 0;
    memcpy(parts, &sum, sizeof parts);
    for (int lane = 0; lane < LANES; lane++) total += parts[lane];
    return total;
}

// A row with a NaN gives an arbitrary token.
inline int64_t draw_row(const float* logits, long size, float temperature, double uniform) {
    const long likeliest = largest_of(logits, size).place;
    if (temperature == 0.0f) return likeliest;
    const long stretches = (size + STRETCH - 1) / STRETCH;
    char* memory = workspace(stretches * sizeof(double) + size * sizeof(float));
    double* sums = reinterpret_cast<double*>(memory);
    float* weights = reinterpret_cast<float*>(memory + stretches * sizeof(double));
    double total = 0;
    for (long s = 0; s < stretches; s++) {
        const long first = s * STRETCH;
        sums[s] = weigh_stretch(logits + first, weights + first, smaller(STRETCH, size - first), logits[likeliest],
                                1.0f / temperature);
        total += sums[s];
    }
    const double threshold = uniform * total;
    double before = 0;
    for (long s = 0; s < stretches; before += sums[s], s++) {
        if (!(before + sums[s] > threshold)) continue;
        double reached = before;
        const long first = s * STRETCH, stop = smaller(size, first + STRETCH);
        long last = first;
        for (long j = first; j < stop; j++) {
            reached += weights[j];
            if (reached > threshold) return j;
            if (weights[j] > 0) last = j;
        }
        return last;  // rounding can make the sum token by token slightly smaller than the stretch's sum
    }
    return likeliest;
}

inline void draw(const QuireDraw* arguments) {
    const QuireDraw& a = *arguments;
    for_each_row(a.rows, [&](long row) {
        a.tokens[row] = draw_row(a.logits + row * a.stride, a.vocabulary, a.temperatures[row], a.uniforms[row]);
    });
}

}  // namespace QUIRE_ISA
