// Sums of products of codes, by the best instructions of this CPU; elsewhere by GCC's vector extension. The sums are
// exact, so they are the same in all of them.
//
// Without VNNI one instruction multiplies 8-bit codes, and adds pairs of products in 16 bits. They have room for a group's
// products with 4-bit codes: 16 * 15 * 128 = 30,720 at most. So 8-bit codes are multiplied in two halves.

#pragma once

#include "lanes.h"

namespace {

using Bytes = uint8_t __attribute__((vector_size(4 * LANES)));
using Longs = int64_t __attribute__((vector_size(4 * LANES)));

#if INSTRUCTIONS == 0 || INSTRUCTIONS >= VNNI

constexpr int CODE_BITS = 8;  // of the codes that `dot` multiplies, at most
using Sums = Ints;

// For each lane the products of 4 unsigned codes of the weight and 4 codes of a row: its lower four codes are for even
// lanes, the upper ones for odd lanes.
inline Sums dot(Sums sums, Bytes weight, int64_t row) {
#if INSTRUCTIONS >= VNNI
    return (Sums)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)weight, _mm512_set1_epi64(row));
#else
    const Words words = (Words)weight, codes = (Words)(row - Longs{});
    for (int j = 0; j < 4; j++) sums += (Ints)(words >> 8 * j & 255) * ((Ints)(codes << (24 - 8 * j)) >> 24);
    return sums;
#endif
}

// Sums begin with two numbers, for even lanes and for odd ones; sums in 16 bits get them at the end.
inline Sums begin(int64_t starts) { return (Ints)(starts - Longs{}); }
inline Ints total(Sums sums, int64_t) { return sums; }

#else

constexpr int CODE_BITS = 4;
using Sums = int16_t __attribute__((vector_size(4 * LANES)));  // two for each lane

inline Sums dot(Sums sums, Bytes weight, int64_t row) {
#if INSTRUCTIONS >= AVX512
    sums += (Sums)_mm512_maddubs_epi16((__m512i)weight, _mm512_set1_epi64(row));
#else
    sums += (Sums)_mm256_maddubs_epi16((__m256i)weight, _mm256_set1_epi64x(row));
#endif
    asm("" : "+v"(sums));  // it is added now: products that wait for others would need registers
    return sums;
}

inline Sums begin(int64_t) { return Sums{}; }
inline Ints total(Sums sums, int64_t starts) {
#if INSTRUCTIONS >= AVX512
    return (Ints)_mm512_madd_epi16((__m512i)sums, _mm512_set1_epi16(1)) + (Ints)(starts - Longs{});
#else
    return (Ints)_mm256_madd_epi16((__m256i)sums, _mm256_set1_epi16(1)) + (Ints)(starts - Longs{});
#endif
}

#endif

#if INSTRUCTIONS >= BF16
// For each lane the products of two numbers of bfloat16 of the weight and of the same two of a row, which share a word.
// The upper ones are added first. Subnormal numbers, also sums, are taken as 0.
inline Floats add_pair(Floats sums, Words weight, uint32_t row) {
    return (Floats)_mm512_dpbf16_ps((__m512)sums, (__m512bh)weight, (__m512bh)_mm512_set1_epi32(int(row)));
}
#endif

// For each lane the products of two integers of 16 bits of the weight and of the same two of a row, which share a word. Sums
// may overflow on the way.
inline Words add_products(Words sums, Words weight, uint32_t row) {
#if INSTRUCTIONS >= VNNI
    return (Words)_mm512_dpwssd_epi32((__m512i)sums, (__m512i)weight, _mm512_set1_epi32(int(row)));
#elif INSTRUCTIONS >= AVX512
    return sums + (Words)_mm512_madd_epi16((__m512i)weight, _mm512_set1_epi32(int(row)));
#elif INSTRUCTIONS == AVX2
    return sums + (Words)_mm256_madd_epi16((__m256i)weight, _mm256_set1_epi32(int(row)));
#else
    const Ints lower = (Ints)(weight << 16) >> 16, upper = (Ints)weight >> 16;
    return sums + (Words)(lower * int16_t(row)) + (Words)(upper * int16_t(row >> 16));
#endif
}

// Multiplies integers by their scales, and adds neighbours: even lanes are one group, odd lanes the other. A word has the
// scales of both groups, 16 bits each, of the weight or of a row. The product of two scales is divided by 2 ** 15, to the
// nearest. Of 4 lanes of results two are of the first integers, and two of the second.
inline Words scaled(Ints first, Ints second, Words weight, uint32_t row) {
#if INSTRUCTIONS >= AVX512
    const __m512i scales = _mm512_mulhrs_epi16((__m512i)weight, _mm512_set1_epi32(int(row)));
    return (Words)_mm512_madd_epi16(_mm512_packs_epi32((__m512i)first, (__m512i)second), scales);
#elif INSTRUCTIONS == AVX2
    const __m256i scales = _mm256_mulhrs_epi16((__m256i)weight, _mm256_set1_epi32(int(row)));
    return (Words)_mm256_madd_epi16(_mm256_packs_epi32((__m256i)first, (__m256i)second), scales);
#else
    Ints sums{};
    for (int lane = 0; lane < LANES; lane++)
        for (int i = 0; i < 2; i++) {
            const int32_t integer = std::clamp((lane < 2 ? first : second)[lane % 2 * 2 + i], -32768, 32767);
            const int32_t scale = int16_t(weight[lane] >> 16 * i) * int16_t(row >> 16 * i);
            sums[lane] += integer * ((scale + (1 << 14)) >> 15);
        }
    return (Words)sums;
#endif
}

}  // namespace
