// Layers with experts: a router's scores choose some MLPs for each row. The rows of an expert lie together, and are computed
// by one product for all of them; an expert without rows costs nothing. A row's results are added in the order of its
// scores, so that its bits do not depend on other rows. A shared expert is the last one: every row's, and its last.

#pragma once

#include "products.h"
#include "rows.h"

namespace {

struct Routing {
    int64_t experts, chosen;  // of all; of a row: with the shared one
    bool normalizes;          // whether the weights of a row add up to 1, without the shared one's
    bool has_shared;          // whose weight is the sigmoid of its score
};

struct Experts {
    Routing routing;
    Weight router;
    const Weight *gate_up, *down;  // [experts]; null: the layer has none
    int64_t *loads;                // [experts]: the rows that each had in the last step

    // Always false in the library of a model without experts, so that the compiler drops the code for them.
    bool are_there() const { return HAS_EXPERTS && gate_up != nullptr; }
};

// Some rows of an expert.
struct Span {
    int64_t expert, start, end;
};

// Room for the choices of all rows.
struct Routes {
    int64_t *chosen, *places;  // [rows, chosen]: experts, and the place of a row among the rows of each
    float *weights;            // [rows, chosen]
    int64_t *starts;           // [experts]
    Span *spans;               // [rows * chosen]
    int64_t num_spans;
};

// The experts with the largest scores, the first of equal ones first, and the softmax of their scores at them. Then the
// shared one.
ONE_COPY void route_row(const Element *scores, const Routing &routing, int64_t *chosen, float *weights) {
    const int64_t routed = routing.experts - routing.has_shared, most = routing.chosen - routing.has_shared;
    int64_t found = 0;
    for (int64_t expert = 0; expert < routed; expert++) {
        const float score = number(scores[expert]);
        int64_t place = found;
        while (place > 0 && score > weights[place - 1]) place--;
        if (place == most) continue;
        found = std::min(found + 1, most);
        for (int64_t i = found - 1; i > place; i--) {
            chosen[i] = chosen[i - 1];
            weights[i] = weights[i - 1];
        }
        chosen[place] = expert;
        weights[place] = score;
    }
    const float largest = weights[0];
    float total = 0, share = 0;  // of all, and of the chosen ones
    for_lanes(routed, [&](int64_t i, int count) {
        const Floats terms = exponential(load(scores + i, count) - largest);
        for (int lane = 0; lane < count; lane++) total += terms[lane];
    });
    for_lanes(most, [&](int64_t i, int count) {
        const Floats terms = exponential(load(weights + i, count) - largest) / total;
        for (int lane = 0; lane < count; lane++) share += terms[lane];
        store_lanes(weights + i, terms, count);
    });
    if (routing.normalizes)
        for (int64_t i = 0; i < most; i++) weights[i] /= share;
    if (!routing.has_shared) return;
    chosen[most] = routed;
    weights[most] = (1.0f / (1.0f + exponential(-load(scores + routed, 1))))[0];
}

// The sum of the results [places, size] at a row's places, by its weights.
ONE_COPY void mix_row(const Element *results, const int64_t *places, const float *weights, int64_t chosen, int64_t size,
                      Element *out) {
    for_lanes(size, [&](int64_t i, int count) {
        Floats sum{};
        for (int64_t j = 0; j < chosen; j++)
            sum = multiply_add(load(results + places[j] * size + i, count), all(weights[j]), sum);
        store_lanes(out + i, sum, count);
    });
}

// Each expert's rows begin with a whole group of rows (floats.h), and keep their order. A place is as large as its expert, so
// that rows overlap unless the smaller experts have the first places: maybe the shared one. One thread calls it.
inline void place_rows(const Experts &experts, int64_t rows, Routes &routes) {
    const Routing &routing = experts.routing;
    std::fill_n(experts.loads, routing.experts, 0);
    for (int64_t i = 0; i < rows * routing.chosen; i++) experts.loads[routes.chosen[i]]++;
    const int64_t last = routing.experts - 1, first = experts.down[last].inputs < experts.down[0].inputs ? last : 0;
    int64_t start = 0;
    routes.num_spans = 0;
    for (int64_t i = 0; i < routing.experts; i++) {
        const int64_t expert = (first + i) % routing.experts;
        const int64_t end = start + experts.loads[expert];
        routes.starts[expert] = start;
        for (int64_t row = start; row < end; row += FLOAT_BLOCK)
            routes.spans[routes.num_spans++] = {expert, row, std::min<int64_t>(row + FLOAT_BLOCK, end)};
        start = (end + ROW_GROUP - 1) / ROW_GROUP * ROW_GROUP;
    }
    for (int64_t i = 0; i < rows * routing.chosen; i++) routes.places[i] = routes.starts[routes.chosen[i]]++;
}

// As `product` (products.h), of each span by its expert's weight: the threads of a parallel region share the tasks of all.
inline void expert_products(const Inputs &x, const Weight *weights, const Routes &routes, Element *out) {
    int64_t pieces = 0;  // of a weight, at most: the weights of a layer may be of integers, and of others
    for (int64_t i = 0; i < routes.num_spans; i++)
        pieces = std::max(pieces, num_tasks(weights[routes.spans[i].expert]));
#pragma omp for schedule(guided)
    for (int64_t number = 0; number < pieces * routes.num_spans; number++) {
        const Span &span = routes.spans[number / pieces];
        const Weight &w = weights[span.expert];
        if (number % pieces < num_tasks(w)) product_task(x, w, span.start, span.end, number % pieces, {out});
    }
}

}  // namespace
