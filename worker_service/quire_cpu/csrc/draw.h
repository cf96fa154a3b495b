// Logits to tokens: the greedy choice, and draws from a softmax.
//
//     weight[j] = e^((logit[j] - largest) / temperature),  token = the first j with sum(weight[..j]) > uniform * sum(weight)
//
// Sums are doubles: a vocabulary has more tokens than a float has places. They are kept for each stretch of tokens, so that
// the second way through is along these, and token by token in one of them alone.
#pragma once
#include "rows.h"

namespace QUIRE_ISA {

constexpr long STRETCH = 256;  // tokens, whole vectors

// The first place of the largest number; of the first NaN if there is one.
inline int64_t greedy_row(const float* logits, long size) {
    Vec most = broadcast(logits[0]);
    Ints is_nan{};
    long i = 0;
    for (; i + LANES <= size; i += LANES) {
        const Vec x = load(logits + i);
        is_nan |= x != x;
        most = maximum(x, most);
    }
    float best = maximum_of(most);
    bool has_nan = false;
    for (int lane = 0; lane < LANES; lane++) has_nan |= is_nan[lane] != 0;
    for (; i < size; i++) {
        has_nan |= logits[i] != logits[i];
        best = logits[i] > best ? logits[i] : best;
    }
    for (long j = 0; j < size; j++)
        if (has_nan ? logits[j] != logits[j] : logits[j] == best) return j;
    return 0;
}

inline void greedy(const float* logits, int64_t stride, int64_t rows, int64_t vocabulary, int64_t* tokens) {
    for_each_row(rows, [&](long row) { tokens[row] = greedy_row(logits + row * stride, vocabulary); });
}

typedef double Doubles __attribute__((vector_size(LANES * 8)));

// Weights of [first, first + count) to their place; returns their sum.
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

// A row whose largest logit is no number gives some token.
inline int64_t draw_row(const float* logits, long size, float temperature, double uniform) {
    const int64_t likeliest = greedy_row(logits, size);
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
        return last;  // summed one by one, the stretch ends a rounding earlier
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
