// Sums of products of codes, by the best instructions of this CPU; elsewhere by GCC's vector extension. The sums are
// exact, so they are the same in all of them. Tests choose fewer instructions with AT_MOST.
//
// Without VNNI one instruction multiplies 8-bit codes, and adds pairs of products in 16 bits. They have room for a group's
// products with 4-bit codes: 16 * 15 * 128 = 30,720 at most. So 8-bit codes are multiplied in two halves.

#pragma once

#include "lanes.h"

#define AVX2 1
#define AVX512 2
#define VNNI 3
#ifndef AT_MOST
#define AT_MOST VNNI
#endif

#if AT_MOST >= VNNI && defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define DOT VNNI
#elif AT_MOST >= AVX512 && defined(__AVX512BW__)
#define DOT AVX512
#elif AT_MOST >= AVX2 && defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define DOT AVX2
#else
#define DOT 0
#endif

#if DOT
#include <immintrin.h>
#endif

namespace {

constexpr int STEP_BYTES = 4 * LANES;  // 4 codes of each lane

#if DOT != AVX2
constexpr int REGISTER = STEP_BYTES;  // bytes that are multiplied at once
#else
constexpr int REGISTER = STEP_BYTES / 2;
#endif

using Bytes = uint8_t __attribute__((vector_size(REGISTER)));
using Totals = int32_t __attribute__((vector_size(REGISTER)));
using Factors = float __attribute__((vector_size(REGISTER)));

#if DOT == 0 || DOT == VNNI

constexpr int CODE_BITS = 8;  // of the codes that `dot` multiplies, at most
using Sums = Totals;

// For each lane the products of 4 unsigned codes of the weight and of the same 4 codes of a row.
inline Sums dot(Sums sums, Bytes weight, int32_t row) {
#if DOT == VNNI
    return (Sums)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)weight, _mm512_set1_epi32(row));
#else
    const Words words = (Words)weight;
    for (int j = 0; j < 4; j++) sums += (Ints)(words >> 8 * j & 255) * int32_t(int8_t(row >> 8 * j));
    return sums;
#endif
}

inline Sums begin(int32_t start) { return start - Sums{}; }
inline Totals total(Sums sums, int32_t) { return sums; }

#else

constexpr int CODE_BITS = 4;
using Sums = int16_t __attribute__((vector_size(REGISTER)));  // two for each lane

inline Sums dot(Sums sums, Bytes weight, int32_t row) {
#if DOT >= AVX512
    sums += (Sums)_mm512_maddubs_epi16((__m512i)weight, _mm512_set1_epi32(row));
#else
    sums += (Sums)_mm256_maddubs_epi16((__m256i)weight, _mm256_set1_epi32(row));
#endif
    asm("" : "+v"(sums));  // it is added now: products that wait for others would need registers
    return sums;
}

inline Sums begin(int32_t) { return Sums{}; }
inline Totals total(Sums sums, int32_t start) {
#if DOT >= AVX512
    return (Totals)_mm512_madd_epi16((__m512i)sums, _mm512_set1_epi16(1)) + start;
#else
    return (Totals)_mm256_madd_epi16((__m256i)sums, _mm256_set1_epi16(1)) + start;
#endif
}

#endif

inline Factors multiply_add(Factors a, Factors b, Factors c) {
#if DOT >= AVX512
    return (Factors)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif DOT == AVX2
    return (Factors)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

inline Factors load_halves(const uint8_t *from) {  // finite numbers of 16 bits
#if DOT >= AVX512
    return (Factors)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
#elif DOT == AVX2
    return (Factors)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
#else
    Halves row;
    std::memcpy(&row, from, sizeof row);
    const Words bits = __builtin_convertvector(row, Words);
    return (Floats)((bits & 0x7fff) << 13 | (bits & 0x8000) << 16) * 0x1p112f;  // also of subnormal numbers
#endif
}

}  // namespace
