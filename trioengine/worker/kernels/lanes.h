// As many numbers at a time as a register of this CPU holds, in GCC's vector extension, which computes conditions and
// conversions of wider vectors one by one. ELEMENT (float or bfloat16) is the type of activations. Tests choose fewer
// instructions with AT_MOST.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define AVX2 1
#define AVX512 2
#define VNNI 3
#define BF16 4
#ifndef AT_MOST
#define AT_MOST BF16
#endif

#if AT_MOST >= BF16 && defined(__AVX512BF16__) && defined(__AVX512VNNI__) && defined(__AVX512BW__) && \
    defined(__AVX512DQ__)
#define INSTRUCTIONS BF16
#elif AT_MOST >= VNNI && defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define INSTRUCTIONS VNNI
#elif AT_MOST >= AVX512 && defined(__AVX512BW__)
#define INSTRUCTIONS AVX512
#elif AT_MOST >= AVX2 && defined(__AVX2__) && defined(__FMA__)
#define INSTRUCTIONS AVX2
#else
#define INSTRUCTIONS 0
#endif

// Compiled once, not in each caller: such a function does so much that a call costs nothing beside it.
#define ONE_COPY __attribute__((noinline)) inline

namespace {

constexpr int LANES = INSTRUCTIONS >= AVX512 ? 16 : INSTRUCTIONS == AVX2 ? 8 : 4;
using Floats = float __attribute__((vector_size(4 * LANES)));
using Ints = int32_t __attribute__((vector_size(4 * LANES)));
using Words = uint32_t __attribute__((vector_size(4 * LANES)));
using Halves = uint16_t __attribute__((vector_size(2 * LANES)));
using ShortInts = int16_t __attribute__((vector_size(2 * LANES)));
using SmallInts = int8_t __attribute__((vector_size(LANES)));

struct bfloat16 {
    uint16_t bits;
};

using Element = ELEMENT;

// ---- lanes ----

inline Floats widened(Floats v) { return v; }
// Widens integers by one instruction; GCC 12 compiles the conversion of a vector to six.
inline Words extended(Halves v) {
#if INSTRUCTIONS >= AVX512
    return (Words)_mm512_cvtepu16_epi32((__m256i)v);
#elif INSTRUCTIONS == AVX2
    return (Words)_mm256_cvtepu16_epi32((__m128i)v);
#else
    return __builtin_convertvector(v, Words);
#endif
}
inline Ints extended(SmallInts v) {
#if INSTRUCTIONS >= AVX512
    return (Ints)_mm512_cvtepi8_epi32((__m128i)v);
#elif INSTRUCTIONS == AVX2
    return (Ints)_mm256_cvtepi8_epi32(_mm_cvtsi64_si128((int64_t)v));
#else
    return __builtin_convertvector(v, Ints);
#endif
}

inline Floats widened(Halves v) { return (Floats)(extended(v) << 16); }
inline Floats widened(SmallInts v) { return __builtin_convertvector(extended(v), Floats); }

inline void narrow(Floats v, Floats &to) { to = v; }
inline void narrow(Floats v, Halves &to) {  // to the nearest, ties to even
    const Words bits = (Words)v, rounded = bits + 0x7fff + ((bits >> 16) & 1);
    to = __builtin_convertvector((v == v ? rounded : bits | 0x400000) >> 16, Halves);  // nan may carry into infinity
}
inline void narrow(Floats v, ShortInts &to) {  // of integers
    to = __builtin_convertvector(__builtin_convertvector(v, Ints), ShortInts);
}

template <class T>
struct Row;  // elements as they lie in memory
template <>
struct Row<float> {
    using type = Floats;
};
template <>
struct Row<bfloat16> {
    using type = Halves;
};
template <>
struct Row<int8_t> {
    using type = SmallInts;
};
template <>
struct Row<int16_t> {
    using type = ShortInts;
};

template <class T>
inline Floats load(const T *from, int count = LANES) {  // zeros behind the count
    typename Row<T>::type row{};
    std::memcpy(&row, from, count * sizeof(T));
    return widened(row);
}

template <class T>
inline void store_lanes(T *to, Floats v, int count = LANES) {
    typename Row<T>::type row;
    narrow(v, row);
    std::memcpy(to, &row, count * sizeof(T));
}

template <class Body>  // body(start, count): whole rows of lanes, whose count is a constant, and the rest
inline void for_lanes(int64_t size, Body body) {
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) body(i, LANES);
    if (i < size) body(i, int(size - i));
}

inline Floats all(float x) { return x - Floats{}; }
inline Floats larger(Floats a, Floats b) {  // `a` if one of them is nan
#if INSTRUCTIONS >= AVX512
    return (Floats)_mm512_max_ps((__m512)b, (__m512)a);
#elif INSTRUCTIONS == AVX2
    return (Floats)_mm256_max_ps((__m256)b, (__m256)a);
#else
    return a < b ? b : a;
#endif
}

inline Floats multiply_add(Floats a, Floats b, Floats c) {
#if INSTRUCTIONS >= AVX512
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif INSTRUCTIONS == AVX2
    return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__FP_FAST_FMAF)
    Floats result;
    for (int i = 0; i < LANES; i++) result[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return result;
#else
    return a * b + c;
#endif
}

// The nearest integers, ties to even, of products below 2 ** 22; where the CPU can, the products are not rounded before.
inline Floats rounded_product(Floats v, float factor) {
    const Floats shift = all(12582912.0f);  // 1.5 * 2 ** 23
    return multiply_add(v, all(factor), shift) - shift;
}

// Half of a vector: the lower one, or the upper one.
template <class Vector, bool IS_UPPER>
inline auto half(Vector v) {
    using Number = std::remove_reference_t<decltype(v[0])>;
    using Half __attribute__((vector_size(sizeof v / 2))) = Number;
#if INSTRUCTIONS >= AVX512
    if constexpr (sizeof v == 64) return (Half)_mm512_extracti64x4_epi64((__m512i)v, IS_UPPER);
#endif
    Half result;
    std::memcpy(&result, (const char *)&v + (IS_UPPER ? sizeof result : 0), sizeof result);
    return result;
}

template <class Vector>
inline auto largest_of(Vector v) {
    if constexpr (sizeof v > 16) {
        const auto a = half<Vector, false>(v), b = half<Vector, true>(v);
        return largest_of(a < b ? b : a);
    } else {
        return std::max(std::max(v[0], v[1]), std::max(v[2], v[3]));
    }
}

inline float largest(Floats v) { return largest_of(v); }
inline int32_t largest(Ints v) { return largest_of(v); }

template <class Vector>
inline auto sum_of(Vector v) {
    if constexpr (sizeof v > 16)
        return sum_of(half<Vector, false>(v) + half<Vector, true>(v));
    else
        return v[0] + v[1] + (v[2] + v[3]);
}

inline float sum(Floats v) { return sum_of(v); }
inline int32_t sum(Ints v) { return sum_of(v); }

// Combines all lanes of each of COUNT vectors, a power of 2 up to LANES, and overwrites these: LANES / COUNT lanes of the
// result, from lane i * LANES / COUNT on, are of vector i. Each round makes one vector of two: of 4 lanes and vectors a, b, c
// and d, first (a0 + a2, a1 + a3, c0 + c2, c1 + c3) of a and c, and the same of b and d, then the sums of a, b, c and d.
template <int COUNT = LANES, int HALF = LANES / 2, class Vector, class Operation>
inline Vector combine_each(Vector *vectors, Operation operation) {
    Ints own, other;  // lanes of two vectors: those whose index has the bit HALF are of the second one
    for (int i = 0; i < LANES; i++) own[i] = i & HALF ? LANES + i : i, other[i] = own[i] ^ HALF;
    for (int i = 0; i < COUNT / 2; i++) {
        const Vector a = vectors[i], b = vectors[i + COUNT / 2];
        vectors[i] = operation(__builtin_shuffle(a, b, own), __builtin_shuffle(a, b, other));
    }
    if constexpr (COUNT == 1) vectors[0] = operation(vectors[0], __builtin_shuffle(vectors[0], other & (LANES - 1)));
    if constexpr (HALF > 1) return combine_each<std::max(COUNT / 2, 1), HALF / 2>(vectors, operation);
    return vectors[0];
}

}  // namespace
