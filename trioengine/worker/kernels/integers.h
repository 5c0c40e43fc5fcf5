// Matrix products of integers: activations are quantized to 8 bits in groups of 32, between the least and the greatest
// of a group, and multiplied with the codes of the weights. The sums of a group are integers, hence exact; groups are
// summed in float32 in their order, for every row and in every tile alike. So a row has the same bits whatever rows are
// beside it, and with any number of threads.
//
// A weight lies in panels of 16 outputs, of which two at a time are read as one stream: for each group the codes of
// both, their scales, the totals of the weights, by which offsets are multiplied, and their minima. A group of a panel
// is 8 steps of 16 outputs x 4 inputs, each step 64 bytes; with 4 bits two steps share them, the first in the low halves.
// A last panel alone lies in the same way.

#pragma once

#include "dot.h"
#include "weight.h"

namespace {

constexpr int GROUP = 32;
constexpr int PANEL = 16;
constexpr int STEPS = GROUP / 4;
constexpr int STEP_BYTES = 4 * PANEL;
constexpr int TILE_ROWS = INSTRUCTIONS ? 4 : 1;  // of a tile, at most: elsewhere there are no registers for more
constexpr int PANELS = 2;  // of a tile, at most: its sums, 8 integer and 8 float, are in registers
constexpr int BLOCK = 128;  // rows that one task computes, whose activations stay in the second cache

struct Activations {  // [rows, groups] of each: an activation is about its code * scale + offset
    int8_t *codes;    // and GROUP
    float *scales, *offsets;
    float *sums;      // the scale times the sum of the codes: the factor of a minimum
    int32_t *counts;  // the sum of the codes: the factor of a zero
};

constexpr int FACTOR_BYTES = 2 * PANEL;  // of a panel's scales, totals or minima, in float16
template <int BITS>
constexpr int CODE_BYTES = GROUP * PANEL * BITS / 8;  // of a panel's group

// ---- a tile ----

inline Bytes load_bytes(const uint8_t *from) {
    Bytes result;
    std::memcpy(&result, from, sizeof result);
    return result;
}

// The integer sums of one group: of COUNT rows, and of WIDTH registers of codes that are a panel apart.
template <int BITS, int COUNT, int WIDTH>
inline __attribute__((always_inline)) void sum_group(const int32_t (&starts)[COUNT], const uint8_t *weight,
                                                     const int8_t *row, int64_t stride, Ints (&totals)[COUNT][WIDTH]) {
    constexpr int SHARED = 8 / BITS;             // steps in the same bytes
    constexpr bool IS_SPLIT = BITS > CODE_BITS;  // the low and the high halves of codes are multiplied apart
    constexpr int HALVES = SHARED == 2 || IS_SPLIT ? 2 : 1, KINDS = IS_SPLIT ? 2 : 1;
    Sums sums[KINDS][COUNT][WIDTH]{};
    for (int r = 0; r < COUNT; r++)
        for (int p = 0; p < WIDTH; p++) sums[0][r][p] = begin(starts[r]);
#pragma GCC unroll 8
    for (int step = 0; step < STEPS; step += SHARED) {
        Bytes codes[WIDTH];
#pragma GCC unroll 2
        for (int p = 0; p < WIDTH; p++)
            codes[p] = load_bytes(weight + p * CODE_BYTES<BITS> + step / SHARED * STEP_BYTES);
#pragma GCC unroll 2
        for (int half = 0; half < HALVES; half++)
#pragma GCC unroll 4
            for (int r = 0; r < COUNT; r++) {
                int32_t four;
                std::memcpy(&four, row + r * stride + 4 * (step + half % SHARED), 4);
#pragma GCC unroll 4
                for (int p = 0; p < WIDTH; p++) {
                    Sums &sum = sums[half % KINDS][r][p];
                    sum = dot(sum, HALVES == 1 ? codes[p] : half == 0 ? codes[p] & 15 : codes[p] >> 4, four);
                }
            }
    }
    for (int r = 0; r < COUNT; r++)
        for (int p = 0; p < WIDTH; p++) {
            totals[r][p] = total(sums[0][r][p], starts[r]);
            if (IS_SPLIT) totals[r][p] += total(sums[KINDS - 1][r][p], 0) << 4;
        }
}

template <int BITS, int COUNT, int WIDTH>
void integer_tile(const Activations &x, const Weight &w, int64_t row, int64_t panel, const Results &out) {
    constexpr int PARTS_OF_PANEL = PANEL / LANES;
    constexpr int JOINT = PARTS_OF_PANEL == 1 ? WIDTH : 1;  // registers of codes that are multiplied together
    const int64_t panel_bytes = CODE_BYTES<BITS> + (w.has_minima ? 3 : 2) * FACTOR_BYTES;
    const int64_t groups = w.inputs / GROUP;
    const uint8_t *group = w.data + panel * groups * panel_bytes;
    Floats results[COUNT][WIDTH * PARTS_OF_PANEL]{};
    for (int64_t g = 0; g < groups; g++, group += WIDTH * panel_bytes) {
        const int64_t at = row * groups + g;  // of the first row
        const uint8_t *scales = group + WIDTH * CODE_BYTES<BITS>, *totals = scales + WIDTH * FACTOR_BYTES;
        const uint8_t *minima = totals + WIDTH * FACTOR_BYTES;
        int32_t starts[COUNT];
        for (int r = 0; r < COUNT; r++) starts[r] = -w.zero * x.counts[at + r * groups];
        for (int i = 0; i < WIDTH * PARTS_OF_PANEL; i += JOINT) {
            Ints sums[COUNT][JOINT];
            sum_group<BITS>(starts, group + i / PARTS_OF_PANEL * CODE_BYTES<BITS> + i % PARTS_OF_PANEL * sizeof(Bytes),
                            x.codes + at * GROUP, groups * GROUP, sums);
            for (int j = 0; j < JOINT; j++) {
                const int place = (i + j) * 2 * LANES;  // of factors: two bytes each
                const Floats scale = load_halves(scales + place), total = load_halves(totals + place);
                for (int r = 0; r < COUNT; r++) {
                    Floats &result = results[r][i + j];
                    result = multiply_add(__builtin_convertvector(sums[r][j], Floats),
                                          scale * x.scales[at + r * groups], result);
                    result = multiply_add(total, x.offsets[at + r * groups] - Floats{}, result);
                }
                if (!w.has_minima) continue;
                const Floats minimum = load_halves(minima + place);
                for (int r = 0; r < COUNT; r++)
                    results[r][i + j] = multiply_add(minimum, x.sums[at + r * groups] - Floats{}, results[r][i + j]);
            }
        }
    }
    for (int i = 0; i < WIDTH * PARTS_OF_PANEL; i++) {
        const int64_t column = panel * PANEL + i * LANES;
        const Floats bias = w.bias == nullptr ? Floats{} : load(w.bias + column);
        for (int r = 0; r < COUNT; r++) out.store((row + r) * w.outputs + column, results[r][i] + bias);
    }
}

template <int BITS, int WIDTH>
void integer_tiles(const Activations &x, const Weight &w, int64_t row, int64_t end, int64_t panel, const Results &out) {
    for (; row + TILE_ROWS <= end; row += TILE_ROWS) integer_tile<BITS, TILE_ROWS, WIDTH>(x, w, row, panel, out);
    if constexpr (TILE_ROWS > 1) switch (end - row) {
        case 3: return integer_tile<BITS, 3, WIDTH>(x, w, row, panel, out);
        case 2: return integer_tile<BITS, 2, WIDTH>(x, w, row, panel, out);
        case 1: return integer_tile<BITS, 1, WIDTH>(x, w, row, panel, out);
    }
}

constexpr int64_t AT_ONCE = 2 * PANELS;  // that a task computes

inline int64_t num_panels(const Weight &w) { return w.outputs / PANEL; }
inline int64_t num_pieces(const Weight &w) { return (num_panels(w) + AT_ONCE - 1) / AT_ONCE; }

template <int BITS>
inline void integer_task(const Activations &x, const Weight &w, int64_t row, int64_t end, int64_t piece, const Results &out) {
    const int64_t last = std::min((piece + 1) * AT_ONCE, num_panels(w));
    for (int64_t panel = piece * AT_ONCE; panel < last; panel += PANELS)
        if (panel + PANELS <= last)
            integer_tiles<BITS, PANELS>(x, w, row, end, panel, out);
        else
            integer_tiles<BITS, 1>(x, w, row, end, panel, out);
}

// ---- activations ----

// Numbers that are not finite, or have such a range, make the scale of their group nan, and with it all results of their row.
inline void quantize_group(const Element *x, int64_t at, const Activations &to) {
    constexpr int PIECES = GROUP / LANES;
    Floats pieces[PIECES];
    for (int i = 0; i < PIECES; i++) pieces[i] = load(x + i * LANES);
    Floats high = pieces[0], low = -high;
    Ints are_numbers = high == high;
    for (int i = 1; i < PIECES; i++) {
        high = larger(high, pieces[i]);
        low = larger(low, -pieces[i]);
        are_numbers &= pieces[i] == pieces[i];
    }
    const float lowest = -largest(low), range = largest(are_numbers ? high : all(INFINITY)) - lowest;
    const bool is_finite = range < INFINITY, varies = is_finite && range > 1e-30f;
    const float factor = varies ? 255.0f / range : 0;
    Ints total{};
    for (int i = 0; i < PIECES; i++) {
        const Floats steps = varies ? rounded_product(pieces[i] - lowest, factor) - 128.0f : Floats{};
        const Ints integers = __builtin_convertvector(steps, Ints);
        const SmallInts small = __builtin_convertvector(integers, SmallInts);
        std::memcpy(to.codes + at * GROUP + i * LANES, &small, sizeof small);
        total += integers;
    }
    to.counts[at] = sum(total);
    to.scales[at] = !is_finite ? NAN : varies ? range / 255.0f : 0;
    to.offsets[at] = varies ? lowest + 128.0f * to.scales[at] : lowest;
    to.sums[at] = to.scales[at] * float(to.counts[at]);
}

inline void quantize_row(const Element *x, int64_t row, int64_t groups, const Activations &to) {
    for (int64_t g = 0; g < groups; g++) quantize_group(x + g * GROUP, row * groups + g, to);
}

}  // namespace
