// Recurrent layers over a flat batch: a short convolution and the scan of Mamba 2. Each sequence starts from its own state.
#pragma once
#include "vector.h"

namespace QUIRE_ISA {

constexpr long CHANNELS_PER_THREAD = 256;

// Computes the channels [first, first + count) of one sequence, token by token. The inputs before the first token are the
// rows of the state. A token needs the last `kernel` rows, including its own.
template <class T>
void convolve_channels(const QuireConvolve& a, long sequence, long first, long count) {
    const long start = a.starts[sequence], length = a.starts[sequence + 1] - start, channels = a.channels;
    const T* input = static_cast<const T*>(a.input) + start * a.input_stride + first;
    T* output = static_cast<T*>(a.output) + start * channels + first;
    T* state = static_cast<T*>(a.states) + sequence * a.kernel * channels + first;
    const auto row = [&](long token) { return token < 0 ? state + (a.kernel + token) * channels : input + token * a.input_stride; };
    for (long token = 0; token < length; token++) {
        const auto at = [&](long i, auto load_at, auto store_at) {
            Vec sum = a.bias ? load_at(a.bias + first + i) : Vec{};
            for (long k = 0; k < a.kernel; k++)
                sum += load_at(a.weight + k * channels + first + i) * load_at(row(token - a.kernel + 1 + k) + i);
            store_at(output + token * channels + i, a.gate == QUIRE_SILU ? silu(sum) : sum);
        };
        for_each_vector(
            count,
            [&](long i) { at(i, [](auto* from) { return load(from); }, [](T* to, Vec value) { store(to, value); }); },
            [&](long i, long some) {
                at(i, [&](auto* from) { return load_some(from, some); },
                   [&](T* to, Vec value) { store_some(to, value, some); });
            });
    }
    for (long k = 0; k < a.kernel; k++) {  // in rising order, so that a row of the state is read before it is overwritten
        const long token = length - a.kernel + k;
        memmove(state + k * channels, row(token), count * sizeof(T));
    }
}

template <class T>
void convolve_of(const QuireConvolve& a) {
    const long parts = (a.channels + CHANNELS_PER_THREAD - 1) / CHANNELS_PER_THREAD;
    parallel(a.sequences * parts, [&](int64_t index) {
        const long first = index % parts * CHANNELS_PER_THREAD;
        convolve_channels<T>(a, index / parts, first, smaller(CHANNELS_PER_THREAD, a.channels - first));
    });
}

// Computes one head of one sequence, token by token, so that its state stays in the L1 cache.
//   state = exp(decay * step) * state + (step * x) B^T        y = state C + skip * x
template <class T>
void scan_head(const QuireScan& a, long sequence, long head) {
    const long size = a.state_size, padded = round_up(size, LANES), whole = size / LANES * LANES;
    const long group = head / (a.heads / a.groups);
    float* state = a.states + (sequence * a.heads + head) * a.head_dim * size;
    float* b = reinterpret_cast<float*>(workspace(2 * padded * sizeof(float)));
    float* c = b + padded;
    const float skip = a.skip ? a.skip[head] : 0.0f;
    for (long token = a.starts[sequence]; token < a.starts[sequence + 1]; token++) {
        const T* x = static_cast<const T*>(a.input) + token * a.input_stride + head * a.head_dim;
        const T* b_row = static_cast<const T*>(a.b) + token * a.b_stride + group * size;
        const T* c_row = static_cast<const T*>(a.c) + token * a.c_stride + group * size;
        for_each_vector(
            size, [&](long i) { store(b + i, load(b_row + i)); store(c + i, load(c_row + i)); },
            [&](long i, long some) { store(b + i, load_some(b_row + i, some)); store(c + i, load_some(c_row + i, some)); });
        float* output = a.output + (token * a.heads + head) * a.head_dim;
        const float step = a.steps[token * a.heads + head];
        const Vec decay = exponential(broadcast(a.decay[head] * step));
        for (long first = 0; first < a.head_dim; first += LANES) {
            const long rows = smaller(LANES, a.head_dim - first);
            const Vec inputs = rows == LANES ? load(x + first) : load_some(x + first, rows);
            float added[LANES];
            store(added, inputs * step);
            Vec sums[LANES] = {};
            for (long r = 0; r < rows; r++) {
                float* row = state + (first + r) * size;
                const Vec factor = broadcast(added[r]);
                Vec sum{};
                for (long i = 0; i < whole; i += LANES) {
                    const Vec next = load(row + i) * decay + factor * load(b + i);
                    store(row + i, next);
                    sum += next * load(c + i);
                }
                if (whole < size) {
                    const Vec next = load_some(row + whole, size - whole) * decay + factor * load(b + whole);
                    store_some(row + whole, next, size - whole);
                    sum += next * load(c + whole);
                }
                sums[r] = sum;
            }
            const Vec result = sums_of(sums) + inputs * skip;
            if (rows == LANES) store(output + first, result);
            else store_some(output + first, result, rows);
        }
    }
}

template <class T>
void scan_of(const QuireScan& a) {
    parallel(a.sequences * a.heads, [&](int64_t index) { scan_head<T>(a, index / a.heads, index % a.heads); });
}

}  // namespace QUIRE_ISA
