// The weight of a linear layer.

#pragma once

#include "lanes.h"

namespace {

struct Weight {
    const uint8_t *data;  // as integers.h or floats.h lay it out
    const Element *bias;  // [outputs], or null
    int64_t outputs, inputs;
    int32_t bits;  // of a code; 0: numbers of the dtype
    int32_t zero;  // of codes
    bool has_minima;
};

// The results of a product, [rows, outputs]: rounded to the dtype, or the sums themselves.
struct Results {
    Element *rounded;
    float *sums = nullptr;  // in place of the others

    void store(int64_t at, Floats values, int count = LANES) const {
        if (sums == nullptr)
            store_lanes(rounded + at, values, count);
        else
            store_lanes(sums + at, values, count);
    }
};

}  // namespace
