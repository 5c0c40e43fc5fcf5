// Matrix products of numbers of the dtype. Every result is one sum in float32, in the order of the columns, whatever rows
// and outputs are computed beside it. So a row has the same bits in any batch, and with any number of threads.
//
// A weight lies in streams, of the outputs that a tile has: first their numbers of two columns, then of the next two. Two
// numbers of bfloat16 of one output share a word, the first column in its upper half. Behind the last output and the last
// column are zeros. Where the CPU multiplies such pairs, the rows are pairs, too.

#pragma once

#include "dot.h"
#include "weight.h"

namespace {

constexpr int VECTORS = INSTRUCTIONS ? 2 : 1;  // registers of outputs
constexpr int STREAM = VECTORS * LANES;        // outputs of a tile
constexpr int ROW_GROUP = LANES / 4;           // rows whose numbers of a column lie together; products.py has room for 4
constexpr int MOST_ROWS = 3 * ROW_GROUP;       // of a tile, whose sums are in registers
constexpr int FLOAT_BLOCK = 10 * MOST_ROWS;    // rows that a task computes

constexpr bool IN_PAIRS = INSTRUCTIONS >= BF16 && std::is_same_v<Element, bfloat16>;
using Prepared = std::conditional_t<IN_PAIRS, uint32_t, float>;  // of a row: two columns, or one
constexpr int COLUMNS_AT_ONCE = IN_PAIRS ? 2 : 1;                 // in one of these

static_assert(ROW_GROUP <= 4);
static_assert(sizeof(Prepared) == sizeof(float));  // for which products.py has room

inline int64_t padded(int64_t inputs) { return inputs + inputs % 2; }
inline int64_t num_streams(int64_t outputs) { return (outputs + STREAM - 1) / STREAM; }

// The place of an output's number in a column.
inline int64_t place(const float *, int64_t output, int64_t column) { return column * STREAM + output; }
inline int64_t place(const bfloat16 *, int64_t output, int64_t column) {
    return column / 2 * 2 * STREAM + 2 * output + 1 - column % 2;
}

// weight [outputs, inputs]; `to` has room for num_streams * STREAM * padded(inputs) numbers.
inline void pack_stream(const Element *weight, int64_t outputs, int64_t inputs, int64_t stream, Element *to) {
    to += stream * STREAM * padded(inputs);
    std::memset(to, 0, STREAM * padded(inputs) * sizeof(Element));
    for (int64_t i = 0; i < std::min<int64_t>(STREAM, outputs - stream * STREAM); i++)
        for (int64_t column = 0; column < inputs; column++)
            to[place(to, i, column)] = weight[(stream * STREAM + i) * inputs + column];
}

// ---- rows: ROW_GROUP at a time, a column or a pair of columns after the other ----

// Prepared numbers of a row.
inline int64_t row_length(int64_t inputs) { return padded(inputs) / COLUMNS_AT_ONCE; }

// The place of a row's first number.
inline int64_t row_place(int64_t row, int64_t inputs) {
    return row / ROW_GROUP * ROW_GROUP * row_length(inputs) + row % ROW_GROUP;
}

inline float number(float x) { return x; }
inline float number(bfloat16 x) {
    const uint32_t bits = uint32_t(x.bits) << 16;
    float result;
    std::memcpy(&result, &bits, sizeof result);
    return result;
}

template <class T>
inline void prepare_floats(const T *x, int64_t row, int64_t inputs, Prepared *values) {
    Prepared *to = values + row_place(row, inputs);
    if constexpr (IN_PAIRS) {
        for (int64_t column = 0; column < inputs; column += 2, to += ROW_GROUP)
            *to = uint32_t(x[column].bits) << 16 | (column + 1 < inputs ? x[column + 1].bits : 0);
    } else {
        for (int64_t column = 0; column < inputs; column++) to[column * ROW_GROUP] = number(x[column]);
        if (inputs % 2) to[inputs * ROW_GROUP] = 0;
    }
}

// ---- a tile ----

// In memory, at any address. GCC 12 copies a register by memcpy through the stack, in pieces.
using FloatsThere = float __attribute__((vector_size(4 * LANES), aligned(2), may_alias));
using WordsThere = uint32_t __attribute__((vector_size(4 * LANES), aligned(2), may_alias));

// A register of outputs in two columns.
inline void load_pair(const float *from, int vector, Floats &first, Floats &second) {
    first = *(const FloatsThere *)(from + vector * LANES);
    second = *(const FloatsThere *)(from + STREAM + vector * LANES);
}

inline void load_pair(const bfloat16 *from, int vector, Floats &first, Floats &second) {
    const WordsThere words = *(const WordsThere *)(from + 2 * vector * LANES);
    first = (Floats)(words & 0xffff0000);
    second = (Floats)(words << 16);
}

// Add the products of two columns to the sums. `distance`: from a group of rows to the next.
template <int ROWS>
inline void add_columns(Floats (&sums)[ROWS][VECTORS], const Element *data, const float *x, int64_t distance) {
    Floats pair[2][VECTORS];
#pragma GCC unroll 2
    for (int v = 0; v < VECTORS; v++) load_pair(data, v, pair[0][v], pair[1][v]);
#pragma GCC unroll 2
    for (int j = 0; j < 2; j++)
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++) {
            const float factor = x[r / ROW_GROUP * distance + j * ROW_GROUP + r % ROW_GROUP];
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; v++) sums[r][v] = multiply_add(pair[j][v], factor - Floats{}, sums[r][v]);
        }
}

#if INSTRUCTIONS >= BF16
template <int ROWS>
inline void add_columns(Floats (&sums)[ROWS][VECTORS], const Element *data, const uint32_t *x, int64_t distance) {
    Words pair[VECTORS];
#pragma GCC unroll 2
    for (int v = 0; v < VECTORS; v++) pair[v] = *(const WordsThere *)(data + 2 * v * LANES);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) {
        const uint32_t factors = x[r / ROW_GROUP * distance + r % ROW_GROUP];
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; v++) sums[r][v] = add_pair(sums[r][v], pair[v], factors);
    }
}
#endif

template <int ROWS>
void float_tile(const Prepared *values, const Weight &w, int64_t row, int64_t stream, const Results &out) {
    const int64_t columns = padded(w.inputs), distance = ROW_GROUP * row_length(w.inputs);
    const Prepared *x = values + row_place(row, w.inputs);
    const Element *data = (const Element *)w.data + stream * STREAM * columns;
    Floats sums[ROWS][VECTORS]{};
    for (int64_t column = 0; column < columns; column += 2, data += 2 * STREAM, x += 2 / COLUMNS_AT_ONCE * ROW_GROUP)
        add_columns<ROWS>(sums, data, x, distance);
    const int64_t first = stream * STREAM, count = std::min<int64_t>(STREAM, w.outputs - first);
    float results[STREAM];
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) {
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; v++) *(FloatsThere *)(results + v * LANES) = sums[r][v];
        for_lanes(count, [&](int64_t i, int n) {
            const Floats bias = w.bias == nullptr ? Floats{} : load(w.bias + first + i, n);
            out.store((row + r) * w.outputs + first + i, load(results + i, n) + bias, n);
        });
    }
}

template <int ROWS>
inline int64_t float_tiles(const Prepared *values, const Weight &w, int64_t row, int64_t end, int64_t stream, const Results &out) {
    for (; row + ROWS <= end; row += ROWS) float_tile<ROWS>(values, w, row, stream, out);
    return row;
}

// Only the last tiles have less than a group of rows, and lie in one.
inline void float_task(const Prepared *values, const Weight &w, int64_t row, int64_t end, int64_t stream, const Results &out) {
    row = float_tiles<MOST_ROWS>(values, w, row, end, stream, out);
    row = float_tiles<2 * ROW_GROUP>(values, w, row, end, stream, out);
    row = float_tiles<ROW_GROUP>(values, w, row, end, stream, out);
    if constexpr (ROW_GROUP > 2) row = float_tiles<2>(values, w, row, end, stream, out);
    if constexpr (ROW_GROUP > 1) float_tiles<1>(values, w, row, end, stream, out);
}

}  // namespace
