// Vectors as extensions of the compiler (GCC and Clang): one source for AVX2, AVX-512 and NEON.
//
// Everything is in the namespace of one instruction set, and the standard library's templates are not used. If two sets
// instantiated the same template, the linker would keep only one copy, with the instructions of either set.
#pragma once
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <utility>  // only for std::integer_sequence, which generates no code

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace QUIRE_ISA {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float Vec __attribute__((vector_size(LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));
typedef uint32_t Words __attribute__((vector_size(LANES * 4)));
typedef uint16_t Halves __attribute__((vector_size(LANES * 2)));
// 32 bits of a tensor: a float32, or two adjacent bfloat16.
typedef uint32_t Word __attribute__((may_alias, aligned(2)));

struct Bfloat16 {
    uint16_t bits;
};

template <class T>
constexpr int PER_WORD = sizeof(Word) / sizeof(T);

inline long round_up(long value, long unit) { return (value + unit - 1) / unit * unit; }
inline long smaller(long a, long b) { return a < b ? a : b; }
inline long larger(long a, long b) { return a > b ? a : b; }

template <class V, class P>
inline V load_raw(const P* from) {
    V value;
    memcpy(&value, from, sizeof value);
    return value;
}

inline Vec load(const float* from) { return load_raw<Vec>(from); }
inline Vec load(const Bfloat16* from) {
    return (Vec)(__builtin_convertvector(load_raw<Halves>(from), Words) << 16);
}

inline void store(float* to, Vec value) { memcpy(to, &value, sizeof value); }
inline void store(Bfloat16* to, Vec value) {
#if defined(__AVX512BF16__)
    const __m256bh rounded = _mm512_cvtneps_pbh((__m512)value);
    memcpy(to, &rounded, sizeof rounded);
#else
    const Words bits = (Words)value;
    const Words nearest_even = bits + 0x7fff + ((bits >> 16) & 1);
    const Words is_nan = (Words)(value != value);
    const Halves rounded = __builtin_convertvector(((nearest_even & ~is_nan) | ((bits | 0x400000) & is_nan)) >> 16, Halves);
    memcpy(to, &rounded, sizeof rounded);
#endif
}

// Loads the first `count` elements of a vector; the rest are zeros.
template <class T>
inline Vec load_some(const T* from, long count) {
    T padded[LANES] = {};
    memcpy(padded, from, count * sizeof(T));
    return load(padded);
}

template <class T>
inline void store_some(T* to, Vec value, long count) {
    T padded[LANES];
    store(padded, value);
    memcpy(to, padded, count * sizeof(T));
}

// Calls body(first, load, store) for each vector of a row; the last vector may be partial.
template <class Whole, class Part>
inline void for_each_vector(long size, Whole whole, Part part) {
    long i = 0;
    for (; i + LANES <= size; i += LANES) whole(i);
    if (i < size) part(i, size - i);
}

inline Vec broadcast(float value) { return value - Vec{}; }
inline Vec maximum(Vec a, Vec b) { return a > b ? a : b; }  // gives b if a is NaN

inline float sum_of(Vec value) {
    float parts[LANES], sum = 0;
    store(parts, value);
    for (int step = LANES / 2; step > 0; step /= 2)
        for (int i = 0; i < step; i++) parts[i] += parts[i + step];
    sum = parts[0];
    return sum;
}

inline float maximum_of(Vec value) {
    float parts[LANES];
    store(parts, value);
    float most = parts[0];
    for (int i = 1; i < LANES; i++) most = parts[i] > most ? parts[i] : most;
    return most;
}

// Lane j of the result is lane j ^ SWAP of `a` if the bit STEP of j is 0, and of `b` if it is 1.
template <int STEP, int SWAP, int... J>
inline Vec blend_lanes(Vec a, Vec b, std::integer_sequence<int, J...>) {
    return __builtin_shufflevector(a, b, ((J & STEP ? LANES : 0) + (J ^ SWAP))...);
}
using Lanes = std::make_integer_sequence<int, LANES>;

// Returns the sums of LANES vectors as one vector: lane i is the sum over v[i].
template <int STEP = 1>
inline Vec sums_of(const Vec* v) {
    if constexpr (STEP == LANES) {
        return v[0];
    } else {
        Vec merged[LANES / STEP / 2];
        for (int i = 0; i < LANES / STEP / 2; i++) {
            const Vec a = v[2 * i], b = v[2 * i + 1];
            merged[i] = blend_lanes<STEP, 0>(a, b, Lanes{}) + blend_lanes<STEP, STEP>(a, b, Lanes{});
        }
        return sums_of<STEP * 2>(merged);
    }
}

// Transposes LANES vectors of LANES words.
template <int STEP, int... J>
inline void exchange(Vec& a, Vec& b, std::integer_sequence<int, J...>) {
    const Vec first = __builtin_shufflevector(a, b, (J & STEP ? LANES + J - STEP : J)...);
    b = __builtin_shufflevector(a, b, (J & STEP ? LANES + J : J + STEP)...);
    a = first;
}
template <int STEP = 1>
inline void transpose(Vec* v) {
    if constexpr (STEP < LANES) {
        for (int i = 0; i < LANES; i++)
            if (!(i & STEP)) exchange<STEP>(v[i], v[i + STEP], Lanes{});
        transpose<STEP * 2>(v);
    }
}

// e^x with an error of one or two units in the last place (the polynomial of Cephes' expf); 0 below -87; NaN for NaN.
inline Vec exponential(Vec x) {
    const Vec rounding = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    const Vec low = broadcast(-87.0f), high = broadcast(88.0f);
    const Vec is_tiny_cut = x < low ? low : x;
    const Vec y = is_tiny_cut > high ? high : is_tiny_cut;
    const Vec shifted = y * 1.44269504088896341f + rounding;
    const Vec whole = shifted - rounding;
    const Vec r = y - whole * 0.693359375f - whole * -2.12194440e-4f;
    Vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const Ints exponent = ((Ints)shifted - 0x4b400000 + 127) << 23;
    const Vec power = p * (Vec)exponent;
    return x < low ? Vec{} : power;
}

// tanh(x), also precise near 0, where the quotient below would lose digits.
inline Vec hyperbolic_tangent(Vec x) {
    const Vec square = x * x;
    Vec series = square * (62.0f / 2835) - 17.0f / 315;
    series = series * square + 2.0f / 15;
    series = series * square - 1.0f / 3;
    series = x + x * square * series;
    const Vec quotient = 1.0f - 2.0f / (exponential(2.0f * x) + 1.0f);
    return square < 0.0625f ? series : quotient;
}

inline Vec silu(Vec x) { return x / (1.0f + exponential(-x)); }

// The tanh approximation of GELU, x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))), with tanh(y) = 2 / (1 + e^-2y) - 1.
inline Vec gelu_tanh(Vec x) { return x / (1.0f + exponential(-1.5957691216057308f * (x + 0.044715f * x * x * x))); }

// sum + a * b of float32, or of two pairs of bfloat16, lane by lane.
template <class T>
inline Vec multiply_add(Words a, Words b, Vec sum);
template <>
inline Vec multiply_add<float>(Words a, Words b, Vec sum) {
    return sum + (Vec)a * (Vec)b;
}
template <>
inline Vec multiply_add<Bfloat16>(Words a, Words b, Vec sum) {
#if defined(__AVX512BF16__)
    return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
    sum = sum + (Vec)(a << 16) * (Vec)(b << 16);
    return sum + (Vec)(a & 0xffff0000u) * (Vec)(b & 0xffff0000u);
#endif
}

inline Words all_lanes(Word word) { return Words{} + static_cast<uint32_t>(word); }

// A thread's memory, which every call reuses; it grows to the largest request.
inline char* workspace(size_t bytes) {
    static thread_local char* memory = nullptr;
    static thread_local size_t size = 0;
    if (size < bytes) {
        free(memory);
        size = bytes + bytes / 2;
        memory = static_cast<char*>(aligned_alloc(64, round_up(static_cast<long>(size), 64)));
        if (memory == nullptr) abort();
    }
    return memory;
}

// Calls body(i) for every i below count, on all threads.
template <class Body>
inline void parallel(int64_t count, Body body) {
    run_parallel(count, [](void* context, int64_t index) { (*static_cast<Body*>(context))(index); }, &body);
}

}  // namespace QUIRE_ISA
