// Gated delta nets (arXiv 2412.06464): the matrices of a sequence's heads go from one token to the next. The order of a
// head's operations is that of its sequence's tokens, so that the bits do not depend on chunks or on threads.

#pragma once

#include "convolution.h"

namespace {

constexpr int MAX_DELTA_DIM = 256;                       // elements of a head
constexpr int COLUMNS = INSTRUCTIONS >= AVX512 ? 8 : 4;  // registers of a matrix's row that are computed together

struct Delta {
    Convolution convolution;         // of queries, keys and values
    const float *rates, *time_bias;  // [value_heads]
    Norm norm;                       // of each head of results
    int64_t key_heads, value_heads, key_dim, value_dim;

    bool is_there() const { return convolution.is_there(); }
    int64_t gates() const { return convolution.size; }  // where they begin in an input row
    int64_t weights() const { return gates() + value_heads * value_dim; }
    int64_t times() const { return weights() + value_heads; }
    int64_t width() const { return times() + value_heads; }
};

// As torch's softplus.
inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

// One head of values in one sequence.
class DeltaHead {
  public:
    // `inputs`: [tokens, width]; `matrix`: [key_dim, value_dim].
    DeltaHead(const Delta &delta, const Element *inputs, const Past<false> &past, int64_t head, float *matrix)
        : d_(delta), inputs_(inputs), past_(past), head_(head), matrix_(matrix) {}

    // Updates the matrix by the token, and writes its result [value_dim].
    void advance(int64_t row, Element *out) {
        const int64_t keys = d_.key_heads * d_.key_dim, shared = head_ / (d_.value_heads / d_.key_heads) * d_.key_dim;
        read_unit(row, shared, 1.0f / std::sqrt(float(d_.key_dim)), query_);
        read_unit(row, keys + shared, 1.0f, key_);
        read(row, 2 * keys + head_ * d_.value_dim, d_.value_dim, value_);
        const Element *x = inputs_ + row * d_.width();
        const float time = load(x + d_.times() + head_, 1)[0] + d_.time_bias[head_];
        share_ = std::exp(-d_.rates[head_] * softplus(time));
        weight_ = 1.0f / (1.0f + std::exp(-load(x + d_.weights() + head_, 1)[0]));
        int64_t i = 0;
        for (; i + COLUMNS * LANES <= d_.value_dim; i += COLUMNS * LANES) advance_columns<COLUMNS>(i, LANES);
        for_lanes(d_.value_dim - i, [&](int64_t j, int count) { advance_columns<1>(i + j, count); });
        write(x + d_.gates() + head_ * d_.value_dim, out);
    }

  private:
    // The convolution's columns behind SiLU; returns their squares.
    ONE_COPY Floats read(int64_t row, int64_t first, int64_t size, float *to) const {
        Floats squares{};
        for_lanes(size, [&](int64_t i, int count) {
            const Floats v = activated(past_.convolved(row, first + i, count), SILU);
            store_lanes(to + i, v, count);
            squares += v * v;
        });
        return squares;
    }

    // Of the length `length`.
    void read_unit(int64_t row, int64_t first, float length, float *to) const {
        const float scale = length / std::sqrt(sum(read(row, first, d_.key_dim, to)) + 1e-6f);
        for_lanes(d_.key_dim, [&](int64_t i, int count) { store_lanes(to + i, load(to + i, count) * scale, count); });
    }

    // Columns of the matrix are independent of each other. `count`: of the lanes.
    template <int VECTORS>
    __attribute__((always_inline)) void advance_columns(int64_t first, int count) {
        Floats sums[VECTORS]{}, results[VECTORS]{};
        float *row = matrix_ + first;
        for (int64_t k = 0; k < d_.key_dim; k++, row += d_.value_dim)
            for (int v = 0; v < VECTORS; v++) sums[v] += load(row + v * LANES, count) * key_[k];
        for (int v = 0; v < VECTORS; v++)
            sums[v] = (load(value_ + first + v * LANES, count) - sums[v] * share_) * weight_;
        row = matrix_ + first;
        for (int64_t k = 0; k < d_.key_dim; k++, row += d_.value_dim)
            for (int v = 0; v < VECTORS; v++) {
                const Floats next = load(row + v * LANES, count) * share_ + sums[v] * key_[k];
                store_lanes(row + v * LANES, next, count);
                results[v] += next * query_[k];
            }
        for (int v = 0; v < VECTORS; v++) store_lanes(result_ + first + v * LANES, results[v], count);
    }

    void write(const Element *gates, Element *out) const {
        const float scale = d_.norm.scale(squares_of(result_, d_.value_dim));
        for_lanes(d_.value_dim, [&](int64_t i, int count) {
            const Floats normed = load(result_ + i, count) * scale * load(d_.norm.weight + i, count);
            store_lanes(out + i, normed * activated(load(gates + i, count), SILU), count);
        });
    }

    const Delta &d_;
    const Element *inputs_;
    const Past<false> &past_;
    const int64_t head_;
    float *matrix_, share_, weight_;
    float query_[MAX_DELTA_DIM], key_[MAX_DELTA_DIM], value_[MAX_DELTA_DIM], result_[MAX_DELTA_DIM];
};

// All threads of the region call it, share the heads of the sequences, and wait for the last one. inputs [tokens, width];
// kept [slots, taps - 1, convolution.size]; matrices [slots, value_heads, key_dim, value_dim];
// out [tokens, value_heads * value_dim].
inline void update_delta(const Delta &d, const Element *inputs, Element *kept, float *matrices, const StateRows &rows,
                         Element *out) {
    const int64_t size = d.key_dim * d.value_dim;
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < rows.sequences * d.value_heads; i++) {
        const int64_t sequence = i / d.value_heads, head = i % d.value_heads, first = rows.first_rows[sequence];
        const Past<false> past(d.convolution, inputs, d.width(), kept, rows, sequence);
        float *matrix = matrices + (rows.slots[sequence] * d.value_heads + head) * size;
        DeltaHead state(d, inputs, past, head, matrix);
        for (int64_t row = first; row < rows.first_rows[sequence + 1]; row++) {
            state.advance(row, out + (row * d.value_heads + head) * d.value_dim);
            for (const int64_t *save = rows.saves; save < rows.saves + rows.num_saves * 3; save += 3)
                if (save[0] == sequence && first + save[1] == row + 1)
                    std::memcpy(matrices + (save[2] * d.value_heads + head) * size, matrix, size * sizeof(float));
        }
    }
    store_past<false>(d.convolution, inputs, d.width(), kept, rows);
}

}  // namespace
