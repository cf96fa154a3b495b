// The matrix product of linear layers and attention: a tile of ROWS x (VECTORS * LANES) sums in registers.
//
//     c[r][j] (+)= sum over k of a[r][k] * b[k][j]
//
// `a` and `b` are words of 32 bits (see `Word`). In bfloat16 a word of `a` holds two consecutive k of one row, and a word
// of `b` two consecutive k of one column, so both types use one loop.
#pragma once
#include "vector.h"

namespace QUIRE_ISA {

// Of 32 registers, 24 (6 rows x 4 vectors) hold sums, 4 hold vectors of b, and one holds an element of a. Of 16
// registers, 12 (6 x 2) hold sums.
constexpr int ROWS_MAX = 6;
constexpr int VECTORS = LANES == 16 ? 4 : 2;
constexpr int WIDTH = VECTORS * LANES;  // columns of a tile

template <class T, int ROWS>
inline void tile(const Word* a, long a_stride, const Word* b, long b_stride, long words, float* c, long c_stride,
                 bool is_added) {
    Vec sum[ROWS][VECTORS];
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++) sum[r][v] = is_added ? load(c + r * c_stride + v * LANES) : Vec{};
    for (long k = 0; k < words; k++, b += b_stride) {
        Words right[VECTORS];
        for (int v = 0; v < VECTORS; v++) right[v] = load_raw<Words>(b + v * LANES);
        for (int r = 0; r < ROWS; r++) {
            const Words left = all_lanes(a[r * a_stride + k]);
            for (int v = 0; v < VECTORS; v++) sum[r][v] = multiply_add<T>(left, right[v], sum[r][v]);
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++) store(c + r * c_stride + v * LANES, sum[r][v]);
}

// Takes any number of rows; `columns` must be a multiple of WIDTH.
template <class T>
inline void product(long rows, long columns, const Word* a, long a_stride, const Word* b, long b_stride, long words,
                    float* c, long c_stride, bool is_added) {
    long left = rows, tiles = (rows + ROWS_MAX - 1) / ROWS_MAX;
    for (; tiles > 0; tiles--) {
        const long count = (left + tiles - 1) / tiles;  // tiles are as even as possible: 32 rows give 6, 6, 5, 5, 5, 5
        for (long j = 0; j < columns; j += WIDTH) {
            switch (count) {
                case 1: tile<T, 1>(a, a_stride, b + j, b_stride, words, c + j, c_stride, is_added); break;
                case 2: tile<T, 2>(a, a_stride, b + j, b_stride, words, c + j, c_stride, is_added); break;
                case 3: tile<T, 3>(a, a_stride, b + j, b_stride, words, c + j, c_stride, is_added); break;
                case 4: tile<T, 4>(a, a_stride, b + j, b_stride, words, c + j, c_stride, is_added); break;
                case 5: tile<T, 5>(a, a_stride, b + j, b_stride, words, c + j, c_stride, is_added); break;
                default: tile<T, 6>(a, a_stride, b + j, b_stride, words, c + j, c_stride, is_added); break;
            }
        }
        a += count * a_stride;
        c += count * c_stride;
        left -= count;
    }
}

// Packs rows of words into columns: packed[k][column + i] = rows[i][k].
inline void pack_columns(const Word* const* rows, long count, long words, Word* packed, long packed_stride) {
    long i = 0;
    for (; i + LANES <= count; i += LANES) {
        long k = 0;
        for (; k + LANES <= words; k += LANES) {
            Vec square[LANES];
            for (int j = 0; j < LANES; j++) square[j] = load_raw<Vec>(rows[i + j] + k);
            transpose(square);
            for (int j = 0; j < LANES; j++) memcpy(packed + (k + j) * packed_stride + i, &square[j], sizeof(Vec));
        }
        for (; k < words; k++)
            for (int j = 0; j < LANES; j++) packed[k * packed_stride + i + j] = rows[i + j][k];
    }
    for (; i < count; i++)
        for (long k = 0; k < words; k++) packed[k * packed_stride + i] = rows[i][k];
}

}  // namespace QUIRE_ISA
