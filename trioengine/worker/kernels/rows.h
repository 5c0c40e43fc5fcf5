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

// The root of the mean square scales x + delta, which x becomes.
inline void add_norm_row(float *x, const Element *delta, const float *weight, float epsilon, int64_t size, Element *out) {
    Floats squares{};
    for_lanes(size, [&](int64_t i, int count) {
        const Floats v = load(x + i, count) + load(delta + i, count);
        store_lanes(x + i, v, count);
        squares += v * v;
    });
    const float scale = 1.0f / std::sqrt(sum(squares) / size + epsilon);
    for_lanes(size, [&](int64_t i, int count) {
        store_lanes(out + i, load(x + i, count) * scale * load(weight + i, count), count);
    });
}

// Hugging Face's layout: element i turns with i + size / 2. A position's row of the table is cos, cos, -sin, sin.
inline void rotate_head(Element *x, int64_t size, const Element *cosines) {
    const Element *sines = cosines + size + size / 2;
    Element *y = x + size / 2;
    for_lanes(size / 2, [&](int64_t i, int n) {
        const Floats a = load(x + i, n), b = load(y + i, n), c = load(cosines + i, n), s = load(sines + i, n);
        store_lanes(x + i, a * c - b * s, n);
        store_lanes(y + i, b * c + a * s, n);
    });
}

// Gates, and behind them as many to be multiplied.
inline void silu_and_multiply_row(const Element *gates, int64_t size, Element *out) {
    for_lanes(size, [&](int64_t i, int count) {
        const Floats gate = load(gates + i, count);
        store_lanes(out + i, gate / (1.0f + exponential(-gate)) * load(gates + size + i, count), count);
    });
}

}  // namespace
