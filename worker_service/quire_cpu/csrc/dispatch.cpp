// The library's functions. They call the best set of kernels that this CPU can run, and choose the threads.
#include "kernels.h"

#include <string.h>

extern const Kernels kernels_baseline;
#if defined(__x86_64__)
extern const Kernels kernels_avx2, kernels_avx512, kernels_avx512bf16;
#endif

namespace {

struct Candidate {
    const Kernels* kernels;
    bool is_supported;
};

constexpr int COUNT_MAX = 4;

// Lists the sets of kernels, best first.
int candidates(Candidate* found) {
    int count = 0;
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#if defined(QUIRE_HAS_avx512bf16)
    found[count++] = {&kernels_avx512bf16, avx512 && __builtin_cpu_supports("avx512bf16")};
#endif
#if defined(QUIRE_HAS_avx512)
    found[count++] = {&kernels_avx512, avx512};
#endif
#if defined(QUIRE_HAS_avx2)
    found[count++] = {&kernels_avx2, avx2};
#endif
    (void)avx512;  // unused if an old compiler supports none of these sets
#endif
    found[count++] = {&kernels_baseline, true};
    return count;
}

const Kernels* best() {
    Candidate found[COUNT_MAX];
    const int count = candidates(found);
    for (int i = 0; i < count; i++)
        if (found[i].is_supported) return found[i].kernels;
    return &kernels_baseline;
}

const Kernels* chosen = best();

// The entry point of the OpenMP library that torch has loaded. Sharing torch's threads avoids twice as many threads as
// cores.
using Region = void (*)(void (*)(void*), void*, unsigned, unsigned);
Region region = nullptr;
int thread_count = 1;

struct Work {
    int64_t next, count;
    void (*body)(void*, int64_t);
    void* context;
};

void take_work(void* argument) {
    auto* work = static_cast<Work*>(argument);
    for (;;) {
        const int64_t index = __atomic_fetch_add(&work->next, 1, __ATOMIC_RELAXED);
        if (index >= work->count) return;
        work->body(work->context, index);
    }
}

}  // namespace

void run_parallel(int64_t count, void (*body)(void*, int64_t), void* context) {
    if (region == nullptr || thread_count < 2 || count < 2) {
        for (int64_t index = 0; index < count; index++) body(context, index);
        return;
    }
    Work work{0, count, body, context};
    region(take_work, &work, count < thread_count ? static_cast<unsigned>(count) : thread_count, 0);
}

int parallel_threads() { return region == nullptr ? 1 : thread_count; }

const char* quire_instruction_sets(void) {
    static char names[128];
    names[0] = 0;
    Candidate found[COUNT_MAX];
    const int count = candidates(found);
    for (int i = 0; i < count; i++) {
        if (!found[i].is_supported) continue;
        if (names[0]) strcat(names, ",");
        strcat(names, found[i].kernels->name);
    }
    return names;
}

int quire_use(const char* instruction_set) {
    Candidate found[COUNT_MAX];
    const int count = candidates(found);
    for (int i = 0; i < count; i++) {
        if (found[i].is_supported && strcmp(found[i].kernels->name, instruction_set) == 0) {
            chosen = found[i].kernels;
            return 0;
        }
    }
    return -1;
}

void quire_threads(void* gomp_parallel, int count) {
    region = reinterpret_cast<Region>(gomp_parallel);
    thread_count = count;
}

void quire_attend(const QuireAttend* arguments) { chosen->attend(arguments); }
void quire_append(const QuireAppend* arguments) { chosen->append(arguments); }
void quire_rotate(const QuireRotate* arguments) { chosen->rotate(arguments); }
void quire_norm(const QuireNorm* arguments) { chosen->norm(arguments); }
void quire_linear(const QuireLinear* arguments) { chosen->linear(arguments); }
void quire_pack(const QuirePack* arguments) { chosen->pack(arguments); }
void quire_convolve(const QuireConvolve* arguments) { chosen->convolve(arguments); }
void quire_scan(const QuireScan* arguments) { chosen->scan(arguments); }
void quire_draw(const QuireDraw* arguments) { chosen->draw(arguments); }
void quire_greedy(const QuireGreedy* arguments) { chosen->greedy(arguments); }
