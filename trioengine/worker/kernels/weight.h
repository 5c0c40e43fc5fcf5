// The weight of a linear layer.

#pragma once

#include "lanes.h"

namespace {

struct Weight {
    const uint8_t *data;  // as integers.h or floats.h lay it out
    const float *units;   // [outputs], of integers.h
    const Element *bias;  // [outputs], or null
    int64_t outputs, inputs;
    int32_t bits;  // of a code; 0: numbers of the dtype
    bool has_minima;
};

// The results of a product, [rows, outputs]: rounded to the dtype, or the sums themselves.
struct Results {
    Element *rounded;
    float *sums = nullptr;  // in place of the others

    void store(int64_t at, Floats values, int count = LANES) const {
        if (sums == nullptr)
            store_rounded(rounded + at, values, count);
        else
            store_lanes(sums + at, values, count);
    }

  private:
    static void store_rounded(float *to, Floats values, int count) { store_lanes(to, values, count); }
    static void store_rounded(bfloat16 *to, Floats values, int count) {
#if INSTRUCTIONS >= BF16
        const auto row = _mm512_cvtneps_pbh((__m512)values);  // with 0 for subnormal numbers
        std::memcpy(to, &row, count * sizeof *to);
#else
        store_lanes(to, values, count);
#endif
    }
};

}  // namespace
