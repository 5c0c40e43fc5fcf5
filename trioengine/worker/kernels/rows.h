// The operations on a row of a step, beside its products and its attention.

#pragma once

#include "lanes.h"

namespace {

// e to the x by Cephes' expf: 2 to the n times a polynomial. Off by some 2 units of the last place; beyond the range of
// float32's normal numbers 0 or infinity, and nan of nan.
inline Floats exponential(Floats x) {
    const Floats shifted = x * 1.44269504f + 12582912.0f;  // 1.5 * 2 ** 23: rounds, and leaves n in the low bits
    const Floats n = shifted - 12582912.0f;
    const Floats f = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    Floats p = all(1.9875691500e-4f);
    for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
        p = p * f + c;
    p = p * f * f + f + 1.0f;
    const Floats inside = (Floats)((Words)p + ((Words)shifted << 23));
    return x < -87.0f ? Floats{} : x <= 88.0f ? inside : x + all(INFINITY);
}

#if INSTRUCTIONS >= BF16
// 2 to the x, where x is 0 or less, or nan: a polynomial for the distance from the integer below. Off by some 2 units
// of the last place; 1 of 0, and subnormal below 2 to the -126.
inline Floats power_of_2(Floats x) {
    const Floats f = (Floats)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF);
    Floats p = all(1.8671316793e-3f);
    for (float c : {9.0170269832e-3f, 5.5799916387e-2f, 2.4016444385e-1f, 6.9315129519e-1f, 1.0f}) p = p * f + c;
    return (Floats)_mm512_scalef_ps((__m512)p, (__m512)x);  // of the integer below
}
#endif

// x * weight / sqrt(mean(x ** 2) + epsilon), of `size` elements at a time.
struct Norm {
    const float *weight;  // null: there is no norm
    float epsilon;
    int64_t size;

    bool is_there() const { return weight != nullptr; }
    float scale(Floats squares) const { return 1.0f / std::sqrt(sum(squares) / size + epsilon); }
};

template <class Number>
Floats squares_of(const Number *x, int64_t size) {
    Floats squares{};
    for_lanes(size, [&](int64_t i, int count) {
        const Floats v = load(x + i, count);
        squares += v * v;
    });
    return squares;
}

template <class Number>
void norm_row(const Number *x, Floats squares, const Norm &norm, Element *out) {
    const float scale = norm.scale(squares);
    for_lanes(norm.size, [&](int64_t i, int count) {
        store_lanes(out + i, load(x + i, count) * scale * load(norm.weight + i, count), count);
    });
}

// In place; the norm's size divides `size`.
ONE_COPY void norm_parts(Element *x, int64_t size, const Norm &norm) {
    for (int64_t i = 0; i < size; i += norm.size) norm_row(x + i, squares_of(x + i, norm.size), norm, x + i);
}

// How a block's result is added to the residual stream, and what the next block gets.
struct Residual {
    Norm delta_norm;  // of the result
    float scale;      // of the result, behind its norm
    Norm norm;        // of the sum
};

// x becomes x + delta; the delta becomes its norm.
ONE_COPY void add_row(float *x, Element *delta, const Residual &residual, int64_t size, Element *out) {
    if (residual.delta_norm.is_there()) norm_parts(delta, size, residual.delta_norm);
    Floats squares{};
    for_lanes(size, [&](int64_t i, int count) {
        const Floats v = load(x + i, count) + load(delta + i, count) * residual.scale;
        store_lanes(x + i, v, count);
        squares += v * v;
    });
    if (residual.norm.is_there()) return norm_row(x, squares, residual.norm, out);
    for_lanes(size, [&](int64_t i, int count) { store_lanes(out + i, load(x + i, count), count); });
}

// Cosines and sines of all positions, for the first `size` elements of a head: a row is cos, cos, -sin, sin.
struct Rotary {
    const Element *table;  // null: no rotation
    int64_t size;

    const Element *at(int64_t position) const { return table + position * 2 * size; }
};

// Hugging Face's layout: element i turns with i + size / 2.
ONE_COPY void rotate_head(Element *x, int64_t size, const Element *cosines) {
    const Element *sines = cosines + size + size / 2;
    Element *y = x + size / 2;
    for_lanes(size / 2, [&](int64_t i, int n) {
        const Floats a = load(x + i, n), b = load(y + i, n), c = load(cosines + i, n), s = load(sines + i, n);
        store_lanes(x + i, a * c - b * s, n);
        store_lanes(y + i, b * c + a * s, n);
    });
}

enum Activation : int64_t { SILU, GELU_TANH };

// gelu's approximation by tanh: x * sigmoid(2 * sqrt(2 / pi) * (x + 0.044715 * x ** 3)).
inline Floats activated(Floats x, Activation activation) {
    const Floats inside = activation == SILU ? x : x * (1.5957691216f + 0.0713548162726f * x * x);
    return x / (1.0f + exponential(-inside));
}

// x becomes x times the sigmoids of gates.
ONE_COPY void gate_row(Element *x, const Element *gates, int64_t size) {
    for_lanes(size, [&](int64_t i, int count) {
        store_lanes(x + i, load(x + i, count) / (1.0f + exponential(-load(gates + i, count))), count);
    });
}

// Gates, and behind them as many to be multiplied.
ONE_COPY void gated_row(const Element *gates, int64_t size, Activation activation, Element *out) {
    for_lanes(size, [&](int64_t i, int count) {
        store_lanes(out + i, activated(load(gates + i, count), activation) * load(gates + size + i, count), count);
    });
}

ONE_COPY void divide_row(float *x, int64_t size, float by) {
    for_lanes(size, [&](int64_t i, int count) { store_lanes(x + i, load(x + i, count) / by, count); });
}

// Returns the place of the first nan, or else of the first largest number, and writes that number. `size` is 1 or more.
ONE_COPY int64_t best_place(const float *x, int64_t size, float *largest_number) {
    constexpr int64_t PART = 1024;  // numbers that stay in the first cache
    float best = -INFINITY;
    int64_t begin = 0;
    for (int64_t first = 0; first < size && best == best; first += PART) {
        Floats high = all(-INFINITY);
        Ints are_numbers = high == high;
        for_lanes(std::min(PART, size - first), [&](int64_t i, int count) {
            Floats v = all(-INFINITY);
            std::memcpy(&v, x + first + i, count * sizeof(float));
            high = larger(high, v);
            are_numbers &= v == v;
        });
        const float now = sum(are_numbers) == -LANES ? largest(high) : NAN;
        if (!(now <= best)) best = now, begin = first;
    }
    while (best == best ? x[begin] != best : x[begin] == x[begin]) begin++;
    *largest_number = best;
    return begin;
}

}  // namespace
