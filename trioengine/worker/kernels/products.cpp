// Matrix products of integers, for ELEMENT (float or bfloat16): activations are quantized to 8 bits in groups of 32, and
// multiplied with the codes of the weights. The sums of a group are integers, hence exact; groups are summed in float32
// in their order, for every row and in every tile alike. So a row has the same bits whatever rows are beside it, and with
// any number of threads.
//
// A weight lies in panels of 16 outputs. A group of a panel is 8 steps of 16 outputs x 4 inputs, each step 64 bytes; with
// 4 bits two steps share them, the first in the low halves.

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
constexpr int ROWS = HAS_VNNI ? 4 : 1;  // of a tile, at most; without the instruction there are no registers for more
constexpr int PANELS = 2;    // of a tile, at most: its sums, 8 integer and 8 float, are in registers
constexpr int BLOCK = 128;   // rows that one task computes, whose activations stay in the second cache
constexpr int FEW_ROWS = 8;  // quantized by one thread

struct Activations {  // [rows, groups] of each
    const int8_t *codes;  // and GROUP
    const float *scales;
    const float *sums;       // the scale times the sum of the codes: the factor of a minimum
    const int32_t *offsets;  // what the weights' zero adds to the product of the codes
};

struct Weight {
    const uint8_t *codes;    // [panels, groups, GROUP * LANES * bits / 8]
    const uint16_t *scales;  // [panels, groups, LANES], float16
    const uint16_t *minima;  // the same, or null
    const Element *bias;     // [panels * LANES], or null
    int64_t panels, groups;
};

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

inline Floats load_halves(const uint16_t *from) {  // finite numbers
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

// The integer sums of one group.
template <int BITS, int COUNT, int WIDTH>
inline __attribute__((always_inline)) void add_group(Ints (&sums)[COUNT][WIDTH], const uint8_t *const (&weight)[WIDTH],
                                                     const int8_t *row, int64_t stride) {
    constexpr int SHARED = 8 / BITS;  // steps in the same bytes
#pragma GCC unroll 8
    for (int step = 0; step < STEPS; step += SHARED) {
        Bytes codes[WIDTH];
#pragma GCC unroll 2
        for (int p = 0; p < WIDTH; p++) codes[p] = load_bytes(weight[p] + step / SHARED * STEP_BYTES);
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
    constexpr int BYTES = GROUP * LANES * BITS / 8;
    Floats results[COUNT][WIDTH]{};
    for (int64_t g = 0; g < w.groups; g++) {
        const int64_t at = row * w.groups + g;  // of the first row
        Ints sums[COUNT][WIDTH];
        const uint8_t *codes[WIDTH];
        for (int r = 0; r < COUNT; r++)
            for (int p = 0; p < WIDTH; p++) sums[r][p] = x.offsets[at + r * w.groups] - Ints{};
        for (int p = 0; p < WIDTH; p++) codes[p] = w.codes + ((panel + p) * w.groups + g) * BYTES;
        add_group<BITS, COUNT, WIDTH>(sums, codes, x.codes + at * GROUP, w.groups * GROUP);
        for (int p = 0; p < WIDTH; p++) {
            const int64_t lanes = ((panel + p) * w.groups + g) * LANES;
            const Floats scale = load_halves(w.scales + lanes);
            for (int r = 0; r < COUNT; r++)
                results[r][p] = multiply_add(__builtin_convertvector(sums[r][p], Floats),
                                             scale * x.scales[at + r * w.groups], results[r][p]);
            if (w.minima == nullptr) continue;
            const Floats minimum = load_halves(w.minima + lanes);
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
    for (; row + ROWS <= end; row += ROWS) tile<BITS, ROWS, WIDTH>(x, w, row, panel, out);
    if constexpr (ROWS > 1) switch (end - row) {
        case 3: return tile<BITS, 3, WIDTH>(x, w, row, panel, out);
        case 2: return tile<BITS, 2, WIDTH>(x, w, row, panel, out);
        case 1: return tile<BITS, 1, WIDTH>(x, w, row, panel, out);
    }
}

// Threads take tasks, some panels for a block of rows, from one counter.
template <int BITS>
void product(const Activations &x, const Weight &w, int64_t rows, Element *out) {
    constexpr int64_t AT_ONCE = 2 * PANELS;
    const int64_t pieces = (w.panels + AT_ONCE - 1) / AT_ONCE, blocks = (rows + BLOCK - 1) / BLOCK;
#pragma omp parallel for schedule(dynamic)
    for (int64_t task = 0; task < pieces * blocks; task++) {
        const int64_t row = task / pieces * BLOCK, end = std::min(row + BLOCK, rows);
        const int64_t first = task % pieces * AT_ONCE, last = std::min(first + AT_ONCE, w.panels);
        for (int64_t panel = first; panel < last; panel += PANELS)
            if (panel + PANELS <= last)
                tiles<BITS, PANELS>(x, w, row, end, panel, out);
            else
                tiles<BITS, 1>(x, w, row, end, panel, out);
    }
}

// ---- activations ----

// The nearest integers, ties to even, of products below 2 ** 22, which are not rounded before.
inline Floats rounded_product(Floats v, float factor) {
    const Floats shift = all(12582912.0f);  // 1.5 * 2 ** 23
    return multiply_add(v, all(factor), shift) - shift;
}

// Numbers that are not finite make the scale of their group nan or infinite, and with it all results of their row.
inline void quantize_group(const Element *x, int8_t *codes, float &scale, int32_t &sum) {
    const Floats halves[2] = {load(x), load(x + LANES)};
    Words top{};
    for (Floats half : halves) {
        const Words bits = (Words)half & 0x7fffffff;  // the order of these is that of the numbers, with nan the largest
        top = top < bits ? bits : top;
    }
    uint32_t most = 0;
    for (int i = 0; i < LANES; i++) most = std::max(most, top[i]);
    float largest;
    std::memcpy(&largest, &most, sizeof largest);
    const bool is_normal = largest > 1e-30f && largest < INFINITY;
    const float factor = is_normal ? 127.0f / largest : 0;
    scale = largest / 127.0f;
    Ints total{};
    for (int h = 0; h < 2; h++) {
        const Ints integers = __builtin_convertvector(is_normal ? rounded_product(halves[h], factor) : Floats{}, Ints);
        const SmallInts small = __builtin_convertvector(integers, SmallInts);
        std::memcpy(codes + h * LANES, &small, sizeof small);
        total += integers;
    }
    sum = 0;
    for (int i = 0; i < LANES; i++) sum += total[i];
}

}  // namespace

extern "C" {

// x [rows, groups * GROUP]; the results as in Activations.
void quantize(const Element *x, int64_t rows, int64_t groups, int32_t zero, int8_t *codes, float *scales, float *sums,
              int32_t *offsets) {
#pragma omp parallel for schedule(static) if (rows > FEW_ROWS)
    for (int64_t r = 0; r < rows; r++)
        for (int64_t g = r * groups; g < (r + 1) * groups; g++) {
            int32_t sum;
            quantize_group(x + g * GROUP, codes + g * GROUP, scales[g], sum);
            sums[g] = scales[g] * float(sum);
            offsets[g] = -zero * sum;
        }
}

// out [rows, panels * LANES].
void multiply(const int8_t *codes, const float *scales, const float *sums, const int32_t *offsets, int64_t rows,
              const uint8_t *weight, const uint16_t *weight_scales, const uint16_t *minima, const Element *bias,
              int64_t panels, int64_t groups, int32_t bits, Element *out) {
    const Activations x{codes, scales, sums, offsets};
    const Weight w{weight, weight_scales, minima, bias, panels, groups};
    bits == 4 ? product<4>(x, w, rows, out) : product<8>(x, w, rows, out);
}

}  // extern "C"
