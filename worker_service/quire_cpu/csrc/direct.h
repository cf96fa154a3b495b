// Few rows: keys and values are read in place, a block for all heads before the next block, so that memory is read in order.
// Sixteen dot products are summed into one vector.
#pragma once
#include "walk.h"

namespace QUIRE_ISA {

constexpr long DIRECT_ROWS = 4;  // most rows that read keys and values in place

// Whether rows read keys and values in place: there are few rows, and a key fills whole vectors of words.
template <class T>
inline bool reads_directly(const QuireAttend& a, long rows) {
    return rows <= DIRECT_ROWS && a.head_dim % (LANES * PER_WORD<T>) == 0;
}

template <class T, int ROWS>
inline void direct_products(const T* const* queries, const Block<T>& block, const Block<T>& ahead, long head_offset,
                            long size, float* products) {
    constexpr int AT_ONCE = LANES / ROWS;
    for (long k = 0; k < block.count; k += AT_ONCE) {
        for (long j = k; j < smaller(k + AT_ONCE, ahead.count); j++) fetch(ahead.keys[j] + head_offset, size * sizeof(T));
        Vec sum[LANES];
        const T* key[AT_ONCE];
        for (int j = 0; j < LANES; j++) sum[j] = Vec{};
        for (int j = 0; j < AT_ONCE; j++) key[j] = block.keys[smaller(k + j, block.count - 1)] + head_offset;
        for (long i = 0; i < size; i += LANES * PER_WORD<T>) {
            Words query[ROWS];
            for (int r = 0; r < ROWS; r++) query[r] = load_raw<Words>(queries[r] + i);
            for (int j = 0; j < AT_ONCE; j++) {
                const Words x = load_raw<Words>(key[j] + i);
                for (int r = 0; r < ROWS; r++)
                    sum[r * AT_ONCE + j] = multiply_add<T>(query[r], x, sum[r * AT_ONCE + j]);
            }
        }
        float sums[LANES];
        store(sums, sums_of(sum));
        for (int r = 0; r < ROWS; r++) memcpy(products + r * KEYS + k, sums + r * AT_ONCE, AT_ONCE * sizeof(float));
    }
}

template <class T, int ROWS, int COUNT>
inline void direct_sums(const float* weights, const float* factors, const Block<T>& block, const Block<T>& ahead,
                        long offset, float* sums, long stride) {
    Vec sum[ROWS][COUNT];
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < COUNT; v++) sum[r][v] = load(sums + r * stride + v * LANES) * factors[r];
    for (long k = 0; k < block.count; k++) {
        if (k < ahead.count) fetch(ahead.keys[k] + ahead.value_offset + offset, COUNT * LANES * sizeof(T));
        const T* value = block.keys[k] + block.value_offset + offset;
        for (int v = 0; v < COUNT; v++) {
            const Vec x = load(value + v * LANES);
            for (int r = 0; r < ROWS; r++) sum[r][v] += weights[r * KEYS + k] * x;
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < COUNT; v++) store(sums + r * stride + v * LANES, sum[r][v]);
}

// `sums` is `[heads * rows, padded head_dim]`.
template <class T>
struct DirectWay {
    const Walk<T>& walk;
    const long rows, size, padded;
    float* sums;
    RowState* states;
    float* products;

    explicit DirectWay(const Walk<T>& walk)
        : walk(walk), rows(walk.rows), size(walk.size), padded(round_up(walk.size, WIDTH)) {
        // Parts are aligned to 64 bytes, so that each begins at a cache line.
        const long all_rows = rows * walk.item.heads, sums_bytes = all_rows * padded * 4;
        const long states_bytes = round_up(all_rows * sizeof(RowState), CACHE_LINE);
        char* memory = workspace(sums_bytes + states_bytes + DIRECT_ROWS * KEYS * 4);
        sums = reinterpret_cast<float*>(memory);
        states = reinterpret_cast<RowState*>(memory + sums_bytes);
        products = reinterpret_cast<float*>(memory + sums_bytes + states_bytes);
    }

    template <int ROWS>
    void one_head(const Block<T>& block, const Block<T>& ahead, long head) {
        constexpr int COMPUTED = ROWS == 3 ? 4 : ROWS;
        const T* queries[COMPUTED];
        float factors[ROWS];
        for (int r = 0; r < COMPUTED; r++) queries[r] = walk.query(head, smaller(r, ROWS - 1));
        const long offset = (walk.item.first_head + head) * size;
        direct_products<T, COMPUTED>(queries, block, ahead, offset, size, products);
        for (int r = 0; r < ROWS; r++) {
            long first, stop;
            walk.seen(block, r, first, stop);
            float* row = products + r * KEYS;
            factors[r] = weigh(row, row, block.count, first, stop, walk.scoring, states[head * rows + r]);
        }
        float* head_sums = sums + head * rows * padded;
        long i = 0;
        for (; i + 4 * LANES <= size; i += 4 * LANES)
            direct_sums<T, ROWS, 4>(products, factors, block, ahead, offset + i, head_sums + i, padded);
        for (; i < size; i += LANES) direct_sums<T, ROWS, 1>(products, factors, block, ahead, offset + i, head_sums + i, padded);
    }

    void block(const Block<T>& block, const Block<T>& ahead) {
        for (long head = 0; head < walk.item.heads; head++) {
            switch (rows) {
                case 1: one_head<1>(block, ahead, head); break;
                case 2: one_head<2>(block, ahead, head); break;
                case 3: one_head<3>(block, ahead, head); break;
                default: one_head<4>(block, ahead, head); break;
            }
        }
    }

    void begin() { sums_of_rows().begin(); }
    void finish() const { sums_of_rows().finish(); }
    RowSums<T> sums_of_rows() const { return {walk, sums, states}; }
};

}  // namespace QUIRE_ISA
