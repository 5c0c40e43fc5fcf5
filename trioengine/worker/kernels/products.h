// A weight, rows that are prepared for its product, and the product itself: of integers (integers.h), or of numbers of the
// dtype (floats.h).

#pragma once

#include <omp.h>

#include "floats.h"
#include "integers.h"

namespace {

// Room for the rows of any product.
struct Inputs {
    Activations quantized;
    Prepared *values;
};

constexpr int64_t UNIT_STEP = LINE / sizeof(float) / ROW_GROUP;  // for units of two groups of rows in lines of their own

// The room behind some rows of at most so many columns; `first` is a multiple of ROW_GROUP.
inline Inputs rows_from(const Inputs &room, int64_t first, int64_t columns) {
    const int64_t pairs = (columns + PAIR - 1) / PAIR;
    const Activations quantized{room.quantized.pairs + first * pairs, room.quantized.units + first * UNIT_STEP};
    return {quantized, room.values + first * row_length(columns)};
}

// Quantizes a row, or lays it out for floats.h.
ONE_COPY void prepare_row(const Element *x, int64_t row, const Weight &w, const Inputs &to) {
    if (w.bits > 0)
        quantize_row(x, row, w, to.quantized);
    else
        prepare_floats(x, row, w.inputs, to.values);
}

// Computes some outputs of the rows from `row` to `end`.
ONE_COPY void product_task(const Inputs &x, const Weight &w, int64_t row, int64_t end, int64_t piece, const Results &out) {
    if (w.bits == 4)
        integer_task<4>(x.quantized, w, row, end, piece, out);
    else if (w.bits == 8)
        integer_task<8>(x.quantized, w, row, end, piece, out);
    else
        float_task(x.values, w, row, end, piece, out);
}

// Tasks of a block of rows, each of some outputs.
inline int64_t num_tasks(const Weight &w) { return w.bits > 0 ? num_panels(w) : num_streams(w.outputs); }

constexpr int64_t SMALL = 1 << 21;  // multiplications of integers, which take some tens of microseconds

// Whether threads have equal shares of the product of so many rows.
inline bool has_shares(const Weight &w, int64_t rows) { return w.bits > 0 && rows * w.outputs * w.inputs <= SMALL; }

// Has the CPU read the first lines of this thread's share of the product of one row, while that row is prepared.
inline void fetch_share(const Weight &w) {
    constexpr int64_t LINES = 32;  // as many as come in that time
    const int64_t panels = num_tasks(w), threads = omp_get_num_threads(), thread = omp_get_thread_num();
    if (!has_shares(w, 1) || panels < threads) return;
    const int64_t first = panels / threads * thread + std::min(panels % threads, thread);
    const uint8_t *data = w.data + first * panel_bytes(w);
    for (int64_t line = 0; line < LINES; line++) __builtin_prefetch(data + line * LINE, 0, 2);
}

// The threads of a parallel region share the tasks, and wait for the last: they take them from one counter, or have equal
// shares where the counter would cost more time than it saves. out [rows, outputs].
inline void product(const Inputs &x, const Weight &w, int64_t rows, const Results &out) {
    const int64_t pieces = num_tasks(w), block = w.bits > 0 ? BLOCK : FLOAT_BLOCK;
    const int64_t count = pieces * ((rows + block - 1) / block);
    const auto run = [&](int64_t number) {
        const int64_t row = number / pieces * block;
        product_task(x, w, row, std::min(row + block, rows), number % pieces, out);
    };
    if (!has_shares(w, rows)) {
#pragma omp for schedule(guided)
        for (int64_t number = 0; number < count; number++) run(number);
    } else {
#pragma omp for schedule(static)
        for (int64_t number = 0; number < count; number++) run(number);
    }
}

}  // namespace
