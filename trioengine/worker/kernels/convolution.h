// Convolutions over the tokens of sequences, in each column by itself, and the states that they leave behind.

#pragma once

#include "rows.h"

namespace {

struct Convolution {
    const float *weight;  // [taps, size], the token's own tap last; null: there is no convolution
    const float *bias;    // [size]; null: there is none
    int64_t taps, size;

    // Always false in the library of a model without states, so that the compiler drops the code for them.
    bool is_there() const { return HAS_STATES && weight != nullptr; }
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

// The rows of a convolution in a sequence: those of the step, and before them those in its state.
template <bool IS_GATED>
class Past {
  public:
    // `inputs`: [tokens, width], where the columns are the first, or, if they are gated, the products of b and x in rows
    // of b, c and x. `states`: [slots, taps - 1, size].
    Past(const Convolution &convolution, const Element *inputs, int64_t width, const Element *states,
         const StateRows &rows, int64_t sequence)
        : convolution_(convolution), kept_(convolution.taps - 1), width_(width), first_(rows.first_rows[sequence]),
          inputs_(inputs), state_(states + rows.slots[sequence] * kept_ * convolution.size) {}

    Floats at(int64_t row, int64_t i, int count) const {
        if (row < first_) return load(state_ + (row - first_ + kept_) * convolution_.size + i, count);
        const Element *x = inputs_ + row * width_ + i;
        if constexpr (IS_GATED)
            return rounded(load(x, count) * load(x + 2 * convolution_.size, count), Element{});
        else
            return load(x, count);
    }

    // The sum over the taps.
    Floats convolved(int64_t row, int64_t i, int count) const {
        const Convolution &c = convolution_;
        Floats sum{};
        for (int64_t tap = 0; tap < c.taps; tap++)
            sum += at(row - c.taps + 1 + tap, i, count) * load(c.weight + tap * c.size + i, count);
        if (c.bias != nullptr) sum += load(c.bias + i, count);
        return sum;
    }

    // Stores the state behind the row before `end`, in the sequence's own slot or in another.
    void store(int64_t end, Element *to) const {
        for (int64_t kept = 0; kept < kept_; kept++)
            for_lanes(convolution_.size, [&](int64_t i, int count) {
                store_lanes(to + kept * convolution_.size + i, at(end - kept_ + kept, i, count), count);
            });
    }

  private:
    const Convolution &convolution_;
    const int64_t kept_, width_, first_;
    const Element *inputs_, *state_;
};

// All threads of the region call the functions below, share the rows, and wait for the last one.

// Stores the states of all sequences, once no thread reads them any more.
template <bool IS_GATED>
void store_past(const Convolution &c, const Element *inputs, int64_t width, Element *states, const StateRows &rows) {
    const int64_t state_size = (c.taps - 1) * c.size;
#pragma omp for schedule(static)
    for (int64_t s = 0; s < rows.num_saves; s++) {
        const int64_t sequence = rows.saves[s * 3], end = rows.first_rows[sequence] + rows.saves[s * 3 + 1];
        const Past<IS_GATED> past(c, inputs, width, states, rows, sequence);
        past.store(end, states + rows.saves[s * 3 + 2] * state_size);
    }
#pragma omp for schedule(static)
    for (int64_t s = 0; s < rows.sequences; s++) {
        const Past<IS_GATED> past(c, inputs, width, states, rows, s);
        past.store(rows.first_rows[s + 1], states + rows.slots[s] * state_size);
    }
}

// inputs [tokens, 3 * size]; out [tokens, size].
inline void convolve(const Convolution &c, const Element *inputs, int64_t tokens, Element *states, const StateRows &rows,
                     Element *out) {
#pragma omp for schedule(static)
    for (int64_t t = 0; t < tokens; t++) {
        const Past<true> past(c, inputs, 3 * c.size, states, rows, rows.sequence_of[t]);
        const Element *gates = inputs + (t * 3 + 1) * c.size;
        for_lanes(c.size, [&](int64_t i, int count) {
            store_lanes(out + t * c.size + i, past.convolved(t, i, count) * load(gates + i, count), count);
        });
    }
    store_past<true>(c, inputs, 3 * c.size, states, rows);
}

}  // namespace
