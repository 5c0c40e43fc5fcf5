// Matrix products of integers. Activations are quantized to 8 bits in groups of 32 columns, and multiplied with the codes
// of the weights. All other factors are integers of 16 bits, so that the sum of two groups is an integer, which is exact.
// These integers are added in float32 in their order, for every row and in every tile alike. So a row has the same bits
// whatever rows are beside it, and with any number of threads; in float32 also with any instructions, where the CPU has
// fused multiply-add.
//
// In a group a weight is scale * (code - zero) + minimum, where zero is the middle of all codes; an activation is about
// row_scale * row_code + offset. The sum of their products has three terms:
//     scale * row_scale * sum((code - zero) * row_code) + total * offset + minimum * sum
// where total is the sum of scale * (code - zero), and sum that of the activations.
//
// Each output has a unit, in which its largest possible weight is about 2 ** 18, and each row has one, in which its largest
// activation is about 2 ** 22. In these units every factor is a multiple of a step, and fits 16 bits:
//     scale 1, row_scale 1; total 2 ** 8, offset 2 ** 7; minimum 2 ** 3, sum 2 ** 12
// The product of the two scales is divided by 2 ** 15. So all three terms count in 2 ** 15, and can be added. Two groups
// are 64 products, 2 ** (18 + 22 + 6 - 15) at most, which fit a word. If codes have 8 bits, the sums of their products are
// divided by 16, and scales are multiplied by 16.
//
// A weight lies in panels of 16 outputs. A pair of groups of a panel is 8 steps of 16 outputs x 2 groups x 4 columns, each
// of 128 bytes; with 4 bits two steps share them, the first in the low halves. Behind the codes are the scales of both
// groups, a word for each output, then their totals, and their minima. If the number of groups is odd, the factors of the
// last pair's second one are zeros.

#pragma once

#include "dot.h"
#include "weight.h"

namespace {

constexpr int GROUP = 32;
constexpr int PAIR = 2 * GROUP;
constexpr int PANEL = 16;
constexpr int STEPS = GROUP / 4;
constexpr int STEP_BYTES = 8 * PANEL;
constexpr int LINE = 64;  // bytes of a line of the cache
constexpr int TILE_ROWS = INSTRUCTIONS ? 4 : 1;  // of a tile, at most: elsewhere there are no registers for more
constexpr int BLOCK = 128;  // rows that one task computes, whose activations stay in the second cache

struct alignas(8) RowPair {  // two groups of a row; products.py knows its size
    int8_t codes[PAIR];  // 4 of one group, 4 of the other, and so on
    int32_t starts[2];   // at which sums of products start: minus the zero of the weight times the sum of the codes
    int16_t scales[2], offsets[2], sums[2];
};

static_assert(sizeof(RowPair) == 88);

struct Activations {
    RowPair *pairs;  // [rows, pairs of groups]
    float *units;    // [rows], of sums
};

inline int64_t num_pairs(const Weight &w) { return (w.inputs + PAIR - 1) / PAIR; }
inline int64_t num_panels(const Weight &w) { return w.outputs / PANEL; }

constexpr int FACTOR_BYTES = 4 * PANEL;  // of a pair's scales, totals or minima
template <int BITS>
constexpr int CODE_BYTES = PAIR * PANEL * BITS / 8;  // of a pair

template <int BITS>
inline int64_t pair_bytes(const Weight &w) {
    return CODE_BYTES<BITS> + (w.has_minima ? 3 : 2) * FACTOR_BYTES;
}

inline int64_t panel_bytes(const Weight &w) {
    return num_pairs(w) * (w.bits == 4 ? pair_bytes<4>(w) : pair_bytes<8>(w));
}

constexpr int zero_of(int bits) { return 1 << (bits - 1); }
constexpr int dropped_bits(int bits) { return bits - 4; }  // of sums, which then have 16

// ---- a tile ----

inline Bytes load_bytes(const uint8_t *from) {
    Bytes result;
    std::memcpy(&result, from, sizeof result);
    return result;
}

// Two numbers of a row, of both groups of a pair.
template <class T>
inline auto both(const T *numbers) {
    std::conditional_t<sizeof(T) == 4, int64_t, uint32_t> result;
    std::memcpy(&result, numbers, sizeof result);
    return result;
}

// The integer sums of a pair of groups: of COUNT rows, and of two registers of codes, whose lanes are groups of the same
// outputs in turn.
template <int BITS, int COUNT>
inline __attribute__((always_inline)) void sum_pair(const uint8_t *weight, const RowPair *rows, int64_t stride,
                                                    Ints (&totals)[COUNT][2]) {
    constexpr int SHARED = 8 / BITS;             // steps in the same bytes
    constexpr bool IS_SPLIT = BITS > CODE_BITS;  // the low and the high halves of codes are multiplied apart
    constexpr int HALVES = SHARED == 2 || IS_SPLIT ? 2 : 1, KINDS = IS_SPLIT ? 2 : 1;
    Sums sums[KINDS][COUNT][2]{};
    for (int r = 0; r < COUNT; r++)
        for (int i = 0; i < 2; i++) sums[0][r][i] = begin(both(rows[r * stride].starts));
#pragma GCC unroll 8
    for (int step = 0; step < STEPS; step += SHARED) {
        Bytes codes[2];
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++) codes[i] = load_bytes(weight + step / SHARED * STEP_BYTES + i * STEP_BYTES / 2);
#pragma GCC unroll 2
        for (int half = 0; half < HALVES; half++)
#pragma GCC unroll 8
            for (int r = 0; r < COUNT; r++) {
                int64_t eight;
                std::memcpy(&eight, rows[r * stride].codes + 8 * (step + half % SHARED), 8);
#pragma GCC unroll 2
                for (int i = 0; i < 2; i++) {
                    Sums &sum = sums[half % KINDS][r][i];
                    sum = dot(sum, HALVES == 1 ? codes[i] : half == 0 ? codes[i] & 15 : codes[i] >> 4, eight);
                }
            }
    }
    for (int r = 0; r < COUNT; r++)
        for (int i = 0; i < 2; i++) {
            totals[r][i] = total(sums[0][r][i], both(rows[r * stride].starts));
            if (IS_SPLIT) totals[r][i] += total(sums[KINDS - 1][r][i], 0) << 4;
            totals[r][i] >>= dropped_bits(BITS);
        }
}

// Bytes that a later task will read, which a tile fetches into the second cache: some lines with each pair of groups.
struct Prefetch {
    const uint8_t *data;
    int64_t lines;

    void fetch(int64_t pair) const {
        const uint8_t *line = data + pair * lines * LINE;
        for (int64_t i = lines; i > 0; i--, line += LINE) __builtin_prefetch(line, 0, 2);
    }
};

template <int BITS, int COUNT>
void integer_tile(const Activations &x, const Weight &w, int64_t row, int64_t panel, const Results &out,
                  Prefetch next) {
    constexpr int REGISTERS = PANEL / LANES;  // of results of a row
    const int64_t pairs = num_pairs(w);
    const uint8_t *pair = w.data + panel * pairs * pair_bytes<BITS>(w);
    Floats results[REGISTERS][COUNT]{};
    for (int64_t p = 0; p < pairs; p++, pair += pair_bytes<BITS>(w)) {
        const RowPair *rows = x.pairs + row * pairs + p;  // a row has `pairs` of these
        next.fetch(p);
        for (int i = 0; i < REGISTERS; i++) {
            Ints sums[COUNT][2];
            sum_pair<BITS, COUNT>(pair + i * sizeof(Bytes), rows, pairs, sums);
            const uint8_t *factors = pair + CODE_BYTES<BITS> + i * sizeof(Words);
            const Words scales = (Words)load_bytes(factors), totals = (Words)load_bytes(factors + FACTOR_BYTES);
            Words products[COUNT];
            for (int r = 0; r < COUNT; r++) {
                products[r] = scaled(sums[r][0], sums[r][1], scales, both(rows[r * pairs].scales));
                products[r] = add_products(products[r], totals, both(rows[r * pairs].offsets));
            }
            if (w.has_minima) {
                const Words minima = (Words)load_bytes(factors + 2 * FACTOR_BYTES);
                for (int r = 0; r < COUNT; r++)
                    products[r] = add_products(products[r], minima, both(rows[r * pairs].sums));
            }
            for (int r = 0; r < COUNT; r++) results[i][r] += __builtin_convertvector((Ints)products[r], Floats);
        }
    }
    for (int i = 0; i < REGISTERS; i++) {
        const int64_t column = panel * PANEL + i * LANES;
        const Floats units = load(w.units + column), bias = w.bias == nullptr ? Floats{} : load(w.bias + column);
        for (int r = 0; r < COUNT; r++)
            out.store((row + r) * w.outputs + column, multiply_add(results[i][r] * units, all(x.units[row + r]), bias));
    }
}

// Tiles behind the first one read the panel from the caches, and the next panel is fetched meanwhile. A single tile reads
// memory all the time, in its order, which is fastest by the CPU's own prefetchers: requests so far ahead slow them down.
template <int BITS>
inline void integer_task(const Activations &x, const Weight &w, int64_t row, int64_t end, int64_t panel,
                         const Results &out) {
    const int64_t pairs = num_pairs(w), bytes = panel_bytes(w);
    const int64_t tiles = (end - row + TILE_ROWS - 1) / TILE_ROWS;
    const int64_t next_end = std::min(panel + 2, num_panels(w)) * bytes;
    const int64_t lines = std::max<int64_t>((pair_bytes<BITS>(w) / LINE + tiles / 2) / tiles, 1);
    int64_t place = (panel + 1) * bytes;  // of the next panel, or of those of its lines that come next
    for (; row < end; row += TILE_ROWS, place += pairs * lines * LINE) {
        const Prefetch next{w.data + place, tiles > 1 && place < next_end ? lines : 0};
        if constexpr (TILE_ROWS > 1) switch (end - row) {
            case 3: return integer_tile<BITS, 3>(x, w, row, panel, out, next);
            case 2: return integer_tile<BITS, 2>(x, w, row, panel, out, next);
            case 1: return integer_tile<BITS, 1>(x, w, row, panel, out, next);
        }
        integer_tile<BITS, TILE_ROWS>(x, w, row, panel, out, next);
    }
}

// ---- activations ----

// Not finite if one of the numbers is not.
inline float largest_magnitude(const Element *x, int64_t size) {
    Ints high{};  // bits of numbers that are not negative have their order, with nan above infinity
    for (int64_t i = 0; i < size; i += LANES) {
        const Ints piece = (Ints)load(x + i) & 0x7fffffff;
        high = high < piece ? piece : high;
    }
    const int32_t bits = largest(high);
    float result;
    std::memcpy(&result, &bits, sizeof result);
    return result;
}

// The largest numbers of a group that are LANES apart, and the least ones with the other sign.
inline void find_range(const Element *x, Floats &high, Floats &low) {
    high = load(x), low = -high;
    for (int i = LANES; i < GROUP; i += LANES) {
        const Floats piece = load(x + i);
        high = larger(high, piece), low = larger(low, -piece);
    }
}

struct GroupCodes {
    SmallInts codes[GROUP / LANES];
    Ints totals;  // of codes that are LANES apart
};

inline GroupCodes quantize_group(const Element *x, float offset, float factor) {
    GroupCodes result;
    result.totals = Ints{};
    for (int i = 0; i < GROUP / LANES; i++) {
        const Floats steps = rounded_product(load(x + i * LANES) - offset, factor);
        const Ints integers = __builtin_convertvector(steps, Ints);
        result.codes[i] = __builtin_convertvector(integers, SmallInts);
#if INSTRUCTIONS >= AVX512
        asm("" : "+v"(result.codes[i]));  // GCC would convert and store by one instruction, slow on a Zen 4
#endif
        result.totals += integers;
    }
    return result;
}

// Writes 4 codes of one group, 4 of the other, and so on.
inline void store_in_turn(int8_t *to, const GroupCodes &a, const GroupCodes &b) {
    SmallInts lower, upper;
    for (int i = 0; i < LANES; i++) {
        const int word = i / 4, behind = word + LANES / 4;
        lower[i] = word % 2 * LANES + word / 2 * 4 + i % 4;
        upper[i] = behind % 2 * LANES + behind / 2 * 4 + i % 4;
    }
    for (int i = 0; i < GROUP / LANES; i++) {
        const SmallInts first = __builtin_shuffle(a.codes[i], b.codes[i], lower);
        const SmallInts second = __builtin_shuffle(a.codes[i], b.codes[i], upper);
        std::memcpy(to + 2 * i * LANES, &first, LANES);
        std::memcpy(to + (2 * i + 1) * LANES, &second, LANES);
    }
}

constexpr float LARGEST_CODE = 127.0f, LARGEST_SCALE = 32767.0f;
constexpr float OFFSET_STEP = 1 << 7, SUM_STEP = GROUP * OFFSET_STEP;  // in the unit of the row
constexpr float TINY = 1e-30f;

// Other cores may have copies of these lines, if they have read them in the last product. A store waits until they have
// dropped its line, so all lines are requested at once. A CPU without an instruction for that fetches them to be read.
inline void fetch_to_write(const void *data, int64_t bytes) {
    const char *begin = (const char *)((uintptr_t)data & -LINE), *end = (const char *)data + bytes;
    for (const char *line = begin; line < end; line += LINE) __builtin_prefetch(line, 1);
}

// LANES groups at a time. If a number is not finite, the unit is nan, and with it all results of the row.
inline void quantize_row(const Element *x, int64_t row, const Weight &w, const Activations &to) {
    fetch_to_write(to.pairs + row * num_pairs(w), num_pairs(w) * sizeof(RowPair));
    const float largest = largest_magnitude(x, w.inputs);
    // A little larger than the numbers need: an offset may be rounded away from them, and scales are rounded up.
    const float unit = std::max(largest, TINY) * (1.0f + 0x1p-14f) / (LARGEST_CODE * LARGEST_SCALE);
    to.units[row] = unit < INFINITY ? unit * float(1 << 15) : NAN;
    if (!(unit < INFINITY)) return;  // any old numbers of the row will do
    const float per_code = 1.0f / unit / LARGEST_CODE;
    const float offset_step = OFFSET_STEP * unit, per_offset_step = 1.0f / offset_step;
    for_lanes(w.inputs / GROUP, [&](int64_t first, int count) {
        Floats highs[LANES], lows[LANES];
        for (int i = 0; i < count; i++) find_range(x + (first + i) * GROUP, highs[i], lows[i]);
        for (int i = count; i < LANES; i++) highs[i] = lows[i] = Floats{};
        const Floats high = combine_each(highs, larger), low = -combine_each(lows, larger);
        const Floats offset_steps = rounded_product(high * 0.5f + low * 0.5f, per_offset_step);
        const Floats above = multiply_add(offset_steps, all(-offset_step), high);
        const Floats below = multiply_add(offset_steps, all(offset_step), -low), range = larger(above, below);
        const Floats scale = rounded_product(multiply_add(range, all(per_code), all(0.5f)), 1.0f);
        float offsets[LANES], factors[LANES];
        store_lanes(offsets, offset_steps * offset_step);
        asm("" : "+m"(offsets));  // else GCC may fuse these products with differences, and round them only once
        store_lanes(factors, scale > 0.0f ? 1.0f / (scale * unit) : Floats{});
        RowPair *pairs = to.pairs + row * num_pairs(w) + first / 2;
        Ints totals[LANES];
        const auto quantized = [&](int i) {
            const GroupCodes group = quantize_group(x + (first + i) * GROUP, offsets[i], factors[i]);
            totals[i] = group.totals;
            return group;
        };
        for (int i = 0; i < count; i += 2) {
            const GroupCodes group = quantized(i);
            store_in_turn(pairs[i / 2].codes, group, i + 1 < count ? quantized(i + 1) : group);
        }
        for (int i = count; i < LANES; i++) totals[i] = Ints{};
        const Ints total = combine_each(totals, [](Ints a, Ints b) { return a + b; });
        const Ints start = (1 << dropped_bits(w.bits) >> 1) - zero_of(w.bits) * total;
        const Floats sum = scale * __builtin_convertvector(total, Floats);
        int16_t scales[LANES], rounded_offsets[LANES], sums[LANES];
        store_lanes(scales, scale);
        store_lanes(rounded_offsets, offset_steps);
        store_lanes(sums, rounded_product(sum, 1.0f / SUM_STEP) + offset_steps);
        for (int i = 0; i < count; i += 2) {
            RowPair &pair = pairs[i / 2];
            std::memcpy(pair.starts, (const int32_t *)&start + i, sizeof pair.starts);
            std::memcpy(pair.scales, scales + i, sizeof pair.scales);
            std::memcpy(pair.offsets, rounded_offsets + i, sizeof pair.offsets);
            std::memcpy(pair.sums, sums + i, sizeof pair.sums);
        }
    });
}

}  // namespace
