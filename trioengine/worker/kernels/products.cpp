// The products, compiled beside native.cpp for the same model.

#include "products.h"

namespace {

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

extern "C" {

// ---- called by native.cpp, and below ----

void prepare_row(const Element *x, int64_t row, const Weight &w, const Inputs &to) {
    if (w.bits > 0)
        quantize_row(x, row, w, to.quantized);
    else
        prepare_floats(x, row, w.inputs, to.values);
}

void product_task(const Inputs &x, const Weight &w, int64_t row, int64_t end, int64_t piece, const Results &out) {
    if (w.bits == 4)
        integer_task<4>(x.quantized, w, row, end, piece, out);
    else if (w.bits == 8)
        integer_task<8>(x.quantized, w, row, end, piece, out);
    else
        float_task(x.values, w, row, end, piece, out);
}

// ---- called by products.py ----

// Bytes of a packed weight of the dtype.
int64_t packed_size(int64_t outputs, int64_t inputs) {
    return num_streams(outputs) * STREAM * padded(inputs) * sizeof(Element);
}

void pack(const Element *weight, int64_t outputs, int64_t inputs, Element *packed) {
#pragma omp parallel for schedule(static)
    for (int64_t stream = 0; stream < num_streams(outputs); stream++)
        pack_stream(weight, outputs, inputs, stream, packed);
}

void linear(const Weight *w, const Element *x, int64_t rows, const Inputs *room, Element *out) {
    prepare_and_multiply(*w, x, rows, *room, {out});
}

// The same without the last rounding.
void linear_to_floats(const Weight *w, const Element *x, int64_t rows, const Inputs *room, float *out) {
    prepare_and_multiply(*w, x, rows, *room, {nullptr, out});
}

}  // extern "C"
