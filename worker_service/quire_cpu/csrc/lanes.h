// Many rows: a query row is a lane, so that both products and the softmax work on whole vectors of rows. Keys and values
// are read in place, one number for all lanes. Only the queries are packed, once.
//
//     scores[key][row] = sum over d of key[d] * query[d][row]
//     weights          = softmax(scores); its largest scores and its sums are vectors of rows too
//     sums[d][row]     = sums[d][row] * factor[row] + sum over keys of value[d] * weights[key][row]
//
// Words are those of `product.h`: in bfloat16, two consecutive d of a query, or the weights of two keys for a row. So the
// values of two keys are interleaved first.
#pragma once
#include "walk.h"

namespace QUIRE_ISA {

// Whether there are enough rows: two vectors of rows. Without instructions for bfloat16 products, widening the left side for
// each product costs more than packing.
template <class T>
inline bool fills_lanes(long rows) {
#if defined(__AVX512BF16__)
    return rows >= 2 * LANES;
#else
    return PER_WORD<T> == 1 && rows >= 2 * LANES;
#endif
}

// Rows of a tile: as many as fit into the registers beside COUNT vectors of the right side and one number of the left side.
template <int COUNT>
constexpr int LANE_TILE = LANES == 16 ? (COUNT == 4 ? 6 : 8) : (COUNT == 2 ? 6 : 8);
constexpr int COUNT_MAX = VECTORS;  // vectors of rows at once

template <int VALUE>
struct Count {
    static constexpr int value = VALUE;
};

// c[i][lane] = c[i][lane] * factors[lane] + sum over k of left(i, k) * b[k][lane], for ROWS values of i and COUNT vectors of
// lanes. Without `factors`, c is not read.
//
// Not inlined, so that the loop has all registers for itself.
template <class T, int ROWS, int COUNT, class Left>
__attribute__((noinline)) void lane_tile(Left left, long first, const Word* b, long stride, long words, float* c, const float* factors) {
    Vec sum[ROWS][COUNT];
    for (int i = 0; i < ROWS; i++)
        for (int v = 0; v < COUNT; v++)
            sum[i][v] = factors ? load(c + (first + i) * stride + v * LANES) * load(factors + v * LANES) : Vec{};
    for (long k = 0; k < words; k++) {
        Words right[COUNT];
        for (int v = 0; v < COUNT; v++) right[v] = load_raw<Words>(b + k * stride + v * LANES);
        for (int i = 0; i < ROWS; i++) {
            const Words one = all_lanes(left(first + i, k));
            for (int v = 0; v < COUNT; v++) sum[i][v] = multiply_add<T>(one, right[v], sum[i][v]);
        }
    }
    for (int i = 0; i < ROWS; i++)
        for (int v = 0; v < COUNT; v++) store(c + (first + i) * stride + v * LANES, sum[i][v]);
}

// Computes lane tiles for all i below `rows`.
template <class T, int COUNT, class Left>
inline void lane_product(const Left& left, long rows, const Word* b, long stride, long words, float* c, const float* factors) {
    constexpr int MOST = LANE_TILE<COUNT>;
    long i = 0;
    for (; i + MOST <= rows; i += MOST) lane_tile<T, MOST, COUNT>(left, i, b, stride, words, c, factors);
    for (; i + 4 <= rows; i += 4) lane_tile<T, 4, COUNT>(left, i, b, stride, words, c, factors);
    for (; i + 2 <= rows; i += 2) lane_tile<T, 2, COUNT>(left, i, b, stride, words, c, factors);
    for (; i < rows; i++) lane_tile<T, 1, COUNT>(left, i, b, stride, words, c, factors);
}

inline Words bits_of(Vec value, const float*) { return (Words)value; }
inline Words bits_of(Vec value, const Bfloat16*) {
    Bfloat16 rounded[LANES];
    store(rounded, value);
    return __builtin_convertvector(load_raw<Halves>(rounded), Words);
}

// Weights are written to the memory of a block's scores. In bfloat16, weights need half as many rows as scores.
template <class T>
struct LaneWay {
    const Walk<T>& walk;
    const long rows, lanes, size, words;
    Word *queries, *values;  // [words, lanes]; in bfloat16 [KEYS / 2, size]
    float *sums, *scores;    // [size, lanes], [KEYS, lanes]
    float *most, *totals, *factors;  // [lanes]

    explicit LaneWay(const Walk<T>& walk)
        : walk(walk), rows(walk.rows), lanes(round_up(walk.rows, LANES)), size(walk.size), words(walk.size / PER_WORD<T>) {
        const long value_words = PER_WORD<T> == 1 ? 0 : round_up(KEYS / 2 * size, CACHE_LINE / 4);
        char* memory = workspace(((words + size + KEYS + 3) * lanes + value_words) * 4);
        values = reinterpret_cast<Word*>(memory);
        queries = values + value_words;
        sums = reinterpret_cast<float*>(queries + words * lanes);
        scores = sums + size * lanes;
        most = scores + KEYS * lanes;
        totals = most + lanes;
        factors = totals + lanes;
    }

    void begin() {
        memset(queries, 0, words * lanes * sizeof(Word));
        const long padded = round_up(size, WIDTH);
        for (long lane = 0; lane < rows; lane += LANES) {
            const Word* found[LANES];
            const long count = smaller(LANES, rows - lane);
            for (long r = 0; r < count; r++) found[r] = reinterpret_cast<const Word*>(walk.query(0, lane + r));
            pack_columns(found, count, words, queries + lane, lanes);
        }
        if (!walk.is_handed_over()) memset(sums, 0, size * lanes * sizeof(float));
        for (long r = 0; r < lanes; r++) {
            const long place = walk.place(0, smaller(r, rows - 1));
            const RowState state = walk.is_handed_over() ? walk.handed_over.states[place] : walk.first_state(place);
            most[r] = state.most;
            totals[r] = state.total;
            if (walk.is_handed_over())
                for (long d = 0; d < size; d++) sums[d * lanes + r] = walk.handed_over.sums[place * padded + d];
        }
    }

    void block(const Block<T>& block, const Block<T>& ahead) {
        const long offset = walk.item.first_head * size;
        ahead.fetch_heads(offset, size);
        const Word* keys[KEYS];
        for (long k = 0; k < block.count; k++) keys[k] = reinterpret_cast<const Word*>(block.keys[k] + offset);
        const auto key_at = [&](long key, long word) { return keys[key][word]; };
        for_each_vectors([&](auto count, long lane) {
            lane_product<T, decltype(count)::value>(key_at, block.count, queries + lane, lanes, words, scores + lane, nullptr);
        });
        for (long k = 0; k < block.count; k++) {
            const char* value = reinterpret_cast<const char*>(block.keys[k] + block.value_offset + offset);
            for (long i = 0; i < size * static_cast<long>(sizeof(T)); i += CACHE_LINE) __builtin_prefetch(value + i, 0, 3);
        }
        // In most blocks, all queries see all keys.
        long first, stop, last_first, last_stop;
        walk.seen(block, 0, first, stop);
        walk.seen(block, rows - 1, last_first, last_stop);
        const bool is_whole = stop == block.count && last_first == 0;
        for (long lane = 0; lane < lanes; lane += LANES) {
            if (is_whole) {
                weigh_lanes<false>(block, lane);
            } else {
                weigh_lanes<true>(block, lane);
            }
        }
        add_values(block, offset);
    }

    // Computes the softmax of the vector of rows that begins at `lane`.
    template <bool IS_MASKED>
    void weigh_lanes(const Block<T>& block, long lane) {
        Ints first{}, stop{};
        if constexpr (IS_MASKED) {
            for (long i = 0; i < LANES; i++) {
                long from, to;
                walk.seen(block, smaller(lane + i, rows - 1), from, to);
                first[i] = static_cast<int32_t>(from);
                stop[i] = static_cast<int32_t>(to);
            }
        }
        float* column = scores + lane;
        const Vec nothing = broadcast(NOTHING), before = load(most + lane);
        Vec here = nothing;
        for (long k = 0; k < block.count; k++) {
            Vec score = walk.scoring.of(load(column + k * lanes));
            if constexpr (IS_MASKED) {
                const Ints key = Ints{} + static_cast<int32_t>(k);
                score = (key >= first) & (key < stop) ? score : nothing;
            }
            store(column + k * lanes, score);
            here = maximum(score, here);
        }
        // As in `weigh`: if all scores are NaN, there is no largest score.
        const Vec largest = here > before ? here : before == nothing ? Vec{} : before;
        Vec sum{};
        for (long k = 0; k < block.count; k += PER_WORD<T>) {
            const Vec one = exponential(load(column + k * lanes) - largest);
            sum += one;
            Words word = bits_of(one, static_cast<const T*>(nullptr));
            if constexpr (PER_WORD<T> == 2) {
                if (k + 1 < block.count) {
                    const Vec other = exponential(load(column + (k + 1) * lanes) - largest);
                    sum += other;
                    word |= bits_of(other, static_cast<const T*>(nullptr)) << 16;
                }
            }
            memcpy(column + k / PER_WORD<T> * lanes, &word, sizeof word);
        }
        const Vec factor = before == nothing ? Vec{} : exponential(before - largest);
        store(factors + lane, factor);
        store(totals + lane, load(totals + lane) * factor + sum);
        if constexpr (IS_MASKED) {
            store(most + lane, first < stop ? largest : before);
        } else {
            store(most + lane, largest);
        }
    }

    void add_values(const Block<T>& block, long offset) {
        const Word* weights = reinterpret_cast<const Word*>(scores);
        const long pairs = round_up(block.count, PER_WORD<T>) / PER_WORD<T>;
        if constexpr (PER_WORD<T> == 1) {
            const Word* rows_of[KEYS];
            for (long k = 0; k < block.count; k++)
                rows_of[k] = reinterpret_cast<const Word*>(block.keys[k] + block.value_offset + offset);
            const auto value_at = [&](long d, long key) { return rows_of[key][d]; };
            for_each_vectors([&](auto count, long lane) {
                lane_product<T, decltype(count)::value>(value_at, size, weights + lane, lanes, pairs, sums + lane, factors + lane);
            });
        } else {
            block.pack_values(offset, size, values, size);
            const auto value_at = [&](long d, long pair) { return values[pair * size + d]; };
            for_each_vectors([&](auto count, long lane) {
                lane_product<T, decltype(count)::value>(value_at, size, weights + lane, lanes, pairs, sums + lane, factors + lane);
            });
        }
    }

    void finish() {
        const long padded = round_up(size, WIDTH);
        T* output = static_cast<T*>(walk.a.output);
        for (long lane = 0; lane < lanes; lane += LANES) {
            const long count = smaller(LANES, rows - lane);
            const Vec total = load(totals + lane);
            for (long d = 0; d < size; d += LANES) {
                const long dims = smaller(LANES, size - d);
                Vec square[LANES];
                for (long i = 0; i < LANES; i++) {
                    square[i] = i < dims ? load(sums + (d + i) * lanes + lane) : Vec{};
                    if (!walk.is_shared) square[i] /= total;
                }
                transpose(square);
                for (long r = 0; r < count; r++) {
                    const long place = walk.place(0, lane + r);
                    if (walk.is_shared) {
                        store_some(walk.handed_over.sums + place * padded + d, square[r], dims);
                    } else {
                        store_some(output + place * size + d, square[r], dims);
                    }
                }
            }
            for (long r = 0; walk.is_shared && r < count; r++)
                walk.handed_over.states[walk.place(0, lane + r)] = {most[lane + r], totals[lane + r]};
        }
    }

    // Calls body(number of vectors, first lane) for all lanes, with as many vectors at a time as possible.
    template <class Body>
    void for_each_vectors(Body body) const {
        long lane = 0;
        for (; lane + COUNT_MAX * LANES <= lanes; lane += COUNT_MAX * LANES) body(Count<COUNT_MAX>{}, lane);
        if constexpr (COUNT_MAX == 4) {
            if (lane + 2 * LANES <= lanes) {
                body(Count<2>{}, lane);
                lane += 2 * LANES;
            }
        }
        if (lane < lanes) body(Count<1>{}, lane);
    }
};

}  // namespace QUIRE_ISA
