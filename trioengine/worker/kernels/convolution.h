// Gated convolutions over the tokens of sequences, in each column by itself, and the states that they leave behind.

#pragma once

#include "rows.h"

namespace {

struct Convolution {
    const float *weight;  // [taps, size], the token's own tap last; null: there is no convolution
    const float *bias;    // [size]; null: there is none
    int64_t taps, size;

    bool is_there() const { return weight != nullptr; }
};

// Of a step: a token's sequence, and the rows and the slot of a sequence.
struct StateRows {
    const int64_t *slots;          // [sequences]
    const int64_t *first_rows;     // [sequences + 1]
    const int64_t *sequence_of;    // [tokens]
    const int64_t *saves;          // [num_saves, 3]: a sequence, a number of its tokens, and a slot
    int64_t sequences, num_saves;
};

inline Floats rounded(Floats v, float) { return v; }
inline Floats rounded(Floats v, bfloat16) {
    Halves halves;
    narrow(v, halves);
    return widened(halves);
}

// The products `b * x` of a sequence's tokens: those of the step, and before them those in its state.
class Products {
  public:
    // `inputs`: [tokens, 3 * size], b, c and x; `states`: [slots, taps - 1, size].
    Products(const Convolution &convolution, const Element *inputs, Element *states, const StateRows &rows, int64_t sequence)
        : size_(convolution.size), kept_(convolution.taps - 1), first_(rows.first_rows[sequence]), inputs_(inputs),
          state_(states + rows.slots[sequence] * kept_ * size_) {}

    Floats at(int64_t row, int64_t i, int count) const {
        if (row < first_) return load(state_ + (row - first_ + kept_) * size_ + i, count);
        const Element *b = inputs_ + row * 3 * size_ + i;
        return rounded(load(b, count) * load(b + 2 * size_, count), Element{});
    }

    // Stores the state behind the row before `end`, in the sequence's own slot or in another.
    void store(int64_t end, Element *to) const {
        for (int64_t kept = 0; kept < kept_; kept++)
            for_lanes(size_, [&](int64_t i, int count) {
                store_lanes(to + kept * size_ + i, at(end - kept_ + kept, i, count), count);
            });
    }

  private:
    const int64_t size_, kept_, first_;
    const Element *inputs_, *state_;
};

inline void convolve_row(const Convolution &c, const Element *inputs, Element *states, const StateRows &rows, int64_t row,
                         Element *out) {
    const Products products(c, inputs, states, rows, rows.sequence_of[row]);
    const Element *gates = inputs + (row * 3 + 1) * c.size;
    for_lanes(c.size, [&](int64_t i, int count) {
        Floats sum{};
        for (int64_t tap = 0; tap < c.taps; tap++)
            sum += products.at(row - c.taps + 1 + tap, i, count) * load(c.weight + tap * c.size + i, count);
        if (c.bias != nullptr) sum += load(c.bias + i, count);
        store_lanes(out + i, sum * load(gates + i, count), count);
    });
}

// All threads of the region call it, share the rows, and wait for the last one. out [tokens, size].
inline void convolve(const Convolution &c, const Element *inputs, int64_t tokens, Element *states, const StateRows &rows,
                     Element *out) {
    const int64_t state_size = (c.taps - 1) * c.size;
#pragma omp for schedule(static)
    for (int64_t t = 0; t < tokens; t++) convolve_row(c, inputs, states, rows, t, out + t * c.size);
#pragma omp for schedule(static)
    for (int64_t s = 0; s < rows.num_saves; s++) {
        const int64_t sequence = rows.saves[s * 3], end = rows.first_rows[sequence] + rows.saves[s * 3 + 1];
        Products(c, inputs, states, rows, sequence).store(end, states + rows.saves[s * 3 + 2] * state_size);
    }
#pragma omp for schedule(static)
    for (int64_t s = 0; s < rows.sequences; s++)
        Products(c, inputs, states, rows, s).store(rows.first_rows[s + 1], states + rows.slots[s] * state_size);
}

}  // namespace
