// Which sequences of a batch begin with the same pages, so that these are read once for all of them (Hydragen: Juravsky et
// al., 2024; FlashInfer's cascades). Forks, samples and hits of one prompt come one after another, so neighbours are asked.
#pragma once
#include "vector.h"

namespace QUIRE_ISA {

constexpr long SHARED_KEYS_MIN = 128;  // below, handing sums over costs more than it saves

// Neighbors [first, first + count) whose keys [0, keys) lie in the same pages, all of them seen by every query.
struct Run {
    int32_t first, count;
    long keys;
};

// Whole pages before a sequence's own queries, which each of them sees.
inline long pages_before_queries(const QuireAttend& a, long s) {
    return (a.kv_lengths[s] - (a.query_indptr[s + 1] - a.query_indptr[s])) / a.page_size;
}

inline long common_pages(const QuireAttend& a, long s, long t, long most) {
    const int32_t *mine = a.block_tables + s * a.table_stride, *other = a.block_tables + t * a.table_stride;
    const long count = smaller(most, smaller(pages_before_queries(a, s), pages_before_queries(a, t)));
    long page = 0;
    while (page < count && mine[page] == other[page]) page++;
    return page;
}

// The run that begins at `first`, of sequences that have `queries_max` queries at most. A neighbour that shares less makes
// the run's prefix shorter, and belongs to it if more is saved in all: keys * (count - 1).
inline Run run_from(const QuireAttend& a, int32_t first, long queries_max) {
    const auto has_few = [&](long s) { return a.query_indptr[s + 1] - a.query_indptr[s] <= queries_max; };
    Run run{first, 1, 0};
    if (a.window_left >= 0 || !has_few(first)) return run;
    long pages = pages_before_queries(a, first);
    for (int32_t next = first + 1; next < a.sequences && has_few(next); next++) {
        const long common = common_pages(a, first, next, pages);
        if (common * a.page_size < SHARED_KEYS_MIN || common * run.count < pages * (run.count - 1)) break;
        run = {first, run.count + 1, common * a.page_size};
        pages = common;
    }
    return run;
}

}  // namespace QUIRE_ISA
