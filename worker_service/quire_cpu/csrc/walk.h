// The common part of all walks through a sequence's keys: queries, keys, their addresses, and prefetching of the next block.
#pragma once
#include "product.h"
#include "softmax.h"

namespace QUIRE_ISA {

constexpr long CACHE_LINE = 64;

// The queries [first_query, first_query + queries) of a sequence for some KV heads, and the number of first keys that its
// neighbors share. During the walk over shared keys, the queries are those of all neighbors, counted from the first one.
struct Item {
    int32_t sequence, first_query, queries, first_head, heads;
    long shared_keys;
};

// Each row's sums over shared keys: `sums` is `[tokens, query_heads, padded head_dim]`, `states` `[tokens, query_heads]`.
struct HandedOver {
    float* sums;
    RowState* states;
};

// Prefetches the next block. Hardware cannot predict it, because pages can be anywhere. Data goes to the L2 cache (locality
// 2): L1 has no room for a block of all heads, and allows fewer outstanding requests.
inline void fetch(const void* from, long bytes) {
    for (long i = 0; i < bytes; i += CACHE_LINE) __builtin_prefetch(static_cast<const char*>(from) + i, 0, 2);
}

// The addresses of a block's keys. A value is `value_offset` elements behind its key.
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

    // Prefetches the keys and values of some heads; `offset` is the first head's offset in a key.
    void fetch_heads(long offset, long size) const {
        for (long k = 0; k < count; k++) {
            fetch(keys[k] + offset, size * sizeof(T));
            fetch(keys[k] + value_offset + offset, size * sizeof(T));
        }
    }

    // Packs values as rows of words, `stride` words apart. In bfloat16 a word holds two keys' values of one dimension; an
    // unpaired last key is paired with 0.
    void pack_values(long offset, long size, Word* packed, long stride) const {
        for (long k = 0; k < count; k += PER_WORD<T>, packed += stride) {
            const T* low = keys[k] + value_offset + offset;
            if constexpr (PER_WORD<T> == 1) {
                memcpy(packed, low, size * sizeof(T));
            } else {
                const bool is_last = k + 1 == count;
                const T* high = is_last ? low : keys[k + 1] + value_offset + offset;
                long i = 0;
                for (; i + LANES <= size; i += LANES) {
                    const Words below = __builtin_convertvector(load_raw<Halves>(low + i), Words);
                    const Words above = __builtin_convertvector(load_raw<Halves>(high + i), Words);
                    const Words both = is_last ? below : below | above << 16;
                    memcpy(packed + i, &both, sizeof both);
                }
                for (; i < size; i++) packed[i] = low[i].bits | (is_last ? 0 : static_cast<uint32_t>(high[i].bits) << 16);
            }
        }
    }
};

// Walks through the keys of an item, block by block. A `Way` has begin(), block(block, ahead) and finish(), and owns the
// memory that it needs.
template <class T>
struct Walk {
    const QuireAttend& a;
    const Item& item;
    const int32_t* table;
    long group, rows, size, kv_length, first_position;
    Scoring scoring;
    const HandedOver& handed_over;
    const bool is_shared;  // whether this walk covers the keys that neighbors share

    Walk(const QuireAttend& a, const Item& item, const HandedOver& handed_over, bool is_shared)
        : a(a), item(item), handed_over(handed_over), is_shared(is_shared) {
        table = a.block_tables + item.sequence * a.table_stride;
        group = a.query_heads / a.kv_heads;
        rows = item.queries * group;
        size = a.head_dim;
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
    bool is_handed_over() const { return !is_shared && item.shared_keys > 0; }

    long token(long row) const { return a.query_indptr[item.sequence] + item.first_query + row / group; }
    long query_head(long head, long row) const { return (item.first_head + head) * group + row % group; }
    // A row's index in tensors that are indexed by token and query head.
    long place(long head, long row) const { return token(row) * a.query_heads + query_head(head, row); }

    const T* query(long head, long row) const {
        return static_cast<const T*>(a.query) + token(row) * a.query_token_stride +
               query_head(head, row) * a.query_head_stride;
    }

    // Finds the keys of a block that a row sees.
    void seen(const Block<T>& block, long row, long& first, long& stop) const {
        first = 0;
        stop = block.count;
        if (is_shared) return;
        const long position = first_position + row / group;
        first = a.window_left < 0 ? 0 : larger(0, position - a.window_left - block.first);
        stop = smaller(block.count, position + 1 - block.first);
    }

    // The state of a row before any key.
    RowState first_state(long place) const {
        return a.sinks ? RowState{a.sinks[place % a.query_heads], 1.0f} : RowState{NOTHING, 0.0f};
    }

    // `next` is the following item, or null. Its first keys are prefetched while this item's last keys are computed.
    template <class Way>
    void run(Way way, const Walk* next) const {
        way.begin();
        Block<T> blocks[2];
        blocks[0].find(a, table, first_key(), smaller(KEYS, stop_key() - first_key()));
        long number = 0;
        for (long key = first_key(); key < stop_key(); key += KEYS, number++) {
            Block<T>& ahead = blocks[(number + 1) % 2];
            ahead.count = 0;
            if (key + KEYS < stop_key()) {
                ahead.find(a, table, key + KEYS, smaller(KEYS, stop_key() - key - KEYS));
            } else if (next != nullptr) {
                ahead.find(a, next->table, next->first_key(), smaller(KEYS, next->stop_key() - next->first_key()));
            }
            way.block(blocks[number % 2], ahead);
        }
        way.finish();
    }
};

// Each row's sums so far: `sums` is `[heads * rows, padded head_dim]`.
template <class T>
struct RowSums {
    const Walk<T>& walk;
    float* sums;
    RowState* states;

    // Calls body(the row's index in all tensors, its index here) for each row.
    template <class Body>
    void for_each_row(Body body) const {
        for (long head = 0; head < walk.item.heads; head++)
            for (long r = 0; r < walk.rows; r++) body(walk.place(head, r), head * walk.rows + r);
    }

    void begin() const {
        const long padded = round_up(walk.size, WIDTH);
        for_each_row([&](long place, long row) {
            if (walk.is_handed_over()) {
                memcpy(sums + row * padded, walk.handed_over.sums + place * padded, padded * sizeof(float));
                states[row] = walk.handed_over.states[place];
            } else {
                memset(sums + row * padded, 0, padded * sizeof(float));
                states[row] = walk.first_state(place);
            }
        });
    }

    void finish() const {
        const long size = walk.size, padded = round_up(size, WIDTH);
        T* output = static_cast<T*>(walk.a.output);
        for_each_row([&](long place, long row) {
            const float* from = sums + row * padded;
            if (walk.is_shared) {
                memcpy(walk.handed_over.sums + place * padded, from, padded * sizeof(float));
                walk.handed_over.states[place] = states[row];
                return;
            }
            T* to = output + place * size;
            const float total = states[row].total;
            for_each_vector(
                size, [&](long i) { store(to + i, load(from + i) / total); },
                [&](long i, long count) { store_some(to + i, load(from + i) / total, count); });
        });
    }
};

}  // namespace QUIRE_ISA
