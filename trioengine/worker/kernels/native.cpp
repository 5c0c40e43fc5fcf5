// The CPU's kernels, compiled for one model: ELEMENT (float or bfloat16), CACHE_ELEMENT, HEAD_DIM, GROUP_SIZE, TILE_SIZE,
// BLOCK_SIZE and SEGMENT_SIZE (tile.h), and HAS_STATES and HAS_EXPERTS, of its layers (0 or 1).
//
// All is computed in float32, a register of numbers at a time (lanes.h), in GCC's vector extension, and products by the
// best instructions (dot.h). Not compiled with -ffast-math: what is not finite must be seen, in its sequence and in no
// other. Attention is compiled beside it (attention.cpp).

#include "decoder.h"

namespace {

// x [rows, inputs]; out [rows, outputs]; `room` is for that many rows.
inline void prepare_and_multiply(const Weight &w, const Element *x, int64_t rows, const Inputs &room, const Results &out) {
#pragma omp parallel
    {
#pragma omp for schedule(static)
        for (int64_t r = 0; r < rows; r++) prepare_row(x + r * w.inputs, r, w, room);
        product(room, w, rows, out);
    }
}

}  // namespace

extern "C" {

// ---- one operation a call, by native_kernels.py: the reference of decoder.h ----

// heads [tokens, (group_size + 2) * kv_heads, head_dim].
void store(const Element *heads, int64_t tokens, int64_t kv_heads, const int64_t *slots, const LayerCache *cache) {
    const HeadRow row{kv_heads, false};
#pragma omp parallel for schedule(static) if (tokens > 1)
    for (int64_t t = 0; t < tokens; t++) {
        fetch_slot(kv_heads, slots[std::min(t + 1, tokens - 1)], *cache);
        store_token(heads + t * row.size() + row.keys(), kv_heads, slots[t], *cache);
    }
}

CacheOrder cache_order() { return CACHE_IN_PAIRS ? CacheOrder::PAIRS : CacheOrder::TRANSPOSED_KEYS; }

void add(float *hidden, Element *delta, const Residual *residual, int64_t rows, int64_t size, Element *out) {
#pragma omp parallel for schedule(static) if (rows > 1)
    for (int64_t r = 0; r < rows; r++) add_row(hidden + r * size, delta + r * size, *residual, size, out + r * size);
}

// heads [tokens, all_heads, head_dim], of which the first `count` are normalized.
void norm_heads(Element *heads, int64_t tokens, int64_t all_heads, int64_t count, const Norm *norm) {
#pragma omp parallel for schedule(static) if (tokens > 1)
    for (int64_t t = 0; t < tokens; t++) norm_parts(heads + t * all_heads * HEAD_DIM, count * HEAD_DIM, *norm);
}

void rotate(Element *heads, int64_t tokens, int64_t all_heads, int64_t count, const Rotary *rotary,
            const int64_t *positions) {
#pragma omp parallel for schedule(static) if (tokens > 1)
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t h = 0; h < count; h++)
            rotate_head(heads + (t * all_heads + h) * HEAD_DIM, rotary->size, rotary->at(positions[t]));
}

#if HAS_STATES
// inputs [tokens, 3 * size]; states [slots, taps - 1, size]; out [tokens, size].
void convolve(const Convolution *convolution, const Element *inputs, int64_t tokens, Element *states,
              const StateRows *rows, Element *out) {
#pragma omp parallel
    convolve(*convolution, inputs, tokens, states, *rows, out);
}

// Of delta.h's shapes.
void update_delta(const Delta *delta, const Element *inputs, Element *kept, float *matrices, const StateRows *rows,
                  Element *out) {
#pragma omp parallel
    update_delta(*delta, inputs, kept, matrices, *rows, out);
}
#endif

// results and gates [rows, size].
void gate(Element *results, const Element *gates, int64_t rows, int64_t size) {
#pragma omp parallel for schedule(static) if (rows > 1)
    for (int64_t r = 0; r < rows; r++) gate_row(results + r * size, gates + r * size, size);
}

void gated(const Element *gate_up, int64_t rows, int64_t size, Activation activation, Element *out) {
#pragma omp parallel for schedule(static) if (rows > 1)
    for (int64_t r = 0; r < rows; r++) gated_row(gate_up + r * 2 * size, size, activation, out + r * size);
}

// logits [rows, size].
void best(const float *logits, int64_t rows, int64_t size, float *largest_ones, int64_t *places) {
#pragma omp parallel for schedule(static) if (rows > 1)
    for (int64_t r = 0; r < rows; r++) places[r] = best_place(logits + r * size, size, largest_ones + r);
}

#if HAS_EXPERTS
void route(const Element *scores, int64_t rows, const Routing *routing, int64_t *chosen, float *weights) {
#pragma omp parallel for schedule(static) if (rows > 1)
    for (int64_t r = 0; r < rows; r++)
        route_row(scores + r * routing->experts, *routing, chosen + r * routing->chosen, weights + r * routing->chosen);
}

// results [rows, chosen, size]; places [rows, chosen]: the numbers from 0 on.
void mix(const Element *results, const int64_t *places, const float *weights, int64_t rows, int64_t chosen, int64_t size,
         Element *out) {
#pragma omp parallel for schedule(static) if (rows > 1)
    for (int64_t r = 0; r < rows; r++)
        mix_row(results, places + r * chosen, weights + r * chosen, chosen, size, out + r * size);
}
#endif

// ---- called by products.py ----

// Bytes of a packed weight of the dtype.
int64_t packed_size(int64_t outputs, int64_t inputs) {
    return num_streams(outputs) * STREAM * padded(inputs) * sizeof(Element);
}

void pack(const Element *weight, int64_t outputs, int64_t inputs, Element *packed) {
#pragma omp parallel for schedule(static)
    for (int64_t stream = 0; stream < num_streams(outputs); stream++)
        pack_stream(weight, outputs, inputs, stream, packed);
}

void linear(const Weight *w, const Element *x, int64_t rows, const Inputs *room, Element *out) {
    prepare_and_multiply(*w, x, rows, *room, {out});
}

// The same without the last rounding.
void linear_to_floats(const Weight *w, const Element *x, int64_t rows, const Inputs *room, float *out) {
    prepare_and_multiply(*w, x, rows, *room, {nullptr, out});
}

// ---- called by native_decoder.py ----

// Returns whether all token ids are in the vocabulary: computes nothing otherwise.
int64_t decode(const Decoder *d, const Step *s, Scratch *scratch) {
    for (int64_t t = 0; t < s->tokens; t++)
        if (s->token_ids[t] < 0 || s->token_ids[t] >= d->vocabulary) return false;
#pragma omp parallel
    if (scratch->can_be_own(s->tokens, omp_get_num_threads())) {
        Scratch own = scratch->own(omp_get_thread_num());
        decode(*d, *s, own);
    } else {
        decode(*d, *s, *scratch);
    }
    return true;
}

}  // extern "C"
