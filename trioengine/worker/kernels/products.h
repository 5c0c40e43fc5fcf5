// A weight, rows that are prepared for its product, and the product itself: of integers (integers.h), or of numbers of the
// dtype (floats.h).

#pragma once

#include "floats.h"
#include "integers.h"

namespace {

// Room for the rows of any product.
struct Inputs {
    Activations quantized;
    Prepared *values;
};

inline void prepare_row(const Element *x, int64_t row, const Weight &w, const Inputs &to) {
    if (w.bits > 0)
        quantize_row(x, row, w.inputs / GROUP, to.quantized);
    else
        prepare_floats(x, row, w.inputs, to.values);
}

// Tasks of a block of rows, each of some outputs.
inline int64_t num_tasks(const Weight &w) { return w.bits > 0 ? num_pieces(w) : num_streams(w.outputs); }

inline void product_task(const Inputs &x, const Weight &w, int64_t row, int64_t end, int64_t piece, const Results &out) {
    if (w.bits == 4)
        integer_task<4>(x.quantized, w, row, end, piece, out);
    else if (w.bits == 8)
        integer_task<8>(x.quantized, w, row, end, piece, out);
    else
        float_task(x.values, w, row, end, piece, out);
}

// The threads of a parallel region take tasks from one counter, and wait for the last. out [rows, outputs].
inline void product(const Inputs &x, const Weight &w, int64_t rows, const Results &out) {
    const int64_t pieces = num_tasks(w), block = w.bits > 0 ? BLOCK : FLOAT_BLOCK;
#pragma omp for schedule(guided)
    for (int64_t number = 0; number < pieces * ((rows + block - 1) / block); number++) {
        const int64_t row = number / pieces * block;
        product_task(x, w, row, std::min(row + block, rows), number % pieces, out);
    }
}

// x [rows, inputs]; out [rows, outputs]; `room` is for that many rows.
inline void prepare_and_multiply(const Weight &w, const Element *x, int64_t rows, const Inputs &room, const Results &out) {
#pragma omp parallel
    {
#pragma omp for schedule(static)
        for (int64_t r = 0; r < rows; r++) prepare_row(x + r * w.inputs, r, w, room);
        product(room, w, rows, out);
    }
}

}  // namespace
