// Sums of products of codes, by the best instructions of this CPU; elsewhere by GCC's vector extension. The sums are
// exact, so they are the same in all of them.
//
// Without VNNI one instruction multiplies 8-bit codes, and adds pairs of products in 16 bits. They have room for a group's
// products with 4-bit codes: 16 * 15 * 128 = 30,720 at most. So 8-bit codes are multiplied in two halves.

#pragma once

#include "lanes.h"

namespace {

using Bytes = uint8_t __attribute__((vector_size(4 * LANES)));

#if INSTRUCTIONS == 0 || INSTRUCTIONS >= VNNI

constexpr int CODE_BITS = 8;  // of the codes that `dot` multiplies, at most
using Sums = Ints;

// For each lane the products of 4 unsigned codes of the weight and of the same 4 codes of a row.
inline Sums dot(Sums sums, Bytes weight, int32_t row) {
#if INSTRUCTIONS >= VNNI
    return (Sums)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)weight, _mm512_set1_epi32(row));
#else
    const Words words = (Words)weight;
    for (int j = 0; j < 4; j++) sums += (Ints)(words >> 8 * j & 255) * int32_t(int8_t(row >> 8 * j));
    return sums;
#endif
}

inline Sums begin(int32_t start) { return start - Sums{}; }
inline Ints total(Sums sums, int32_t) { return sums; }

#else

constexpr int CODE_BITS = 4;
using Sums = int16_t __attribute__((vector_size(4 * LANES)));  // two for each lane

inline Sums dot(Sums sums, Bytes weight, int32_t row) {
#if INSTRUCTIONS >= AVX512
    sums += (Sums)_mm512_maddubs_epi16((__m512i)weight, _mm512_set1_epi32(row));
#else
    sums += (Sums)_mm256_maddubs_epi16((__m256i)weight, _mm256_set1_epi32(row));
#endif
    asm("" : "+v"(sums));  // it is added now: products that wait for others would need registers
    return sums;
}

inline Sums begin(int32_t) { return Sums{}; }
inline Ints total(Sums sums, int32_t start) {
#if INSTRUCTIONS >= AVX512
    return (Ints)_mm512_madd_epi16((__m512i)sums, _mm512_set1_epi16(1)) + start;
#else
    return (Ints)_mm256_madd_epi16((__m256i)sums, _mm256_set1_epi16(1)) + start;
#endif
}

#endif

inline Floats multiply_add(Floats a, Floats b, Floats c) {
#if INSTRUCTIONS >= AVX512
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif INSTRUCTIONS == AVX2
    return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

#if INSTRUCTIONS >= BF16
// For each lane the products of two numbers of bfloat16 of the weight and of the same two of a row, which share a word.
// The upper ones are added first. Subnormal numbers, also sums, are taken as 0.
inline Floats add_pair(Floats sums, Words weight, uint32_t row) {
    return (Floats)_mm512_dpbf16_ps((__m512)sums, (__m512bh)weight, (__m512bh)_mm512_set1_epi32(int(row)));
}
#endif

inline Floats load_halves(const uint8_t *from) {  // finite numbers of 16 bits
#if INSTRUCTIONS >= AVX512
    return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
#elif INSTRUCTIONS == AVX2
    return (Floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
#else
    Halves row;
    std::memcpy(&row, from, sizeof row);
    const Words bits = __builtin_convertvector(row, Words);
    return (Floats)((bits & 0x7fff) << 13 | (bits & 0x8000) << 16) * 0x1p112f;  // also of subnormal numbers
#endif
}

}  // namespace
