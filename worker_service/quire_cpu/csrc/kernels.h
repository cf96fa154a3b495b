// One set of kernels per instruction set. `kernels.cpp` is compiled once per set, with QUIRE_ISA defined as its name.
#pragma once
#include "quire_cpu.h"

struct Kernels {
    const char* name;
    void (*attend)(const QuireAttend*);
    void (*append)(const QuireAppend*);
    void (*rotate)(const QuireRotate*);
    void (*norm)(const QuireNorm*);
    void (*linear)(const QuireLinear*);
    void (*pack)(const QuirePack*);
    void (*convolve)(const QuireConvolve*);
    void (*scan)(const QuireScan*);
    void (*draw)(const QuireDraw*);
    void (*greedy)(const QuireGreedy*);
};

// Calls body(context, i) for every i below count, on the number of threads that `quire_threads` has set.
void run_parallel(int64_t count, void (*body)(void* context, int64_t index), void* context);

// The number of threads that `run_parallel` uses.
int parallel_threads();
