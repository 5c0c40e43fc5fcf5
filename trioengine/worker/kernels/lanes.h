// Sixteen numbers at a time, in GCC's vector extension: shared by the kernels' sources. ELEMENT (float or bfloat16) is the
// type of activations.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

constexpr int LANES = 16;
using Floats = float __attribute__((vector_size(4 * LANES)));
using Ints = int32_t __attribute__((vector_size(4 * LANES)));
using Words = uint32_t __attribute__((vector_size(4 * LANES)));
using Halves = uint16_t __attribute__((vector_size(2 * LANES)));

struct bfloat16 {
    uint16_t bits;
};

using Element = ELEMENT;

// ---- lanes ----

inline Floats widened(Floats v) { return v; }
inline Floats widened(Halves v) { return (Floats)(__builtin_convertvector(v, Words) << 16); }

inline void narrow(Floats v, Floats &to) { to = v; }
inline void narrow(Floats v, Halves &to) {  // to the nearest, ties to even
    const Words bits = (Words)v, rounded = bits + 0x7fff + ((bits >> 16) & 1);
    to = __builtin_convertvector((v == v ? rounded : bits | 0x400000) >> 16, Halves);  // nan may carry into infinity
}

template <class T>
struct Row;  // 16 elements as they lie in memory
template <>
struct Row<float> {
    using type = Floats;
};
template <>
struct Row<bfloat16> {
    using type = Halves;
};

template <class T>
inline Floats load(const T *from, int count = LANES) {  // zeros behind the count
    typename Row<T>::type row{};
    std::memcpy(&row, from, count * sizeof(T));
    return widened(row);
}

template <class T>
inline void store_lanes(T *to, Floats v, int count = LANES) {
    typename Row<T>::type row;
    narrow(v, row);
    std::memcpy(to, &row, count * sizeof(T));
}

template <class Body>  // body(start, count): whole rows of lanes, whose count is a constant, and the rest
inline void for_lanes(int64_t size, Body body) {
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) body(i, LANES);
    if (i < size) body(i, int(size - i));
}

inline Floats all(float x) { return x - Floats{}; }
inline Floats larger(Floats a, Floats b) { return a < b ? b : a; }

inline float sum(Floats v) {
    float result = 0;
    for (int i = 0; i < LANES; i++) result += v[i];
    return result;
}

template <class Vector>
inline Vector larger_of(Vector a, Vector b) {
    return a < b ? b : a;
}

// The upper half of a vector, and the lower one.
template <class Half, class Vector>
inline Half upper(Vector v) {
    Half result;
    std::memcpy(&result, (const char *)&v + sizeof result, sizeof result);
    return result;
}
template <class Half, class Vector>
inline Half lower(Vector v) {
    Half result;
    std::memcpy(&result, &v, sizeof result);
    return result;
}

using Ints8 = int32_t __attribute__((vector_size(32)));
using Ints4 = int32_t __attribute__((vector_size(16)));

inline int32_t sum(Ints v) {
    const Ints8 eight = lower<Ints8>(v) + upper<Ints8>(v);
    const Ints4 four = lower<Ints4>(eight) + upper<Ints4>(eight);
    return four[0] + four[1] + (four[2] + four[3]);
}

using Floats8 = float __attribute__((vector_size(32)));
using Floats4 = float __attribute__((vector_size(16)));

inline float largest(Floats v) {
    const Floats8 eight = larger_of(lower<Floats8>(v), upper<Floats8>(v));
    const Floats4 four = larger_of(lower<Floats4>(eight), upper<Floats4>(eight));
    return std::max(std::max(four[0], four[1]), std::max(four[2], four[3]));
}

}  // namespace
