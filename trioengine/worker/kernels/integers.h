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
constexpr int LINE = 64;  // bytes of a line of the cache
constexpr int TILE_ROWS = INSTRUCTIONS ? 4 : 1;  // of a tile, at most: elsewhere there are no registers for more
constexpr int PANELS = 2;  // of a tile, at most: its sums, 8 integer and 8 float, are in registers
constexpr int BLOCK = 128;  // rows that one task computes, whose activations stay in the second cache

struct Activations {  // [rows, groups] of each: an activation is about its code * scale + offset
    int8_t *codes;    // and GROUP
    float *scales, *offsets;
    float *sums;      // the scale times the sum of the codes: the factor of a minimum
    int32_t *starts;  // of the sums of products: minus the sum of the codes times the zero of the weight
};

constexpr int FACTOR_BYTES = 2 * PANEL;  // of a panel's scales, totals or minima, in float16
template <int BITS>
constexpr int CODE_BYTES = GROUP * PANEL * BITS / 8;  // of a panel's group

template <int BITS>
inline int64_t group_bytes(const Weight &w) {  // of a panel
    return CODE_BYTES<BITS> + (w.has_minima ? 3 : 2) * FACTOR_BYTES;
}

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

// Bytes that a later task will read, which a tile fetches into the second cache: some lines with each group.
struct Prefetch {
    const uint8_t *data;
    int64_t lines;

    void fetch(int64_t group) const {
        const uint8_t *line = data + group * lines * LINE;
        for (int64_t i = lines; i > 0; i--, line += LINE) __builtin_prefetch(line, 0, 2);
    }
};

template <int BITS, int COUNT, int WIDTH>
void integer_tile(const Activations &x, const Weight &w, int64_t row, int64_t panel, const Results &out,
                  Prefetch next) {
    constexpr int PARTS_OF_PANEL = PANEL / LANES;
    constexpr int JOINT = PARTS_OF_PANEL == 1 ? WIDTH : 1;  // registers of codes that are multiplied together
    const int64_t groups = w.inputs / GROUP;
    const uint8_t *group = w.data + panel * groups * group_bytes<BITS>(w);
    Floats results[WIDTH * PARTS_OF_PANEL][COUNT]{};
    for (int64_t g = 0; g < groups; g++, group += WIDTH * group_bytes<BITS>(w)) {
        const int64_t at = row * groups + g;  // of the first row
        next.fetch(g);
        const uint8_t *scales = group + WIDTH * CODE_BYTES<BITS>, *totals = scales + WIDTH * FACTOR_BYTES;
        const uint8_t *minima = totals + WIDTH * FACTOR_BYTES;
        int32_t starts[COUNT];
        for (int r = 0; r < COUNT; r++) starts[r] = x.starts[at + r * groups];
        for (int i = 0; i < WIDTH * PARTS_OF_PANEL; i += JOINT) {
            Ints sums[COUNT][JOINT];
            sum_group<BITS>(starts, group + i / PARTS_OF_PANEL * CODE_BYTES<BITS> + i % PARTS_OF_PANEL * sizeof(Bytes),
                            x.codes + at * GROUP, groups * GROUP, sums);
            for (int j = 0; j < JOINT; j++) {
                const int place = (i + j) * 2 * LANES;  // of factors: two bytes each
                const Floats scale = load_halves(scales + place), total = load_halves(totals + place);
                for (int r = 0; r < COUNT; r++) {
                    Floats &result = results[i + j][r];
                    result = multiply_add(__builtin_convertvector(sums[r][j], Floats),
                                          scale * x.scales[at + r * groups], result);
                    result = multiply_add(total, x.offsets[at + r * groups] - Floats{}, result);
                }
                if (!w.has_minima) continue;
                const Floats minimum = load_halves(minima + place);
                for (int r = 0; r < COUNT; r++)
                    results[i + j][r] = multiply_add(minimum, x.sums[at + r * groups] - Floats{}, results[i + j][r]);
            }
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < WIDTH * PARTS_OF_PANEL; i++) {
        const int64_t column = panel * PANEL + i * LANES;
        const Floats bias = w.bias == nullptr ? Floats{} : load(w.bias + column);
        for (int r = 0; r < COUNT; r++) out.store((row + r) * w.outputs + column, results[i][r] + bias);
    }
}

inline int64_t num_panels(const Weight &w) { return w.outputs / PANEL; }
inline int64_t num_pieces(const Weight &w) { return (num_panels(w) + PANELS - 1) / PANELS; }

template <int BITS, int WIDTH>
void integer_tiles(const Activations &x, const Weight &w, int64_t row, int64_t end, int64_t panel, const Results &out) {
    const int64_t groups = w.inputs / GROUP, panel_bytes = groups * group_bytes<BITS>(w);
    const int64_t tiles = (end - row + TILE_ROWS - 1) / TILE_ROWS;
    const int64_t next_end = std::min(panel + 2 * WIDTH, num_panels(w));
    const int64_t lines = std::max<int64_t>((WIDTH * group_bytes<BITS>(w) / LINE + tiles / 2) / tiles, 1);
    int64_t place = (panel + WIDTH) * panel_bytes;  // of the next panels, or of those of their lines that come next
    for (; row < end; row += TILE_ROWS, place += groups * lines * LINE) {
        const Prefetch next{w.data + place, place < next_end * panel_bytes ? lines : 0};
        if constexpr (TILE_ROWS > 1) switch (end - row) {
            case 3: return integer_tile<BITS, 3, WIDTH>(x, w, row, panel, out, next);
            case 2: return integer_tile<BITS, 2, WIDTH>(x, w, row, panel, out, next);
            case 1: return integer_tile<BITS, 1, WIDTH>(x, w, row, panel, out, next);
        }
        integer_tile<BITS, TILE_ROWS, WIDTH>(x, w, row, panel, out, next);
    }
}

template <int BITS>
inline void integer_task(const Activations &x, const Weight &w, int64_t row, int64_t end, int64_t piece,
                         const Results &out) {
    const int64_t panel = piece * PANELS;
    if (panel + PANELS <= num_panels(w))
        integer_tiles<BITS, PANELS>(x, w, row, end, panel, out);
    else
        integer_tiles<BITS, 1>(x, w, row, end, panel, out);
}

// ---- activations ----

// The largest numbers of a group that are LANES apart, infinite where one is nan, and the least ones with the other sign.
inline void find_range(const Element *x, Floats &high, Floats &low) {
    high = load(x), low = -high;
    Ints are_numbers = high == high;
    for (int i = LANES; i < GROUP; i += LANES) {
        const Floats piece = load(x + i);
        high = larger(high, piece);
        low = larger(low, -piece);
        are_numbers &= piece == piece;
    }
    high = are_numbers ? high : all(INFINITY);
}

// Returns the sums of codes that are LANES apart.
inline Ints quantize_group(const Element *x, float lowest, float factor, int8_t *codes) {
    Ints totals{};
    for (int i = 0; i < GROUP; i += LANES) {
        const Floats steps = rounded_product(load(x + i) - lowest, factor) - 128.0f;
        const Ints integers = __builtin_convertvector(steps, Ints);
        SmallInts small = __builtin_convertvector(integers, SmallInts);
#if INSTRUCTIONS >= AVX512
        asm("" : "+v"(small));  // GCC would convert and store by one instruction, which takes a Zen 4 many cycles
#endif
        std::memcpy(codes + i, &small, sizeof small);
        totals += integers;
    }
    return totals;
}

// LANES groups at a time. Numbers that are not finite, or have such a range, make the scale of their group nan, and
// with it all results of their row.
inline void quantize_row(const Element *x, int64_t row, const Weight &w, const Activations &to) {
    const int64_t groups = w.inputs / GROUP;
    for_lanes(groups, [&](int64_t first, int count) {
        const int64_t at = row * groups + first;
        Floats highs[LANES]{}, lows[LANES]{};
        for (int i = 0; i < count; i++) find_range(x + (first + i) * GROUP, highs[i], lows[i]);
        const Floats lowest = -combine_each(lows, larger), range = combine_each(highs, larger) - lowest;
        const auto varies = range > 1e-30f, is_finite = range < INFINITY;
        const Floats scale = is_finite ? varies ? range / 255.0f : Floats{} : all(NAN);
        float begins[LANES], factors[LANES];
        store_lanes(begins, lowest);
        store_lanes(factors, is_finite ? varies ? 255.0f / range : Floats{} : all(NAN));
        Ints totals[LANES]{};
        for (int i = 0; i < count; i++)
            if (factors[i] == factors[i])  // else the codes may be anything
                totals[i] = quantize_group(x + (first + i) * GROUP, begins[i], factors[i], to.codes + (at + i) * GROUP);
        const Ints total = combine_each(totals, [](Ints a, Ints b) { return a + b; }), start = -w.zero * total;
        store_lanes(to.scales + at, scale, count);
        store_lanes(to.offsets + at, lowest + 128.0f * scale, count);
        store_lanes(to.sums + at, scale * __builtin_convertvector(total, Floats), count);
        std::memcpy(to.starts + at, &start, count * sizeof(int32_t));
    });
}

}  // namespace
