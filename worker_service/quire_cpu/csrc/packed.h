// Some rows: too many to read keys in place (`direct.h`), and too few to fill vectors (`lanes.h`). A block's keys are packed
// into columns and its values into rows, once for all query rows. Both products are those of `product.h`.
#pragma once
#include "walk.h"

namespace QUIRE_ISA {

template <class T>
struct PackedWay {
    const Walk<T>& walk;
    const long rows, size, padded, words;
    float *sums, *products;
    RowState* states;
    T* weights;
    Word *queries, *keys, *values;

    explicit PackedWay(const Walk<T>& walk)
        : walk(walk), rows(walk.rows), size(walk.size), padded(round_up(walk.size, WIDTH)), words(walk.size / PER_WORD<T>) {
        // Parts are aligned to 64 bytes, so that each begins at a cache line.
        const long sums_bytes = rows * padded * 4, states_bytes = round_up(rows * sizeof(RowState), CACHE_LINE);
        const long products_bytes = rows * KEYS * 4, queries_bytes = round_up(rows * words * 4, CACHE_LINE);
        const long keys_bytes = KEYS * words * 4;
        char* memory = workspace(sums_bytes + states_bytes + 2 * products_bytes + queries_bytes + keys_bytes + KEYS * padded * 4);
        sums = reinterpret_cast<float*>(memory);
        states = reinterpret_cast<RowState*>(memory += sums_bytes);
        products = reinterpret_cast<float*>(memory += states_bytes);
        weights = reinterpret_cast<T*>(memory += products_bytes);
        queries = reinterpret_cast<Word*>(memory += products_bytes);
        keys = reinterpret_cast<Word*>(memory += queries_bytes);
        values = reinterpret_cast<Word*>(memory += keys_bytes);
    }

    void begin() {
        sums_of_rows().begin();
        for (long r = 0; r < rows; r++) memcpy(queries + r * words, walk.query(0, r), size * sizeof(T));
        memset(values, 0, KEYS * padded * 4);  // the last columns stay 0
    }

    void block(const Block<T>& block, const Block<T>& ahead) {
        const long offset = walk.item.first_head * size;
        ahead.fetch_heads(offset, size);
        const Word* found[KEYS];
        for (long k = 0; k < block.count; k++) found[k] = reinterpret_cast<const Word*>(block.keys[k] + offset);
        pack_columns(found, block.count, words, keys, KEYS);
        product<T>(rows, round_up(block.count, WIDTH), queries, words, keys, KEYS, words, products,
                   KEYS, false);
        for (long r = 0; r < rows; r++) {
            long first, stop;
            walk.seen(block, r, first, stop);
            const float factor = weigh(products + r * KEYS, weights + r * KEYS, block.count, first, stop,
                                       walk.scoring, states[r]);
            if (factor != 1.0f)
                for (long i = 0; i < padded; i += LANES)
                    store(sums + r * padded + i, load(sums + r * padded + i) * factor);
        }
        block.pack_values(offset, size, values, padded);
        product<T>(rows, padded, reinterpret_cast<const Word*>(weights), KEYS / PER_WORD<T>, values, padded,
                   round_up(block.count, PER_WORD<T>) / PER_WORD<T>, sums, padded, true);
    }

    void finish() const { sums_of_rows().finish(); }
    RowSums<T> sums_of_rows() const { return {walk, sums, states}; }
};

}  // namespace QUIRE_ISA
