// One set of kernels for each instruction set. `kernels.cpp` is compiled once for each, with QUIRE_ISA its name.
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

// Calls body(context, i) for every i below count, on as many threads as `quire_threads` said.
void run_parallel(int64_t count, void (*body)(void* context, int64_t index), void* context);

// How many threads that is.
int parallel_threads();
