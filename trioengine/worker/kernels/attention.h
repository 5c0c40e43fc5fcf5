// Attention of all tiles of a step, over the paged KV cache: its parameters, and its only function (attention.cpp).

#pragma once

#include "cache.h"

namespace {

struct Tile;         // tile.h
struct SegmentSums;

// Where the heads of a token lie in its row: queries, each with its gates behind it, if there are any; keys; values.
struct HeadRow {
    int64_t kv_heads;
    bool has_gates;

    int64_t step() const { return has_gates ? 2 * HEAD_DIM : HEAD_DIM; }  // from one head of queries to the next
    int64_t keys() const { return kv_heads * GROUP_SIZE * step(); }       // where they begin
    int64_t size() const { return keys() + 2 * kv_heads * HEAD_DIM; }
};

// All tiles of a step in one layer. heads and out are those of the batch, tables [sequences, width].
struct Tiles {
    const Tile *tiles;
    int64_t count, kv_heads;
    const Element *heads;
    HeadRow row;
    LayerCache cache;
    const int64_t *tables;
    int64_t width;
    float scale;
    int64_t window;  // tokens that a query sees, itself among them
    Element *out;
};

}  // namespace

#pragma GCC visibility push(hidden)
extern "C" {  // in attention.cpp

// Called by all threads of a region. `sums`: [count, segments of a context, kv_heads], if they share segments; or null.
void attend_tiles(const Tiles &tiles, SegmentSums *sums);

}  // extern "C"
#pragma GCC visibility pop
