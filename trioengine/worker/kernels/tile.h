// A tile of queries, the tokens that they see, and the sums of their attention, for one model: HEAD_DIM, GROUP_SIZE
// (query heads that share keys and values), TILE_SIZE (tokens of queries at a time), CACHE_ELEMENT (ELEMENT or int8_t),
// BLOCK_SIZE (tokens in a KV block), SEGMENT_SIZE (tokens of a context whose sums are computed by themselves).

#pragma once

#include "attention.h"

namespace {

constexpr int STRIP = 4;  // rows whose sums are in registers together, at most
constexpr int QUERIES = TILE_SIZE * GROUP_SIZE;
constexpr int WIDE = INSTRUCTIONS >= AVX512 && PARTS % 4 == 0 ? 4 : PARTS % 3 == 0 ? 3 : PARTS % 2 == 0 ? 2 : 1;
constexpr int KEYS = 64;  // between two looks at the maximum
constexpr int GROUPS = KEYS / LANES;

struct Tile {
    int64_t sequence, row, tokens, context;  // the first token's row in the batch; the context of the last one
};

// Tokens of a context between two looks at the largest score.
struct Piece {
    int64_t start;
    int size;

    int within(int64_t token) const { return int(std::clamp<int64_t>(token - start, 0, size)); }
};

// The piece that is read next, and is fetched meanwhile. Its size may be 0.
struct Next {
    const HeadCache *cache;
    Piece piece;
};

// The rows of a tile's queries, a group for each token. Row r sees the tokens of its window, from begin_of up to
// seen_by.
struct TileRows {
    int count;
    int64_t first, window;  // the position of the first token; tokens that a query sees

    TileRows(const Tile &tile, int64_t window)
        : count(int(tile.tokens) * GROUP_SIZE), first(tile.context - tile.tokens), window(window) {}

    int64_t seen_by(int r) const { return first + r / GROUP_SIZE + 1; }
    int64_t begin_of(int r) const { return std::max<int64_t>(seen_by(r) - window, 0); }

    // The first piece of a segment.
    Piece first_of(int64_t segment) const {
        return piece_at(std::max(begin_of(0) / KEYS * KEYS, segment * SEGMENT_SIZE), end_of(segment));
    }

    // All pieces of a segment: body(piece, next); `next` is behind the last one.
    template <class Body>
    void for_pieces(const HeadCache &cache, int64_t segment, const Next &next, Body body) const {
        const int64_t end = end_of(segment);
        for (Piece piece = first_of(segment); piece.size > 0;) {
            const Piece behind = piece_at(piece.start + KEYS, end);
            body(piece, behind.size > 0 ? Next{&cache, behind} : next);
            piece = behind;
        }
    }

    // body(rows of the strip, a constant; its first row); UNIT divides the rows of each strip.
    template <int UNIT, class Body>
    void for_strips(Body body) const {
        int r = 0;
        for (; r + STRIP <= count; r += STRIP) body(std::integral_constant<int, STRIP>{}, r);
        for_rest<UNIT, STRIP - 1>(r, body);
    }

  private:
    int64_t end_of(int64_t segment) const { return std::min(seen_by(count - 1), (segment + 1) * SEGMENT_SIZE); }
    static Piece piece_at(int64_t start, int64_t end) {
        return {start, int(std::clamp<int64_t>(end - start, 0, KEYS))};
    }

    template <int UNIT, int ROWS, class Body>
    void for_rest(int r, Body body) const {
        if constexpr (ROWS > 0) {
            if constexpr (ROWS % UNIT == 0)
                if (count - r == ROWS) return body(std::integral_constant<int, ROWS>{}, r);
            for_rest<UNIT, ROWS - 1>(r, body);
        }
    }
};

// The weight of a score, by its distance from the largest one, 0 or less: e to the power of the distance. For pairs the
// scores are multiplied with log2(e), and it is 2 to the power of the distance.
inline Floats weight_of(Floats distance) {
#if INSTRUCTIONS >= BF16
    if constexpr (CACHE_IN_PAIRS) return power_of_2(distance);
#endif
    return exponential(distance);
}

// For each query of a tile, over some tokens: the sums of weighted values and of weights, and the largest score, on
// which the weights depend.
struct SegmentSums {
    Floats results[QUERIES][PARTS];
    Floats totals[QUERIES];  // of the tokens in each lane
    float largest[QUERIES];

    void clear(int rows) {
        for (int r = 0; r < rows; r++) {
            for (int p = 0; p < PARTS; p++) results[r][p] = Floats{};
            largest[r] = -INFINITY;
            totals[r] = Floats{};
        }
    }

    // Scales the sums of row r down if `top` is larger than its largest score.
    void raise(int r, float top) {
        if (!(top > largest[r])) return;
        if (largest[r] > -INFINITY) {
            const float shrunk = weight_of(all(largest[r] - top))[0];
            totals[r] *= shrunk;
            for (int p = 0; p < PARTS; p++) results[r][p] *= shrunk;
        }
        largest[r] = top;
    }

    void copy(const SegmentSums &from, int begin, int end) {
        for (int r = begin; r < end; r++) {
            for (int p = 0; p < PARTS; p++) results[r][p] = from.results[r][p];
            totals[r] = from.totals[r];
            largest[r] = from.largest[r];
        }
    }

    // Adds the sums of some rows over the tokens behind these.
    void merge(const SegmentSums &next, int begin, int end) {
        for (int r = begin; r < end; r++) {
            if (sum(next.totals[r]) == 0) continue;  // the query is before these tokens
            const float top = std::max(largest[r], next.largest[r]), base = top == -INFINITY ? 0 : top;
            Floats distances{};
            distances[0] = largest[r] - base, distances[1] = next.largest[r] - base;
            const Floats weights = weight_of(distances);
            const float ours = weights[0], theirs = weights[1];
            for (int p = 0; p < PARTS; p++) results[r][p] = results[r][p] * ours + next.results[r][p] * theirs;
            totals[r] = totals[r] * ours + next.totals[r] * theirs;
            largest[r] = top;
        }
    }

    void write(int r, Element *to) const {
        const float total = sum(totals[r]);
        for (int p = 0; p < PARTS; p++) store_lanes(to + p * LANES, results[r][p] / total, part_size(p));
    }
};

}  // namespace
