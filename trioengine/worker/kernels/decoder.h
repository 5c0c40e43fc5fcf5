// All layers of a decoder in one parallel region, by the operations, and so with the bits, of the kernels that are called
// one by one (native.cpp).

#pragma once

#include "attention.h"
#include "products.h"

namespace {

struct Norm {
    const float *weight;
    float epsilon;
};

struct Layer {
    Norm input_norm;
    Weight qkv, output;
    Norm post_attention_norm;
    Weight gate_up, down;
};

struct Decoder {
    const Layer *layers;
    int64_t num_layers, kv_heads;
    const Element *rotary;  // a row for each position
    Norm norm;              // behind the last layer
    float scale;            // of the scores
};

struct Step {
    int64_t tokens;
    const int64_t *positions, *slots;  // [tokens]
    const Tile *tiles;
    int64_t num_tiles;
    const int64_t *tables;  // [sequences, width]
    int64_t width;
    Element *const *caches;      // one for each layer
    const int64_t *output_rows;  // [outputs]: the tokens that go through all of the last layer
    int64_t outputs;
    Element *delta;  // [tokens, size]: the embeddings; then what is to be added to the hidden states
    Element *out;    // [outputs, size]
};

// Room for all tokens.
struct Scratch {
    Inputs inputs;
    float *hidden, *selected;  // [tokens, size]; of the output rows, as the last layer leaves them
    Element *wide;             // queries, keys and values; gates and what they are multiplied with
    Element *narrow;           // the results that are prepared for the next product
};

// All threads of the region call the functions below, share the rows among them, and wait for the last one.

void clear(float *hidden, int64_t rows, int64_t size) {
#pragma omp for schedule(static)
    for (int64_t r = 0; r < rows; r++) std::memset(hidden + r * size, 0, size * sizeof(float));
}

// `next`: the product of the norm, or null.
void normalize(float *hidden, const Element *delta, const Norm &norm, int64_t rows, int64_t size, Element *out,
               const Weight *next, const Scratch &scratch) {
#pragma omp for schedule(static)
    for (int64_t r = 0; r < rows; r++) {
        add_norm_row(hidden + r * size, delta + r * size, norm.weight, norm.epsilon, size, out + r * size);
        if (next != nullptr) prepare_row(out + r * size, r, *next, scratch.inputs);
    }
}

void attend(const Decoder &d, const Step &s, Element *cache, const Scratch &scratch) {
    const int64_t all_heads = (GROUP_SIZE + 2) * d.kv_heads;
#pragma omp for schedule(static)
    for (int64_t t = 0; t < s.tokens; t++) {
        Element *heads = scratch.wide + t * all_heads * HEAD_DIM;
        for (int64_t h = 0; h < all_heads - d.kv_heads; h++)
            rotate_head(heads + h * HEAD_DIM, HEAD_DIM, d.rotary + s.positions[t] * 2 * HEAD_DIM);
        store_token(heads, d.kv_heads, s.slots[t], cache);
    }
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < s.num_tiles * d.kv_heads; i++)
        attend_tile(s.tiles[i / d.kv_heads], i % d.kv_heads, d.kv_heads, scratch.wide, cache, s.tables, s.width, d.scale,
                    scratch.narrow);
}

// The last layer goes on with the output rows alone: the others are needed for their keys and values only.
void prepare_attended(const Step &s, bool is_last, int64_t rows, int64_t size, const Weight &next,
                      const Scratch &scratch) {
#pragma omp for schedule(static)
    for (int64_t r = 0; r < rows; r++) {
        const int64_t row = is_last ? s.output_rows[r] : r;
        if (is_last) std::memcpy(scratch.selected + r * size, scratch.hidden + row * size, size * sizeof(float));
        prepare_row(scratch.narrow + row * next.inputs, r, next, scratch.inputs);
    }
}

void activate(int64_t rows, const Weight &next, const Scratch &scratch) {
    const int64_t size = next.inputs;
#pragma omp for schedule(static)
    for (int64_t r = 0; r < rows; r++) {
        silu_and_multiply_row(scratch.wide + r * 2 * size, size, scratch.narrow + r * size);
        prepare_row(scratch.narrow + r * size, r, next, scratch.inputs);
    }
}

void decode_layers(const Decoder &d, const Step &s, const Scratch &scratch) {
    const int64_t size = d.layers[0].qkv.inputs;
    const Inputs &x = scratch.inputs;
    clear(scratch.hidden, s.tokens, size);
    for (int64_t i = 0; i < d.num_layers; i++) {
        const Layer &layer = d.layers[i];
        const bool is_last = i == d.num_layers - 1;
        const int64_t rows = is_last ? s.outputs : s.tokens;
        float *hidden = is_last ? scratch.selected : scratch.hidden;
        normalize(scratch.hidden, s.delta, layer.input_norm, s.tokens, size, scratch.narrow, &layer.qkv, scratch);
        product(x, layer.qkv, s.tokens, scratch.wide);
        attend(d, s, s.caches[i], scratch);
        prepare_attended(s, is_last, rows, size, layer.output, scratch);
        product(x, layer.output, rows, s.delta);
        normalize(hidden, s.delta, layer.post_attention_norm, rows, size, scratch.narrow, &layer.gate_up, scratch);
        product(x, layer.gate_up, rows, scratch.wide);
        activate(rows, layer.down, scratch);
        product(x, layer.down, rows, s.delta);
    }
    normalize(scratch.selected, s.delta, d.norm, s.outputs, size, s.out, nullptr, scratch);
}

}  // namespace
