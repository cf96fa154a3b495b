// Kernels that process rows one by one: RMSNorm, rotary embedding, append.
#pragma once
#include "vector.h"

namespace QUIRE_ISA {

constexpr long ROWS_PER_THREAD = 16;  // fewer rows take less time than waking a thread

// Calls body(row) for each row; a thread takes ROWS_PER_THREAD rows at a time.
template <class Body>
void for_each_row(long rows, Body body) {
    parallel((rows + ROWS_PER_THREAD - 1) / ROWS_PER_THREAD, [&](int64_t part) {
        const long stop = smaller(rows, (part + 1) * ROWS_PER_THREAD);
        for (long row = part * ROWS_PER_THREAD; row < stop; row++) body(row);
    });
}

// Like `for_each_row`, for long rows, where a few rows are enough for a thread.
constexpr long NUMBERS_PER_THREAD = 1 << 18;
template <class Body>
void for_each_row_of(long rows, long size, Body body) {
    const long some = larger(1, NUMBERS_PER_THREAD / size);
    parallel((rows + some - 1) / some, [&](int64_t part) {
        const long stop = smaller(rows, (part + 1) * some);
        for (long row = part * some; row < stop; row++) body(row);
    });
}

template <class T>
void norm_row(const T* input, const T* weight, T* output, long size, float epsilon) {
    Vec squares{};
    for_each_vector(
        size, [&](long i) { const Vec x = load(input + i); squares += x * x; },
        [&](long i, long count) { const Vec x = load_some(input + i, count); squares += x * x; });
    const float factor = 1.0f / __builtin_sqrtf(sum_of(squares) / size + epsilon);
    for_each_vector(
        size, [&](long i) { store(output + i, load(input + i) * factor * load(weight + i)); },
        [&](long i, long count) {
            store_some(output + i, load_some(input + i, count) * factor * load_some(weight + i, count), count);
        });
}

template <class T>
void norm_of(const QuireNorm& a) {
    for_each_row(a.rows, [&](long row) {
        norm_row(static_cast<const T*>(a.input) + row * a.input_stride, static_cast<const T*>(a.weight),
                 static_cast<T*>(a.output) + row * a.output_stride, a.size, a.epsilon);
    });
}

// x * cos + rotate_half(x) * sin over the first `size` elements; the second half of both tables repeats the first.
template <class T>
void rotate_row(T* head, const T* cosine, const T* sine, long size) {
    const long half = size / 2;
    T* other = head + half;
    for_each_vector(
        half,
        [&](long i) {
            const Vec x = load(head + i), y = load(other + i), c = load(cosine + i), s = load(sine + i);
            store(head + i, x * c - y * s);
            store(other + i, y * c + x * s);
        },
        [&](long i, long count) {
            const Vec x = load_some(head + i, count), y = load_some(other + i, count);
            const Vec c = load_some(cosine + i, count), s = load_some(sine + i, count);
            store_some(head + i, x * c - y * s, count);
            store_some(other + i, y * c + x * s, count);
        });
}

template <class T>
void rotate_of(const QuireRotate& a) {
    for_each_row(a.tokens, [&](long token) {
        T* heads = static_cast<T*>(a.heads) + token * a.token_stride;
        const long row = a.positions ? a.positions[token] : token;
        const T* cosine = static_cast<const T*>(a.cosine) + row * a.table_stride;
        const T* sine = static_cast<const T*>(a.sine) + row * a.table_stride;
        for (long h = 0; h < a.query_heads + a.kv_heads; h++) {
            T* head = heads + h * a.head_dim;
            const void* weight = h < a.query_heads ? a.query_norm : a.key_norm;
            if (weight) norm_row(head, static_cast<const T*>(weight), head, a.head_dim, a.epsilon);
            rotate_row(head, cosine, sine, a.rotary_dim);
        }
    });
}

template <class T>
void append_of(const QuireAppend& a) {
    const long row = static_cast<long>(a.kv_heads) * a.head_dim, half = a.page_size * row;
    for (long token = 0; token < a.tokens; token++) {
        const long slot = a.slots[token], page = slot / a.page_size, offset = slot % a.page_size;
        T* keys = static_cast<T*>(a.pages) + page * a.page_stride + offset * row;
        const T* key = static_cast<const T*>(a.key) + token * a.key_token_stride;
        const T* value = static_cast<const T*>(a.value) + token * a.value_token_stride;
        for (long h = 0; h < a.kv_heads; h++) {
            memcpy(keys + h * a.head_dim, key + h * a.key_head_stride, a.head_dim * sizeof(T));
            memcpy(keys + half + h * a.head_dim, value + h * a.value_head_stride, a.head_dim * sizeof(T));
        }
    }
}

}  // namespace QUIRE_ISA
