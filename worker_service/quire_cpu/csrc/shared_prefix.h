// Finds sequences of a batch that begin with the same pages, so that these pages are read once for all these sequences
// (Hydragen: Juravsky et al., 2024; FlashInfer's cascades). Forks, samples and hits of one prompt are adjacent in a
// batch, so only neighbors are compared.
#pragma once
#include "vector.h"

namespace QUIRE_ISA {

constexpr long SHARED_KEYS_MIN = 128;  // with fewer keys, handing over the sums costs more than it saves

// The sequences [first, first + count). They share the pages of the keys [0, keys), and all queries see all these keys.
struct Run {
    int32_t first, count;
    long keys;
};

// The number of whole pages before a sequence's queries, so every query sees them.
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

// Returns the run that begins at `first`, of sequences with at most `queries_max` queries. A neighbor that shares fewer
// pages shortens the run's prefix. The neighbor joins the run if the total saving, keys * (count - 1), grows.
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
