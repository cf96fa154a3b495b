// Attention over pages, one block of keys after another, with online softmax.
//
//   few rows (decode)   `direct.h`: keys and values are read in place, a block for all heads before the next block
//   some rows           `packed.h`: a block's keys and values are packed first, once for all rows
//   many rows (prompts) `lanes.h`: a row is a vector lane, up to 64 rows at a time, and nothing is packed
//
// Keys that neighboring sequences share (`shared_prefix.h`) come first, for the rows of all these sequences. The walk
// through a sequence's own keys continues from each row's sums.
//
// The rows of a KV head are the query heads that share it, query by query: row = query * group + head in the group.
#pragma once
#include "direct.h"
#include "lanes.h"
#include "packed.h"
#include "shared_prefix.h"

namespace QUIRE_ISA {

constexpr long TILE_ROWS = 64;  // approximate rows of a tile of queries

// A growing list that does without the standard library's templates.
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

    // Adds tiles of `tile` queries. If a tile's rows `are_direct`, its item has all heads, so that memory is read in order.
    // A lone sequence is split by heads instead, so that each thread has an item.
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
        const Walk<T> walk(a, items.items[index], handed_over, is_shared);
        const Walk<T> after(a, items.items[smaller(index + 1, items.count - 1)], handed_over, is_shared);
        const Walk<T>* next = index + 1 < items.count ? &after : nullptr;
        if (reads_directly<T>(a, walk.rows)) {
            walk.run(DirectWay<T>(walk), next);
        } else if (fills_lanes<T>(walk.rows)) {
            walk.run(LaneWay<T>(walk), next);
        } else {
            walk.run(PackedWay<T>(walk), next);
        }
    });
}

// The queries per tile of a run: enough for efficient products, and few enough that every thread has a tile.
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
        // Two sequences gain nothing if together they have too many rows to read keys in place: with 8 KV heads of 128
        // dimensions, sharing takes 1.06 to 1.3 times as long.
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
