// Attention over the paged KV cache, for one model: HEAD_DIM, GROUP_SIZE (query heads that share keys and values),
// TILE_SIZE (tokens of queries at a time), BLOCK_SIZE (tokens in a KV block), SEGMENT_SIZE (tokens of a context whose
// sums are computed by themselves).

#pragma once

#include "rows.h"

namespace {

template <int STEP>  // swaps the blocks off the diagonal, in every square of 2 * STEP lanes
inline void swap_blocks(Floats *square) {
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) {
        if (i & STEP) continue;
        const Floats a = square[i], b = square[i + STEP];
        Ints upper, lower;
        for (int j = 0; j < LANES; j++) {
            upper[j] = j & STEP ? j - STEP + LANES : j;
            lower[j] = j & STEP ? j + LANES : j + STEP;
        }
        square[i] = __builtin_shuffle(a, b, upper);
        square[i + STEP] = __builtin_shuffle(a, b, lower);
    }
}

inline void transpose(Floats *square) {
    if constexpr (LANES > 8) swap_blocks<8>(square);
    if constexpr (LANES > 4) swap_blocks<4>(square);
    swap_blocks<2>(square);
    swap_blocks<1>(square);
}

// ---- attention ----

constexpr int PARTS = (HEAD_DIM + LANES - 1) / LANES;  // of a head, in lanes
constexpr int REST = HEAD_DIM - (PARTS - 1) * LANES;   // elements of the last part
constexpr int STRIP = 4;                               // rows whose sums are in registers together
constexpr int QUERIES = (TILE_SIZE * GROUP_SIZE + STRIP - 1) / STRIP * STRIP;
constexpr int WIDE = INSTRUCTIONS >= AVX512 && PARTS % 4 == 0 ? 4 : PARTS % 3 == 0 ? 3 : PARTS % 2 == 0 ? 2 : 1;
constexpr int KEYS = 64;  // between two looks at the maximum
constexpr int GROUPS = KEYS / LANES;

inline int part_size(int part) { return part == PARTS - 1 ? REST : LANES; }

struct Tile {
    int64_t sequence, row, tokens, context;  // the first token's row in the batch; the context of the last one
};

// One head of keys and values, and where its blocks are.
struct Context {
    const Element *cache;  // the layer's, at this head's keys in the first block
    int64_t kv_heads;
    const int64_t *table;

    const Element *keys(int64_t position) const {
        const int64_t block = table[position / BLOCK_SIZE];
        return cache + (block * 2 * kv_heads * BLOCK_SIZE + position % BLOCK_SIZE) * HEAD_DIM;
    }
    const Element *values(int64_t position) const { return keys(position) + kv_heads * BLOCK_SIZE * HEAD_DIM; }
};

// Of a tile's queries over some tokens, by weights exp(score - largest score): the sums of weighted values, and of
// weights.
struct SegmentSums {
    Floats results[QUERIES][PARTS];
    float largest[QUERIES], totals[QUERIES];

    void clear(int rows) {
        for (int r = 0; r < rows; r++) {
            for (int p = 0; p < PARTS; p++) results[r][p] = Floats{};
            largest[r] = -INFINITY;
            totals[r] = 0;
        }
    }

    // Adds the sums over the tokens behind these.
    void merge(const SegmentSums &next, int rows) {
        for (int r = 0; r < rows; r++) {
            if (next.totals[r] == 0) continue;  // the query is before these tokens
            const float top = std::max(largest[r], next.largest[r]), base = top == -INFINITY ? 0 : top;
            const float ours = exponential(all(largest[r] - base))[0];
            const float theirs = exponential(all(next.largest[r] - base))[0];
            for (int p = 0; p < PARTS; p++) results[r][p] = results[r][p] * ours + next.results[r][p] * theirs;
            totals[r] = totals[r] * ours + next.totals[r] * theirs;
            largest[r] = top;
        }
    }

    void write(const Tile &tile, Element *out, int64_t stride) const {
        for (int r = 0; r < tile.tokens * GROUP_SIZE; r++) {
            Element *to = out + r / GROUP_SIZE * stride + r % GROUP_SIZE * HEAD_DIM;
            for (int p = 0; p < PARTS; p++) store_lanes(to + p * LANES, results[r][p] / totals[r], part_size(p));
        }
    }
};

// Attention of a tile's queries, which for each token are a group of heads, by an online softmax (arXiv 1805.02867,
// 2205.14135): the sums are scaled down whenever a larger score is met. Each segment of the context has sums of its own,
// and they are merged in their order, so that threads can share a long context and the bits do not depend on it.
class TileAttention {
  public:
    TileAttention(const Tile &tile, const Element *queries, int64_t stride, float scale)
        : rows_(tile.tokens * GROUP_SIZE), first_(tile.context - tile.tokens) {
        for (int r = 0; r < padded(); r++) {
            const Element *query = queries + r / GROUP_SIZE * stride + r % GROUP_SIZE * HEAD_DIM;
            for (int p = 0; p < PARTS; p++) {
                const Floats part = r < rows_ ? load(query + p * LANES, part_size(p)) : Floats{};
                ((Floats *)queries_[r])[p] = part * scale;
            }
        }
    }

    void attend(const Context &context, int64_t segment, SegmentSums &sums) {
        sums.clear(padded());
        const int64_t end = std::min(seen_by(rows_ - 1), (segment + 1) * SEGMENT_SIZE);
        for (int64_t start = segment * SEGMENT_SIZE; start < end; start += KEYS) {
            const int here = int(std::min<int64_t>(KEYS, end - start));
            read(context, start, here);
            for (int r = 0; r < padded(); r += STRIP) {
                const int count = seen_here(r + STRIP - 1, start, here);
                if (count == 0) continue;
                score(r, count);
                for (int i = r; i < r + STRIP; i++) weigh(i, seen_here(i, start, here), count, sums);
                add_values(r, start, here, sums);
            }
        }
    }

  private:
    int padded() const { return (rows_ + STRIP - 1) / STRIP * STRIP; }
    int64_t seen_by(int r) const { return first_ + std::min(r, rows_ - 1) / GROUP_SIZE + 1; }  // tokens
    int seen_here(int r, int64_t start, int here) const {
        return int(std::clamp<int64_t>(seen_by(r) - start, 0, here));
    }

    // Keys with a token a lane, values with an element a lane; behind the context its last token again.
    void read(const Context &context, int64_t start, int count) {
        for (int k = 0; k < count; k += LANES) {
            int64_t positions[LANES];
            for (int i = 0; i < LANES; i++) positions[i] = start + std::min(k + i, count - 1);
            for (int p = 0; p < PARTS; p++) {
                Floats square[LANES];
#pragma GCC unroll 16
                for (int i = 0; i < LANES; i++)
                    square[i] = load(context.keys(positions[i]) + p * LANES, part_size(p));
                transpose(square);
                for (int i = 0; i < LANES; i++) keys_[k / LANES][p * LANES + i] = square[i];
            }
            for (int i = 0; i < LANES; i++)
                for (int p = 0; p < PARTS; p++)
                    values_[k + i][p] = load(context.values(positions[i]) + p * LANES, part_size(p));
        }
    }

    void score(int r, int count) {
        const int groups = (count + LANES - 1) / LANES;
        for (int g = 0; g < groups; g += 2) {
            const int h = std::min(g + 1, groups - 1);  // two at a time hide the latency of sums
            Floats a[STRIP]{}, b[STRIP]{};
            for (int d = 0; d < PARTS * LANES; d++)
#pragma GCC unroll 4
                for (int i = 0; i < STRIP; i++) {
                    a[i] += queries_[r + i][d] * keys_[g][d];
                    b[i] += queries_[r + i][d] * keys_[h][d];
                }
            for (int i = 0; i < STRIP; i++) {
                scores_[r + i][g] = a[i];
                scores_[r + i][h] = b[i];
            }
        }
    }

    // Scores of the first `seen` keys become weights, those behind are nothing.
    void weigh(int r, int seen, int count, SegmentSums &sums) {
        Ints lane;
        for (int i = 0; i < LANES; i++) lane[i] = i;
        const int groups = (count + LANES - 1) / LANES;
        Floats top = all(sums.largest[r]);
        for (int g = 0; g < groups; g++)
            top = larger(top, lane + g * LANES < seen ? scores_[r][g] : all(-INFINITY));
        const float now = largest(top), base = now == -INFINITY ? 0 : now;
        Floats total{};
        for (int g = 0; g < groups; g++) {
            scores_[r][g] = lane + g * LANES < seen ? exponential(scores_[r][g] - base) : Floats{};
            total += scores_[r][g];
        }
        if (now > sums.largest[r]) {
            const float shrunk = exponential(all(sums.largest[r] - now))[0];
            sums.totals[r] *= shrunk;
            for (int p = 0; p < PARTS; p++) sums.results[r][p] *= shrunk;
            sums.largest[r] = now;
        }
        sums.totals[r] += sum(total);
    }

    // A key that not all rows of the strip see is left to those that do: 0 times a value that is not finite is nan.
    void add_values(int r, int64_t start, int here, SegmentSums &to) {
        int seen[STRIP];  // ascending
        for (int i = 0; i < STRIP; i++) seen[i] = seen_here(r + i, start, here);
        const float *weights = (const float *)scores_[r];
        for (int first = 0; first < PARTS; first += WIDE) {
            Floats sums[STRIP][WIDE];
            for (int i = 0; i < STRIP; i++)
                for (int p = 0; p < WIDE; p++) sums[i][p] = to.results[r + i][first + p];
            for (int k = 0; k < seen[0]; k++)
#pragma GCC unroll 4
                for (int i = 0; i < STRIP; i++)
                    for (int p = 0; p < WIDE; p++) sums[i][p] += weights[i * KEYS + k] * values_[k][first + p];
            for (int i = 1; i < STRIP; i++)
                for (int k = seen[0]; k < seen[i]; k++)
                    for (int p = 0; p < WIDE; p++) sums[i][p] += weights[i * KEYS + k] * values_[k][first + p];
            for (int i = 0; i < STRIP; i++)
                for (int p = 0; p < WIDE; p++) to.results[r + i][first + p] = sums[i][p];
        }
    }

    const int rows_;
    const int64_t first_;  // position of the first token
    alignas(64) float queries_[QUERIES][PARTS * LANES];
    Floats scores_[QUERIES][GROUPS];
    Floats keys_[GROUPS][PARTS * LANES];
    Floats values_[KEYS][PARTS];
};

// The keys and values behind a token's queries, to its slot.
inline void store_token(const Element *heads, int64_t kv_heads, int64_t slot, Element *cache) {
    const Element *from = heads + kv_heads * GROUP_SIZE * HEAD_DIM;
    Element *to = cache + (slot / BLOCK_SIZE * 2 * kv_heads * BLOCK_SIZE + slot % BLOCK_SIZE) * HEAD_DIM;
    for (int64_t h = 0; h < 2 * kv_heads; h++)
        std::memcpy(to + h * BLOCK_SIZE * HEAD_DIM, from + h * HEAD_DIM, HEAD_DIM * sizeof(Element));
}

// All tiles of a step in one layer. heads and out are those of the batch, tables [sequences, width].
struct Tiles {
    const Tile *tiles;
    int64_t count, kv_heads;
    const Element *heads, *cache;
    const int64_t *tables;
    int64_t width;
    float scale;
    Element *out;

    static int64_t segments(const Tile &tile) { return (tile.context + SEGMENT_SIZE - 1) / SEGMENT_SIZE; }

    // Of one head of keys and values.
    void attend(const Tile &tile, int64_t head, int64_t first, int64_t last, SegmentSums *sums) const {
        const int64_t stride = (GROUP_SIZE + 2) * kv_heads * HEAD_DIM;
        TileAttention attention(tile, heads + tile.row * stride + head * GROUP_SIZE * HEAD_DIM, stride, scale);
        const Context context{cache + head * BLOCK_SIZE * HEAD_DIM, kv_heads, tables + tile.sequence * width};
        SegmentSums next;
        for (int64_t segment = first; segment < last; segment++) {
            attention.attend(context, segment, segment == first ? *sums : next);
            if (segment > first) sums->merge(next, rows(tile));
        }
    }

    void write(const Tile &tile, int64_t head, const SegmentSums &sums) const {
        const int64_t stride = GROUP_SIZE * kv_heads * HEAD_DIM;
        sums.write(tile, out + tile.row * stride + head * GROUP_SIZE * HEAD_DIM, stride);
    }

    static int rows(const Tile &tile) { return int(tile.tokens) * GROUP_SIZE; }
};

// Called by all threads of a region, which share the tiles and heads.
inline void attend_tiles(const Tiles &t) {
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < t.count * t.kv_heads; i++) {
        const Tile &tile = t.tiles[i / t.kv_heads];
        SegmentSums sums;
        t.attend(tile, i % t.kv_heads, 0, t.segments(tile), &sums);
        t.write(tile, i % t.kv_heads, sums);
    }
}

// As attend_tiles, but they share the segments too, of which a tile has at most `segments`;
// `sums`: [count, kv_heads, segments].
inline void attend_segments(const Tiles &t, int64_t segments, SegmentSums *sums) {
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < t.count * t.kv_heads * segments; i++) {
        const int64_t unit = i / segments, segment = i % segments;
        const Tile &tile = t.tiles[unit / t.kv_heads];
        if (segment < t.segments(tile)) t.attend(tile, unit % t.kv_heads, segment, segment + 1, sums + i);
    }
#pragma omp for schedule(static)
    for (int64_t i = 0; i < t.count * t.kv_heads; i++) {
        const Tile &tile = t.tiles[i / t.kv_heads];
        SegmentSums *own = sums + i * segments;
        for (int64_t segment = 1; segment < t.segments(tile); segment++) own->merge(own[segment], t.rows(tile));
        t.write(tile, i % t.kv_heads, *own);
    }
}

}  // namespace
