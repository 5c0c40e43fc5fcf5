// All of a decoder in one parallel region, by the operations, and so with the bits, of the kernels that are called one by
// one (native.cpp, attention.cpp).

#pragma once

#include <chrono>

#include "attention.h"
#include "delta.h"
#include "experts.h"

namespace {

struct Layer {
    Weight qkv, output, gate_up, down;  // the last two of a layer without experts
    Experts experts;
    Norm query_norm, key_norm;
    Rotary rotary;
    int64_t window;                       // tokens that a query sees, itself among them
    int64_t has_gates;                    // of attention's results
    Convolution convolution;              // in place of attention
    Delta delta;                          // in place of attention
    Residual after_attention, after_mlp;  // the latter with the next layer's norm, or the last one
};

struct Decoder {
    const Element *embedding;  // [vocabulary, size]
    int64_t vocabulary;
    float embedding_scale;
    const Layer *layers;
    int64_t num_layers, kv_heads;
    Norm norm;    // of the embeddings
    float scale;  // of the scores
    Activation activation;
    Weight head;  // without data: an embedding model
    float logits_scaling;
};

// Of the output rows.
struct Logits {
    float *all;         // [outputs, outputs of the head]
    float *best;        // [outputs]
    int64_t *best_ids;  // [outputs]
};

struct Step {
    int64_t tokens;
    const int64_t *token_ids;                         // [tokens]
    const Element *embeddings;                        // [tokens, size]; null: those of the token ids
    const int64_t *positions, *slots, *window_slots;  // [tokens]
    const Tile *tiles;
    int64_t num_tiles;
    const int64_t *tables, *window_tables;  // [sequences, width]
    int64_t width;
    const LayerCache *caches;    // one for each layer with keys and values
    void *const *states;         // [slots, …]: one for each layer with a convolution, two for one with a delta net
    StateRows state_rows;
    const int64_t *output_rows;  // [outputs]: the tokens that go through all of the last layer
    int64_t outputs;
    Element *out;                // [outputs, size]: normalized hidden states; null: logits are computed of them
    Logits logits;
};

// Room for all tokens. All threads share `delta`, `wide` and `mixed`; the other rows may be a thread's own.
struct Scratch {
    Inputs inputs;
    float *hidden, *selected;  // [tokens, size]; of the output rows, as the last layer leaves them
    Element *narrow;           // rows that are prepared for the next product
    Element *delta;            // [tokens, size]: what is to be added to the hidden states
    Element *wide;             // queries, keys and values; inputs beside states; gates and what they multiply
    Element *mixed;            // the results of attention, a convolution or a delta net
    Routes routes;             // of a decoder with experts
    SegmentSums *sums;         // [num_tiles, segments, kv_heads]; null: each tile's context is read by one thread
    int64_t *times;            // the nanoseconds of each operation in all layers, added up; null: not measured
    int64_t rows, columns;     // room for the threads' own rows, and the columns of each
    int64_t is_own;            // whether these are a thread's own, of a single token

    // A step of one token is computed by every thread for itself between products: one thread alone would take as long,
    // and the others would wait for it. Experts have routes, which threads share.
    bool can_be_own(int64_t tokens, int64_t threads) const {
        return tokens == 1 && threads * ROW_GROUP <= rows && routes.chosen == nullptr;
    }

    Scratch own(int64_t thread) const {
        Scratch own = *this;
        const int64_t first = thread * ROW_GROUP;
        own.inputs = rows_from(inputs, first, columns);
        own.hidden += first * columns, own.selected += first * columns, own.narrow += first * columns;
        own.is_own = true;
        return own;
    }
};

// All threads of a region call this, share the rows, and wait for the last one; or each computes its own. `next`: the
// product of these rows, or null.
template <class Body>
void for_rows(const Scratch &scratch, int64_t rows, const Weight *next, Body body) {
    if (scratch.is_own) {
        if (next != nullptr) fetch_share(*next);
        for (int64_t r = 0; r < rows; r++) body(r);
    } else {
#pragma omp for schedule(static)
        for (int64_t r = 0; r < rows; r++) body(r);
    }
}

enum Operation { NORMS, QKV, ATTENTION, CONVOLUTION, DELTA, OUTPUT, GATE_UP, ACTIVATION, DOWN, HEAD, BEST, ROUTER, ROUTING };

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

// All threads of the region call the functions below.

// Sets the hidden states to the embeddings, and prepares their norms for the first layer.
void embed(const Decoder &d, const Step &s, int64_t size, const Scratch &scratch) {
    for_rows(scratch, s.tokens, &d.layers[0].qkv, [&](int64_t t) {
        const bool is_given = s.embeddings != nullptr;
        const Element *from = is_given ? s.embeddings + t * size : d.embedding + s.token_ids[t] * size;
        const float scale = is_given ? 1.0f : d.embedding_scale;
        Element *row = scratch.narrow + t * size;
        for_lanes(size, [&](int64_t i, int count) { store_lanes(row + i, load(from + i, count) * scale, count); });
        float *hidden = scratch.hidden + t * size;
        std::memset(hidden, 0, size * sizeof *hidden);
        add_row(hidden, row, {{}, 1.0f, d.norm}, size, row);
        prepare_row(row, t, d.layers[0].qkv, scratch.inputs);
    });
}

// Adds the last product to the hidden states. `next`: the product of the result, or null.
void add_rows(float *hidden, const Residual &residual, int64_t rows, int64_t size, const Weight *next,
              const Scratch &scratch) {
    for_rows(scratch, rows, next, [&](int64_t r) {
        Element *row = scratch.narrow + r * size;
        std::memcpy(row, scratch.delta + r * size, size * sizeof *row);
        add_row(hidden + r * size, row, residual, size, row);
        if (next != nullptr) prepare_row(row, r, *next, scratch.inputs);
    });
}

// All queries of a token together, or each head by itself, as where gates lie between them.
void norm_queries(Element *heads, int64_t queries, const HeadRow &row, const Norm &norm) {
    if (!norm.is_there()) return;
    if (!row.has_gates) return norm_parts(heads, queries * HEAD_DIM, norm);
    for (int64_t h = 0; h < queries; h++) norm_parts(heads + h * row.step(), HEAD_DIM, norm);
}

void attend(const Decoder &d, const Layer &layer, const Step &s, const LayerCache &cache, const Scratch &scratch) {
    const int64_t queries = GROUP_SIZE * d.kv_heads;
    const HeadRow row{d.kv_heads, layer.has_gates != 0};
    const int64_t *slots = cache.is_windowed ? s.window_slots : s.slots;
    const int64_t *tables = cache.is_windowed ? s.window_tables : s.tables;
#pragma omp for schedule(static)
    for (int64_t t = 0; t < s.tokens; t++) {
        fetch_slot(d.kv_heads, slots[std::min(t + 1, s.tokens - 1)], cache);
        Element *heads = scratch.wide + t * row.size(), *keys = heads + row.keys();
        norm_queries(heads, queries, row, layer.query_norm);
        if (layer.key_norm.is_there()) norm_parts(keys, d.kv_heads * HEAD_DIM, layer.key_norm);
        if (layer.rotary.table != nullptr) {
            const Element *cosines = layer.rotary.at(s.positions[t]);
            for (int64_t h = 0; h < queries; h++) rotate_head(heads + h * row.step(), layer.rotary.size, cosines);
            for (int64_t h = 0; h < d.kv_heads; h++) rotate_head(keys + h * HEAD_DIM, layer.rotary.size, cosines);
        }
        store_token(keys, d.kv_heads, slots[t], cache);
    }
    attend_tiles({s.tiles, s.num_tiles, d.kv_heads, scratch.wide, row, cache, tables, s.width, d.scale, layer.window,
                  scratch.mixed},
                 scratch.sums);
}

// `cache` and `states` go on to those of the next layer.
Operation mix(const Decoder &d, const Layer &layer, const Step &s, const LayerCache *&cache, void *const *&states,
              const Scratch &scratch) {
    if (layer.convolution.is_there()) {
        auto *kept = static_cast<Element *>(*states++);
        convolve(layer.convolution, scratch.wide, s.tokens, kept, s.state_rows, scratch.mixed);
        return CONVOLUTION;
    }
    if (layer.delta.is_there()) {
        auto *kept = static_cast<Element *>(*states++);
        auto *matrices = static_cast<float *>(*states++);
        update_delta(layer.delta, scratch.wide, kept, matrices, s.state_rows, scratch.mixed);
        return DELTA;
    }
    attend(d, layer, s, *cache++, scratch);
    return ATTENTION;
}

// The last layer goes on with the output rows alone: the others are needed for their keys, values and states only.
void prepare_mixed(const Step &s, bool is_last, int64_t rows, int64_t size, const Weight &next,
                   const Scratch &scratch) {
    for_rows(scratch, rows, &next, [&](int64_t r) {
        const int64_t row = is_last ? s.output_rows[r] : r;
        if (is_last) std::memcpy(scratch.selected + r * size, scratch.hidden + row * size, size * sizeof(float));
        prepare_row(scratch.mixed + row * next.inputs, r, next, scratch.inputs);
    });
}

void activate(int64_t rows, Activation activation, const Weight &next, const Scratch &scratch) {
    const int64_t size = next.inputs;
    for_rows(scratch, rows, &next, [&](int64_t r) {
        gated_row(scratch.wide + r * 2 * size, size, activation, scratch.narrow + r * size);
        prepare_row(scratch.narrow + r * size, r, next, scratch.inputs);
    });
}

void multiply(const Layer &layer, int64_t rows, Activation activation, const Scratch &scratch, Watch &watch) {
    product(scratch.inputs, layer.gate_up, rows, {scratch.wide});
    watch.lap(GATE_UP);
    activate(rows, activation, layer.down, scratch);
    watch.lap(ACTIVATION);
    product(scratch.inputs, layer.down, rows, {scratch.delta});
    watch.lap(DOWN);
}

// Choose the experts of each row by the scores in `wide`, and prepare the rows of `narrow` at their places.
void route_rows(const Experts &experts, int64_t rows, Scratch &scratch) {
    const Routing &routing = experts.routing;
    Routes &routes = scratch.routes;
#pragma omp for schedule(static)
    for (int64_t r = 0; r < rows; r++)
        route_row(scratch.wide + r * routing.experts, routing, routes.chosen + r * routing.chosen,
                  routes.weights + r * routing.chosen);
#pragma omp single
    place_rows(experts, rows, routes);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < rows * routing.chosen; i++) {
        const Weight &next = experts.gate_up[routes.chosen[i]];
        prepare_row(scratch.narrow + i / routing.chosen * next.inputs, routes.places[i], next, scratch.inputs);
    }
}

void activate_experts(const Experts &experts, int64_t rows, Activation activation, const Scratch &scratch) {
    const Routes &routes = scratch.routes;
#pragma omp for schedule(static)
    for (int64_t i = 0; i < rows * experts.routing.chosen; i++) {
        const Weight &next = experts.down[routes.chosen[i]];
        const int64_t size = next.inputs, place = routes.places[i];
        gated_row(scratch.wide + place * 2 * size, size, activation, scratch.narrow + place * size);
        prepare_row(scratch.narrow + place * size, place, next, scratch.inputs);
    }
}

// `narrow` has the rows, which are prepared for the router.
void multiply(const Experts &experts, int64_t rows, Activation activation, Scratch &scratch, Watch &watch) {
    const int64_t chosen = experts.routing.chosen, size = experts.router.inputs;
    const Routes &routes = scratch.routes;
    product(scratch.inputs, experts.router, rows, {scratch.wide});
    watch.lap(ROUTER);
    route_rows(experts, rows, scratch);
    watch.lap(ROUTING);
    expert_products(scratch.inputs, experts.gate_up, routes, scratch.wide);
    watch.lap(GATE_UP);
    activate_experts(experts, rows, activation, scratch);
    watch.lap(ACTIVATION);
    expert_products(scratch.inputs, experts.down, routes, scratch.wide);
    watch.lap(DOWN);
#pragma omp for schedule(static)
    for (int64_t r = 0; r < rows; r++)
        mix_row(scratch.wide, routes.places + r * chosen, routes.weights + r * chosen, chosen, size, scratch.delta + r * size);
    watch.lap(ROUTING);
}

// Of the output rows, which are prepared for the head.
void compute_logits(const Decoder &d, const Step &s, const Inputs &x, Watch &watch) {
    const auto [all, best, best_ids] = s.logits;
    const int64_t size = d.head.outputs;
    product(x, d.head, s.outputs, {nullptr, all});
    watch.lap(HEAD);
#pragma omp for schedule(static)
    for (int64_t r = 0; r < s.outputs; r++) {
        float *row = all + r * size;
        if (d.logits_scaling != 1.0f) divide_row(row, size, d.logits_scaling);
        best_ids[r] = best_place(row, size, best + r);
    }
    watch.lap(BEST);
}

void decode(const Decoder &d, const Step &s, Scratch &scratch) {
    const int64_t size = d.layers[0].qkv.inputs;
    const Inputs &x = scratch.inputs;
    const LayerCache *cache = s.caches;
    void *const *states = s.states;
    Watch watch(scratch.times);
    embed(d, s, size, scratch);
    watch.lap(NORMS);
    for (int64_t i = 0; i < d.num_layers; i++) {
        const Layer &layer = d.layers[i];
        const bool is_last = i == d.num_layers - 1;
        const int64_t rows = is_last ? s.outputs : s.tokens;
        float *hidden = is_last ? scratch.selected : scratch.hidden;
        product(x, layer.qkv, s.tokens, {scratch.wide});
        watch.lap(QKV);
        const Operation mixer = mix(d, layer, s, cache, states, scratch);
        prepare_mixed(s, is_last, rows, size, layer.output, scratch);
        watch.lap(mixer);
        product(x, layer.output, rows, {scratch.delta});
        watch.lap(OUTPUT);
        const Weight &next = layer.experts.are_there() ? layer.experts.router : layer.gate_up;
        add_rows(hidden, layer.after_attention, rows, size, &next, scratch);
        watch.lap(NORMS);
        if (layer.experts.are_there())
            multiply(layer.experts, rows, d.activation, scratch, watch);
        else
            multiply(layer, rows, d.activation, scratch, watch);
        const Weight *following = !is_last ? &d.layers[i + 1].qkv : s.out == nullptr ? &d.head : nullptr;
        add_rows(hidden, layer.after_mlp, rows, size, following, scratch);
        watch.lap(NORMS);
    }
    if (s.out == nullptr) return compute_logits(d, s, x, watch);
#pragma omp for schedule(static)
    for (int64_t r = 0; r < s.outputs; r++)
        std::memcpy(s.out + r * size, scratch.narrow + r * size, size * sizeof *s.out);
}

}  // namespace
