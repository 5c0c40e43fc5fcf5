// Matrix products of integers: activations are quantized to 8 bits in groups of 32, between the least and the greatest
// of a group, and multiplied with the codes of the weights. The sums of a group are integers, hence exact; groups are
// summed in float32 in their order, for every row and in every tile alike. So a row has the same bits whatever rows are
// beside it, and with any number of threads.
//
// A weight lies in panels of 16 outputs, of which two at a time are read as one stream: for each group the codes of
// both, their scales, the totals of the weights, by which offsets are multiplied, and their minima. A group of a panel
// is 8 steps of 16 outputs x 4 inputs, each step 64 bytes; with 4 bits two steps share them, the first in the low halves.
//
// With PORTABLE, for tests, no instructions of a CPU are named.

#pragma once

#include "lanes.h"

#if defined(__AVX512VNNI__) && defined(__AVX512F__) && !PORTABLE
#include <immintrin.h>
#define HAS_VNNI 1
#else
#define HAS_VNNI 0
#endif

namespace {

using Element = ELEMENT;
using Bytes = uint8_t __attribute__((vector_size(4 * LANES)));
using SmallInts = int8_t __attribute__((vector_size(LANES)));

constexpr int GROUP = 32;
constexpr int STEPS = GROUP / 4;
constexpr int STEP_BYTES = 4 * LANES;
constexpr int TILE_ROWS = HAS_VNNI ? 4 : 1;  // of a tile, at most; without the instruction there are no registers for more
constexpr int PANELS = 2;    // of a tile, at most: its sums, 8 integer and 8 float, are in registers
constexpr int BLOCK = 128;   // rows that one task computes, whose activations stay in the second cache

struct Activations {  // [rows, groups] of each: an activation is about its code * scale + offset
    int8_t *codes;    // and GROUP
    float *scales, *offsets;
    float *sums;      // the scale times the sum of the codes: the factor of a minimum
    int32_t *counts;  // the sum of the codes: the factor of a zero
};

struct Weight {
    const uint8_t *data;  // [panels / PANELS, groups] of all that a tile needs; a last panel alone in the same way
    const Element *bias;  // [panels * LANES], or null
    int64_t panels, groups;
    int32_t zero, bits;
    bool has_minima;
};

constexpr int FACTOR_BYTES = 2 * LANES;  // of a panel's scales, totals or minima, in float16

// ---- the instructions that differ ----

// For each lane the products of 4 unsigned codes of the weight and of the same 4 codes of a row.
inline Ints dot(Ints sums, Bytes weight, int32_t row) {
#if HAS_VNNI
    return (Ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)weight, _mm512_set1_epi32(row));
#else
    const Words words = (Words)weight;
    for (int j = 0; j < 4; j++) sums += (Ints)(words >> 8 * j & 255) * int32_t(int8_t(row >> 8 * j));
    return sums;
#endif
}

inline Floats multiply_add(Floats a, Floats b, Floats c) {
#if HAS_VNNI
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
    return a * b + c;
#endif
}

inline Floats load_halves(const uint8_t *from) {  // finite numbers
#if HAS_VNNI
    return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
#else
    Halves row;
    std::memcpy(&row, from, sizeof row);
    const Words bits = __builtin_convertvector(row, Words);
    return (Floats)((bits & 0x7fff) << 13 | (bits & 0x8000) << 16) * 0x1p112f;  // also of subnormal numbers
#endif
}

// ---- a tile ----

inline Bytes load_bytes(const uint8_t *from) {
    Bytes result;
    std::memcpy(&result, from, sizeof result);
    return result;
}

// The integer sums of one group, whose codes begin at `weight`.
template <int BITS, int COUNT, int WIDTH>
inline __attribute__((always_inline)) void add_group(Ints (&sums)[COUNT][WIDTH], const uint8_t *weight, const int8_t *row,
                                                     int64_t stride) {
    constexpr int SHARED = 8 / BITS;  // steps in the same bytes
    constexpr int BYTES = GROUP * LANES / SHARED;
#pragma GCC unroll 8
    for (int step = 0; step < STEPS; step += SHARED) {
        Bytes codes[WIDTH];
#pragma GCC unroll 2
        for (int p = 0; p < WIDTH; p++) codes[p] = load_bytes(weight + p * BYTES + step / SHARED * STEP_BYTES);
#pragma GCC unroll 2
        for (int part = 0; part < SHARED; part++)
#pragma GCC unroll 4
            for (int r = 0; r < COUNT; r++) {
                int32_t four;
                std::memcpy(&four, row + r * stride + 4 * (step + part), 4);
#pragma GCC unroll 4
                for (int p = 0; p < WIDTH; p++)
                    sums[r][p] = dot(sums[r][p], BITS == 8 ? codes[p] : part == 0 ? codes[p] & 15 : codes[p] >> 4, four);
            }
    }
}

template <int BITS, int COUNT, int WIDTH>
void tile(const Activations &x, const Weight &w, int64_t row, int64_t panel, Element *out) {
    constexpr int CODES = GROUP * LANES * BITS / 8;  // bytes
    const int64_t panel_bytes = CODES + (w.has_minima ? 3 : 2) * FACTOR_BYTES;
    const uint8_t *group = w.data + panel * w.groups * panel_bytes;
    Floats results[COUNT][WIDTH]{};
    for (int64_t g = 0; g < w.groups; g++, group += WIDTH * panel_bytes) {
        const int64_t at = row * w.groups + g;  // of the first row
        const uint8_t *scales = group + WIDTH * CODES, *totals = scales + WIDTH * FACTOR_BYTES;
        const uint8_t *minima = totals + WIDTH * FACTOR_BYTES;
        Ints sums[COUNT][WIDTH];
        for (int r = 0; r < COUNT; r++)
            for (int p = 0; p < WIDTH; p++) sums[r][p] = -w.zero * x.counts[at + r * w.groups] - Ints{};
        add_group<BITS, COUNT, WIDTH>(sums, group, x.codes + at * GROUP, w.groups * GROUP);
        for (int p = 0; p < WIDTH; p++) {
            const Floats scale = load_halves(scales + p * FACTOR_BYTES);
            for (int r = 0; r < COUNT; r++)
                results[r][p] = multiply_add(__builtin_convertvector(sums[r][p], Floats),
                                             scale * x.scales[at + r * w.groups], results[r][p]);
            const Floats total = load_halves(totals + p * FACTOR_BYTES);
            for (int r = 0; r < COUNT; r++)
                results[r][p] = multiply_add(total, all(x.offsets[at + r * w.groups]), results[r][p]);
            if (!w.has_minima) continue;
            const Floats minimum = load_halves(minima + p * FACTOR_BYTES);
            for (int r = 0; r < COUNT; r++)
                results[r][p] = multiply_add(minimum, all(x.sums[at + r * w.groups]), results[r][p]);
        }
    }
    for (int p = 0; p < WIDTH; p++) {
        const int64_t column = (panel + p) * LANES;
        const Floats bias = w.bias == nullptr ? Floats{} : load(w.bias + column);
        for (int r = 0; r < COUNT; r++)
            store_lanes(out + (row + r) * w.panels * LANES + column, results[r][p] + bias);
    }
}

template <int BITS, int WIDTH>
void tiles(const Activations &x, const Weight &w, int64_t row, int64_t end, int64_t panel, Element *out) {
    for (; row + TILE_ROWS <= end; row += TILE_ROWS) tile<BITS, TILE_ROWS, WIDTH>(x, w, row, panel, out);
    if constexpr (TILE_ROWS > 1) switch (end - row) {
        case 3: return tile<BITS, 3, WIDTH>(x, w, row, panel, out);
        case 2: return tile<BITS, 2, WIDTH>(x, w, row, panel, out);
        case 1: return tile<BITS, 1, WIDTH>(x, w, row, panel, out);
    }
}

constexpr int64_t AT_ONCE = 2 * PANELS;  // that a task computes

inline int64_t num_pieces(const Weight &w) { return (w.panels + AT_ONCE - 1) / AT_ONCE; }

template <int BITS>
void task(const Activations &x, const Weight &w, int64_t rows, int64_t number, Element *out) {
    const int64_t row = number / num_pieces(w) * BLOCK, end = std::min(row + BLOCK, rows);
    const int64_t first = number % num_pieces(w) * AT_ONCE, last = std::min(first + AT_ONCE, w.panels);
    for (int64_t panel = first; panel < last; panel += PANELS)
        if (panel + PANELS <= last)
            tiles<BITS, PANELS>(x, w, row, end, panel, out);
        else
            tiles<BITS, 1>(x, w, row, end, panel, out);
}

// The threads of a parallel region take tasks, some panels for a block of rows, from one counter, and wait for the last.
// out [rows, panels * LANES].
inline void product(const Activations &x, const Weight &w, int64_t rows, Element *out) {
    const int64_t tasks = num_pieces(w) * ((rows + BLOCK - 1) / BLOCK);
#pragma omp for schedule(guided)
    for (int64_t number = 0; number < tasks; number++)
        w.bits == 4 ? task<4>(x, w, rows, number, out) : task<8>(x, w, rows, number, out);
}

// ---- activations ----

// The nearest integers, ties to even, of products below 2 ** 22, which are not rounded before.
inline Floats rounded_product(Floats v, float factor) {
    const Floats shift = all(12582912.0f);  // 1.5 * 2 ** 23
    return multiply_add(v, all(factor), shift) - shift;
}

inline float least(Floats v) { return -largest(-v); }

// Numbers that are not finite make the scale of their group nan, and with it all results of their row.
inline void quantize_group(const Element *x, int64_t at, const Activations &to) {
    const Floats halves[2] = {load(x), load(x + LANES)};
    const Words low = (Words)halves[0] & 0x7fffffff, high = (Words)halves[1] & 0x7fffffff;
    const Ints finite = (low < 0x7f800000) & (high < 0x7f800000);
    int all_finite = -1;
    for (int i = 0; i < LANES; i++) all_finite &= finite[i];
    const float lowest = least(-larger(-halves[0], -halves[1])), range = largest(larger(halves[0], halves[1])) - lowest;
    const bool varies = all_finite && range > 1e-30f;
    const float factor = varies ? 255.0f / range : 0;
    Ints total{};
    for (int h = 0; h < 2; h++) {
        const Floats steps = varies ? rounded_product(halves[h] - lowest, factor) - 128.0f : Floats{};
        const Ints integers = __builtin_convertvector(steps, Ints);
        const SmallInts small = __builtin_convertvector(integers, SmallInts);
        std::memcpy(to.codes + at * GROUP + h * LANES, &small, sizeof small);
        total += integers;
    }
    to.counts[at] = 0;
    for (int i = 0; i < LANES; i++) to.counts[at] += total[i];
    to.scales[at] = !all_finite ? NAN : varies ? range / 255.0f : 0;
    to.offsets[at] = varies ? lowest + 128.0f * to.scales[at] : lowest;
    to.sums[at] = to.scales[at] * float(to.counts[at]);
}

inline void quantize_row(const Element *x, int64_t row, int64_t groups, const Activations &to) {
    for (int64_t g = 0; g < groups; g++) quantize_group(x + g * GROUP, row * groups + g, to);
}

}  // namespace
