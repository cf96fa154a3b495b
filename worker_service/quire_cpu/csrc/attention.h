// Attention over pages, block of keys by block of keys, softmax corrected on the way.
//
//   few rows (decode)   keys and values are read where they lie, a block for all heads before the next: a token's heads
//                       lie side by side, so memory is read in order. Sixteen dot products end in one vector.
//   many rows (prompts) a block's keys are packed into columns and its values into rows, once for up to 64 rows, and
//                       both products are those of `product.h`.
//
// Keys that neighbours share (`shared_prefix.h`) are gone through first, with the rows of all of them; what each row has
// then is handed over to the walk through its sequence's own keys, which goes on from there.
//
// The rows of a KV head are the query heads that share it, query by query: row = query * group + head in the group.
#pragma once
#include "product.h"
#include "shared_prefix.h"
#include "softmax.h"

namespace QUIRE_ISA {

constexpr long DIRECT_ROWS = 4;  // at most, that read keys and values where they lie
constexpr long TILE_ROWS = 64;   // of a tile of queries, about
constexpr long CACHE_LINE = 64;

// Whether rows read keys and values where they lie: there are few of them, and a key is whole vectors of words.
template <class T>
inline bool reads_directly(const QuireAttend& a, long rows) {
    return rows <= DIRECT_ROWS && a.head_dim % (LANES * PER_WORD<T>) == 0;
}

// The queries [first_query, first_query + queries) of a sequence, for some KV heads, and the first keys that neighbours
// share with it. While these are computed, queries reach over all of the neighbours, counted from the first one's.
struct Item {
    int32_t sequence, first_query, queries, first_head, heads;
    long shared_keys;
};

// What rows have from shared keys: `sums` is `[tokens, query_heads, padded head_dim]`, `states` `[tokens, query_heads]`.
struct HandedOver {
    float* sums;
    RowState* states;
};

// The keys of a block, and where they lie; values lie `value_offset` behind their keys.
template <class T>
struct Block {
    const T* keys[KEYS];
    long first, count, value_offset;

    void find(const QuireAttend& a, const int32_t* table, long first_key, long key_count) {
        const long row = static_cast<long>(a.kv_heads) * a.head_dim;
        first = first_key;
        count = key_count;
        value_offset = a.page_size * row;
        long page = first_key / a.page_size, offset = first_key % a.page_size;
        for (long i = 0; i < count; i++, offset++) {
            if (offset == a.page_size) {
                offset = 0;
                page++;
            }
            keys[i] = static_cast<const T*>(a.pages) + table[page] * a.page_stride + offset * row;
        }
    }
};

// Asks for what is read a block later, which no hardware foresees, since pages lie anywhere. It comes as far as the second
// cache (locality 2): the first has no room for a block of all heads, and fewer requests under way.
inline void fetch(const void* from, long bytes) {
    for (long i = 0; i < bytes; i += CACHE_LINE) __builtin_prefetch(static_cast<const char*>(from) + i, 0, 2);
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

// One item's way through its keys. `sums` is `[heads * rows, padded head_dim]`.
template <class T>
struct Walk {
    const QuireAttend& a;
    const Item& item;
    const int32_t* table;
    long group, rows, size, padded, kv_length, first_position;
    Scoring scoring;
    const HandedOver& handed_over;
    const bool is_shared;  // the keys of this walk are those that neighbours share
    float* sums;
    RowState* states;
    const Walk* next;  // the item after this one, or null: its first keys are fetched while the last ones are computed

    Walk(const QuireAttend& a, const Item& item, const HandedOver& handed_over, bool is_shared)
        : a(a), item(item), handed_over(handed_over), is_shared(is_shared), next(nullptr) {
        table = a.block_tables + item.sequence * a.table_stride;
        group = a.query_heads / a.kv_heads;
        rows = item.queries * group;
        size = a.head_dim;
        padded = round_up(size, WIDTH);
        kv_length = a.kv_lengths[item.sequence];
        const long queries = a.query_indptr[item.sequence + 1] - a.query_indptr[item.sequence];
        first_position = kv_length - queries + item.first_query;
        scoring = {a.scale, a.soft_cap};
    }

    long first_key() const {
        if (is_shared) return 0;
        return a.window_left < 0 ? item.shared_keys : larger(0, first_position - a.window_left);
    }
    long stop_key() const { return is_shared ? item.shared_keys : first_position + item.queries; }

    long token(long row) const { return a.query_indptr[item.sequence] + item.first_query + row / group; }
    long query_head(long head, long row) const { return (item.first_head + head) * group + row % group; }

    const T* query(long head, long row) const {
        return static_cast<const T*>(a.query) + token(row) * a.query_token_stride +
               query_head(head, row) * a.query_head_stride;
    }

    // The keys of a block that a row sees.
    void seen(const Block<T>& block, long row, long& first, long& stop) const {
        first = 0;
        stop = block.count;
        if (is_shared) return;
        const long position = first_position + row / group;
        first = a.window_left < 0 ? 0 : larger(0, position - a.window_left - block.first);
        stop = smaller(block.count, position + 1 - block.first);
    }

    template <int ROWS>
    void direct(const Block<T>& block, const Block<T>& ahead, long head, float* products) {
        constexpr int COMPUTED = ROWS == 3 ? 4 : ROWS;
        const T* queries[COMPUTED];
        float factors[ROWS];
        for (int r = 0; r < COMPUTED; r++) queries[r] = query(head, smaller(r, ROWS - 1));
        const long offset = (item.first_head + head) * size;
        direct_products<T, COMPUTED>(queries, block, ahead, offset, size, products);
        for (int r = 0; r < ROWS; r++) {
            long first, stop;
            seen(block, r, first, stop);
            float* row = products + r * KEYS;
            factors[r] = weigh(row, row, block.count, first, stop, scoring, states[head * rows + r]);
        }
        float* head_sums = sums + head * rows * padded;
        long i = 0;
        for (; i + 4 * LANES <= size; i += 4 * LANES)
            direct_sums<T, ROWS, 4>(products, factors, block, ahead, offset + i, head_sums + i, padded);
        for (; i < size; i += LANES) direct_sums<T, ROWS, 1>(products, factors, block, ahead, offset + i, head_sums + i, padded);
    }

    void direct_block(const Block<T>& block, const Block<T>& ahead, float* products) {
        for (long head = 0; head < item.heads; head++) {
            switch (rows) {
                case 1: direct<1>(block, ahead, head, products); break;
                case 2: direct<2>(block, ahead, head, products); break;
                case 3: direct<3>(block, ahead, head, products); break;
                default: direct<4>(block, ahead, head, products); break;
            }
        }
    }

    struct Packed {
        Word *queries, *keys, *values;
        float* products;
        T* weights;
    };

    void packed_block(const Block<T>& block, const Block<T>& ahead, const Packed& packed) {
        const long words = size / PER_WORD<T>, offset = item.first_head * size;
        for (long k = 0; k < ahead.count; k++) {
            fetch(ahead.keys[k] + offset, size * sizeof(T));
            fetch(ahead.keys[k] + ahead.value_offset + offset, size * sizeof(T));
        }
        const Word* keys[KEYS];
        for (long k = 0; k < block.count; k++) keys[k] = reinterpret_cast<const Word*>(block.keys[k] + offset);
        pack_columns(keys, block.count, words, packed.keys, KEYS);
        product<T>(rows, round_up(block.count, WIDTH), packed.queries, words, packed.keys, KEYS, words, packed.products,
                   KEYS, false);
        for (long r = 0; r < rows; r++) {
            long first, stop;
            seen(block, r, first, stop);
            const float factor = weigh(packed.products + r * KEYS, packed.weights + r * KEYS, block.count, first, stop,
                                       scoring, states[r]);
            if (factor != 1.0f)
                for (long i = 0; i < padded; i += LANES)
                    store(sums + r * padded + i, load(sums + r * padded + i) * factor);
        }
        pack_values(block, offset, packed.values);
        product<T>(rows, padded, reinterpret_cast<const Word*>(packed.weights), KEYS / PER_WORD<T>, packed.values, padded,
                   round_up(block.count, PER_WORD<T>) / PER_WORD<T>, sums, padded, true);
    }

    // Values as rows of words: in bfloat16 two keys' values of a dimension side by side.
    void pack_values(const Block<T>& block, long offset, Word* packed) const {
        for (long k = 0; k < block.count; k += PER_WORD<T>, packed += padded) {
            const T* first = block.keys[k] + block.value_offset + offset;
            if constexpr (PER_WORD<T> == 1) {
                memcpy(packed, first, size * sizeof(T));
            } else {
                const bool is_last = k + 1 == block.count;
                const T* second = is_last ? first : block.keys[k + 1] + block.value_offset + offset;
                long i = 0;
                for (; i + LANES <= size; i += LANES) {
                    const Words low = __builtin_convertvector(load_raw<Halves>(first + i), Words);
                    const Words high = __builtin_convertvector(load_raw<Halves>(second + i), Words);
                    const Words both = is_last ? low : low | high << 16;
                    memcpy(packed + i, &both, sizeof both);
                }
                for (; i < size; i++)
                    packed[i] = first[i].bits | (is_last ? 0 : static_cast<uint32_t>(second[i].bits) << 16);
            }
        }
    }

    // body(row's place in all tensors by token and query head, its place in `states`).
    template <class Body>
    void for_each_row(Body body) const {
        for (long head = 0; head < item.heads; head++)
            for (long r = 0; r < rows; r++) body(token(r) * a.query_heads + query_head(head, r), head * rows + r);
    }

    void begin() {
        for_each_row([&](long place, long row) {
            if (!is_shared && item.shared_keys > 0) {
                memcpy(sums + row * padded, handed_over.sums + place * padded, padded * sizeof(float));
                states[row] = handed_over.states[place];
            } else {
                memset(sums + row * padded, 0, padded * sizeof(float));
                states[row] = a.sinks ? RowState{a.sinks[place % a.query_heads], 1.0f} : RowState{NOTHING, 0.0f};
            }
        });
    }

    void finish() const {
        T* output = static_cast<T*>(a.output);
        for_each_row([&](long place, long row) {
            const float* from = sums + row * padded;
            if (is_shared) {
                memcpy(handed_over.sums + place * padded, from, padded * sizeof(float));
                handed_over.states[place] = states[row];
                return;
            }
            T* to = output + place * size;
            const float total = states[row].total;
            for_each_vector(
                size, [&](long i) { store(to + i, load(from + i) / total); },
                [&](long i, long count) { store_some(to + i, load(from + i) / total, count); });
        });
    }

    void run() {
        const bool is_direct = reads_directly<T>(a, rows);
        const long all_rows = rows * item.heads, words = size / PER_WORD<T>;
        // 64 bytes apart, so that every part begins at a cache line.
        const long sums_bytes = all_rows * padded * 4, states_bytes = round_up(all_rows * sizeof(RowState), 64);
        const long products_bytes = larger(rows, DIRECT_ROWS) * KEYS * 4, weights_bytes = rows * KEYS * 4;
        const long queries_bytes = round_up(rows * words * 4, 64), keys_bytes = KEYS * words * 4;
        char* memory = workspace(sums_bytes + states_bytes + products_bytes + weights_bytes + queries_bytes + keys_bytes +
                                 KEYS * padded * 4);
        sums = reinterpret_cast<float*>(memory);
        states = reinterpret_cast<RowState*>(memory += sums_bytes);
        Packed packed;
        packed.products = reinterpret_cast<float*>(memory += states_bytes);
        packed.weights = reinterpret_cast<T*>(memory += products_bytes);
        packed.queries = reinterpret_cast<Word*>(memory += weights_bytes);
        packed.keys = reinterpret_cast<Word*>(memory += queries_bytes);
        packed.values = reinterpret_cast<Word*>(memory += keys_bytes);
        begin();
        if (!is_direct) {
            for (long r = 0; r < rows; r++) memcpy(packed.queries + r * words, query(0, r), size * sizeof(T));
            memset(packed.values, 0, KEYS * padded * 4);  // of which the last columns stay 0
        }
        Block<T> blocks[2];
        blocks[0].find(a, table, first_key(), smaller(KEYS, stop_key() - first_key()));
        long number = 0;
        for (long key = first_key(); key < stop_key(); key += KEYS, number++) {
            const Block<T>& block = blocks[number % 2];
            Block<T>& ahead = blocks[(number + 1) % 2];
            ahead.count = 0;
            if (key + KEYS < stop_key()) {
                ahead.find(a, table, key + KEYS, smaller(KEYS, stop_key() - key - KEYS));
            } else if (next != nullptr) {
                ahead.find(a, next->table, next->first_key(), smaller(KEYS, next->stop_key() - next->first_key()));
            }
            if (is_direct) {
                direct_block(block, ahead, packed.products);
            } else {
                packed_block(block, ahead, packed);
            }
        }
        finish();
    }
};

// A list that grows, without the standard library's templates.
struct Items {
    Item* items = nullptr;
    long count = 0, room = 0;

    void add(const Item& item) {
        if (count == room) {
            room = 2 * room + 64;
            items = static_cast<Item*>(realloc(items, room * sizeof(Item)));
            if (items == nullptr) abort();
        }
        items[count++] = item;
    }

    // Tiles of `tile` queries. Where a tile's rows `are_direct`, all heads of a block one after another read memory in
    // order; a lone sequence gives each thread a head.
    template <class Direct>
    void add_tiles(const QuireAttend& a, int32_t sequence, long queries, long tile, long shared_keys, Direct are_direct) {
        for (long q = 0; q < queries; q += tile) {
            const auto some = static_cast<int32_t>(smaller(tile, queries - q));
            const int32_t heads = are_direct(some) && a.sequences > 1 ? a.kv_heads : 1;
            for (int32_t h = 0; h < a.kv_heads; h += heads)
                add({sequence, static_cast<int32_t>(q), some, h, heads, shared_keys});
        }
    }
};

template <class T>
void walk_all(const QuireAttend& a, const Items& items, const HandedOver& handed_over, bool is_shared) {
    parallel(items.count, [&](int64_t index) {
        Walk<T> walk(a, items.items[index], handed_over, is_shared);
        const Walk<T> next(a, items.items[smaller(index + 1, items.count - 1)], handed_over, is_shared);
        if (index + 1 < items.count) walk.next = &next;
        walk.run();
    });
}

// Of a run's queries: as many as make good products, and few enough that every thread has some.
inline long shared_tile(const QuireAttend& a, long queries, long group) {
    const long even = (queries * a.kv_heads + parallel_threads() - 1) / parallel_threads();
    return larger(1, smaller(TILE_ROWS / group, larger(even, DIRECT_ROWS / group)));
}

template <class T>
void attend_of(const QuireAttend& a) {
    const long group = a.query_heads / a.kv_heads, tile = larger(1, TILE_ROWS / group);
    const auto are_direct = [&](long queries) { return reads_directly<T>(a, queries * group); };
    Items shared, own;
    for (int32_t s = 0; s < a.sequences;) {
        Run run = run_from(a, s, larger(1, DIRECT_ROWS / group));
        // Two sequences gain nothing where their rows together no longer read keys where they lie: with 8 KV heads of 128
        // dimensions it takes 1.06 to 1.3 times as long.
        if (run.count == 2 && 2 * group > DIRECT_ROWS) run.keys = 0;
        if (run.keys > 0) {
            const long queries = a.query_indptr[s + run.count] - a.query_indptr[s];
            shared.add_tiles(a, s, queries, shared_tile(a, queries, group), run.keys, are_direct);
        }
        for (const int32_t stop = s + run.count; s < stop; s++) {
            const long queries = a.query_indptr[s + 1] - a.query_indptr[s];
            own.add_tiles(a, s, queries, tile, run.keys, are_direct);
        }
    }
    HandedOver handed_over{};
    if (shared.count > 0) {
        const long rows = a.query_indptr[a.sequences] * a.query_heads, padded = round_up(a.head_dim, WIDTH);
        handed_over.sums = static_cast<float*>(malloc(rows * (padded * sizeof(float) + sizeof(RowState))));
        if (handed_over.sums == nullptr) abort();
        handed_over.states = reinterpret_cast<RowState*>(handed_over.sums + rows * padded);
        walk_all<T>(a, shared, handed_over, true);
    }
    walk_all<T>(a, own, handed_over, false);
    free(handed_over.sums);
    free(shared.items);
    free(own.items);
}

}  // namespace QUIRE_ISA
