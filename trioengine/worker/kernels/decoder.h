// All layers of a decoder in one parallel region, by the operations, and so with the bits, of the kernels that are called
// one by one (native.cpp).

#pragma once

#include <chrono>

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
    const LayerCache *caches;    // one for each layer
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
    SegmentSums *sums;         // [num_tiles, kv_heads, segments]; null: each tile's context is read by one thread
    int64_t segments;          // of a tile, at most
    int64_t *times;            // the nanoseconds of each operation in all layers, added up; null: not measured
};

enum Operation { NORMS, QKV, ATTENTION, OUTPUT, GATE_UP, ACTIVATION, DOWN };

// Each thread has one; the first thread's times count.
class Watch {
  public:
    explicit Watch(int64_t *times) : times_(times), last_(times == nullptr ? 0 : now()) {}

    void lap(Operation operation) {
        if (times_ == nullptr) return;
        const int64_t time = now();
#pragma omp master
        times_[operation] += time - last_;
        last_ = time;
    }

  private:
    static int64_t now() { return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count(); }

    int64_t *times_, last_;
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

void attend(const Decoder &d, const Step &s, const LayerCache &cache, const Scratch &scratch) {
    const int64_t all_heads = (GROUP_SIZE + 2) * d.kv_heads;
#pragma omp for schedule(static)
    for (int64_t t = 0; t < s.tokens; t++) {
        Element *heads = scratch.wide + t * all_heads * HEAD_DIM;
        for (int64_t h = 0; h < all_heads - d.kv_heads; h++)
            rotate_head(heads + h * HEAD_DIM, HEAD_DIM, d.rotary + s.positions[t] * 2 * HEAD_DIM);
        store_token(heads, d.kv_heads, s.slots[t], cache);
    }
    const Tiles tiles{s.tiles, s.num_tiles, d.kv_heads, scratch.wide, cache, s.tables, s.width, d.scale, scratch.narrow};
    if (scratch.sums == nullptr)
        attend_tiles(tiles);
    else
        attend_segments(tiles, scratch.segments, scratch.sums);
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
    Watch watch(scratch.times);
    clear(scratch.hidden, s.tokens, size);
    for (int64_t i = 0; i < d.num_layers; i++) {
        const Layer &layer = d.layers[i];
        const bool is_last = i == d.num_layers - 1;
        const int64_t rows = is_last ? s.outputs : s.tokens;
        float *hidden = is_last ? scratch.selected : scratch.hidden;
        normalize(scratch.hidden, s.delta, layer.input_norm, s.tokens, size, scratch.narrow, &layer.qkv, scratch);
        watch.lap(NORMS);
        product(x, layer.qkv, s.tokens, scratch.wide);
        watch.lap(QKV);
        attend(d, s, s.caches[i], scratch);
        prepare_attended(s, is_last, rows, size, layer.output, scratch);
        watch.lap(ATTENTION);
        product(x, layer.output, rows, s.delta);
        watch.lap(OUTPUT);
        normalize(hidden, s.delta, layer.post_attention_norm, rows, size, scratch.narrow, &layer.gate_up, scratch);
        watch.lap(NORMS);
        product(x, layer.gate_up, rows, scratch.wide);
        watch.lap(GATE_UP);
        activate(rows, layer.down, scratch);
        watch.lap(ACTIVATION);
        product(x, layer.down, rows, s.delta);
        watch.lap(DOWN);
    }
    normalize(scratch.selected, s.delta, d.norm, s.outputs, size, s.out, nullptr, scratch);
    watch.lap(NORMS);
}

}  // namespace
