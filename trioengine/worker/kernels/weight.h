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

}  // namespace
