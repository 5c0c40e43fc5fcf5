// Attention over the paged KV cache, for one model: HEAD_DIM, GROUP_SIZE (query heads that share keys and values),
// TILE_SIZE (tokens of queries at a time), CACHE_ELEMENT (ELEMENT or int8_t), BLOCK_SIZE (tokens in a KV block),
// SEGMENT_SIZE (tokens of a context whose sums are computed by themselves).

#pragma once

#include "cache.h"

namespace {

constexpr int STRIP = 4;  // rows whose sums are in registers together, at most
constexpr int QUERIES = TILE_SIZE * GROUP_SIZE;
constexpr int WIDE = INSTRUCTIONS >= AVX512 && PARTS % 4 == 0 ? 4 : PARTS % 3 == 0 ? 3 : PARTS % 2 == 0 ? 2 : 1;
constexpr int KEYS = 64;  // between two looks at the maximum
constexpr int GROUPS = KEYS / LANES;

struct Tile {
    int64_t sequence, row, tokens, context;  // the first token's row in the batch; the context of the last one
};

// Of a tile's queries over some tokens, by weights exp(score - largest score): the sums of weighted values, and of
// weights.
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

    // Adds the sums over the tokens behind these.
    void merge(const SegmentSums &next, int rows) {
        for (int r = 0; r < rows; r++) {
            if (sum(next.totals[r]) == 0) continue;  // the query is before these tokens
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
            const float total = sum(totals[r]);
            for (int p = 0; p < PARTS; p++) store_lanes(to + p * LANES, results[r][p] / total, part_size(p));
        }
    }
};

// Some tokens of a context, copied: keys with a token a lane, values with an element a lane. Lanes of keys behind the
// tokens hold anything.
class CopiedTokens {
  public:
    static constexpr int UNIT = std::gcd(GROUP_SIZE, STRIP);  // divides the rows of each strip

    void read(const HeadCache &cache, int64_t start, int count, int64_t) {
        for (int k = 0; k < count; k += RUN) {
            const CacheElement *keys = cache.keys(start + k);
            float *to = (float *)keys_[k / LANES] + k % LANES;
            for (int d = 0; d < HEAD_DIM; d++) store_lanes(to + d * LANES, load(keys + d * BLOCK_SIZE, RUN), RUN);
        }
        for (int k = 0; k < count; k++) {
            const CacheElement *values = cache.values(start + k);
            for (int p = 0; p < PARTS; p++) values_[k][p] = load(values + p * LANES, part_size(p));
        }
    }
    Floats key(int group, int element) const { return keys_[group][element]; }
    Floats value(int token, int part) const { return values_[token][part]; }

  private:
    Floats keys_[GROUPS][HEAD_DIM];
    Floats values_[KEYS][PARTS];
};

// The same numbers, read from the cache each time, for which a group of LANES tokens must lie in one block.
class TokensInPlace {
  public:
    static constexpr int UNIT = GROUP_SIZE;  // divides the rows of the only strip

    // Tokens up to `end` will be read next.
    void read(const HeadCache &cache, int64_t start, int count, int64_t end) {
        for (int k = 0; k < count; k += LANES) {
            const int64_t next = start + k + KEYS < end ? start + k + KEYS : start + k;
            keys_[k / LANES] = cache.keys(start + k);
            values_[k / LANES] = cache.values(start + k);
            next_keys_[k / LANES] = cache.keys(next);
            next_values_[k / LANES] = cache.values(next);
        }
    }
    Floats key(int group, int element) const {
        if (element * BLOCK_SIZE * sizeof(CacheElement) % LINE == 0)
            __builtin_prefetch(next_keys_[group] + element * BLOCK_SIZE);
        return load(keys_[group] + element * BLOCK_SIZE);
    }
    Floats value(int token, int part) const {
        const int64_t place = token % LANES * HEAD_DIM + part * LANES;
        if (part * LANES * sizeof(CacheElement) % LINE == 0)
            __builtin_prefetch(next_values_[token / LANES] + place);
        return load(values_[token / LANES] + place, part_size(part));
    }

  private:
    static constexpr int LINE = 64;  // bytes

    const CacheElement *keys_[GROUPS], *values_[GROUPS], *next_keys_[GROUPS], *next_values_[GROUPS];
};

// Attention of a tile's queries, which for each token are a group of heads, by an online softmax (arXiv 1805.02867,
// 2205.14135): the sums are scaled down whenever a larger score is met. Each segment of the context has sums of its own,
// and they are merged in their order, so that threads can share a long context and the bits do not depend on it.
class TileAttention {
  public:
    TileAttention(const Tile &tile, const Element *queries, int64_t stride, int64_t step, float scale, int64_t window)
        : rows_(tile.tokens * GROUP_SIZE), first_(tile.context - tile.tokens), window_(window) {
        for (int r = 0; r < rows_; r++) {
            const Element *query = queries + r / GROUP_SIZE * stride + r % GROUP_SIZE * step;
            for (int p = 0; p < PARTS; p++) ((Floats *)queries_[r])[p] = load(query + p * LANES, part_size(p)) * scale;
        }
    }

    void attend(const HeadCache &cache, int64_t segment, SegmentSums &sums) {
        sums.clear(rows_);
        const int64_t first = std::max(begin_of(0) / KEYS * KEYS, segment * SEGMENT_SIZE);
        const int64_t end = std::min(seen_by(rows_ - 1), (segment + 1) * SEGMENT_SIZE);
        for (int64_t start = first; start < end; start += KEYS) {
            const int here = int(std::min<int64_t>(KEYS, end - start));
            if constexpr (IS_QUANTIZED) read_scales(cache, start, here);
            if constexpr (RUN == LANES && GROUP_SIZE <= STRIP)
                if (rows_ <= STRIP) {
                    attend_tokens(cache, in_place_, start, here, end, sums);
                    continue;
                }
            attend_tokens(cache, copied_, start, here, end, sums);
        }
    }

  private:
    // Row r sees the tokens of its window: from begin_of up to seen_by.
    int64_t seen_by(int r) const { return first_ + r / GROUP_SIZE + 1; }
    int64_t begin_of(int r) const { return std::max<int64_t>(seen_by(r) - window_, 0); }
    static int within(int64_t token, int64_t start, int here) {
        return int(std::clamp<int64_t>(token - start, 0, here));
    }

    void read_scales(const HeadCache &cache, int64_t start, int count) {
        for (int k = 0; k < count; k += RUN) {
            std::memcpy((float *)key_scales_ + k, cache.key_scales(start + k), RUN * sizeof(float));
            std::memcpy((float *)value_scales_ + k, cache.value_scales(start + k), RUN * sizeof(float));
        }
    }

    template <class Tokens>
    void attend_tokens(const HeadCache &cache, Tokens &tokens, int64_t start, int here, int64_t end,
                       SegmentSums &sums) {
        tokens.read(cache, start, here, end);
        int r = 0;
        for (; r + STRIP <= rows_; r += STRIP) attend_strip<STRIP>(tokens, r, start, here, sums);
        switch (rows_ - r) {
            case 3: return attend_strip<3>(tokens, r, start, here, sums);
            case 2: return attend_strip<2>(tokens, r, start, here, sums);
            case 1: return attend_strip<1>(tokens, r, start, here, sums);
        }
    }

    template <int ROWS, class Tokens>
    void attend_strip(const Tokens &tokens, int r, int64_t start, int here, SegmentSums &sums) {
        if constexpr (ROWS % Tokens::UNIT == 0) {
            const int count = within(seen_by(r + ROWS - 1), start, here);
            if (count == within(begin_of(r), start, here)) return;
            score<ROWS>(tokens, r, count);
            for (int i = r; i < r + ROWS; i++)
                weigh(i, within(begin_of(i), start, here), within(seen_by(i), start, here), count, sums);
            add_values<ROWS>(tokens, r, start, here, sums);
        }
    }

    template <int ROWS, class Tokens>
    void score(const Tokens &tokens, int r, int count) {
        constexpr int AT_ONCE = ROWS == STRIP ? 2 : 4;  // groups of keys, so many that the latency of sums is hidden
        const int groups = (count + LANES - 1) / LANES;
        for (int g = 0; g < groups; g += AT_ONCE) {
            int group[AT_ONCE];  // the last one again, where there are no more
            for (int j = 0; j < AT_ONCE; j++) group[j] = std::min(g + j, groups - 1);
            Floats sums[ROWS][AT_ONCE]{};
            for (int d = 0; d < HEAD_DIM; d++) {
                Floats keys[AT_ONCE];
                for (int j = 0; j < AT_ONCE; j++) keys[j] = tokens.key(group[j], d);
#pragma GCC unroll 4
                for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 4
                    for (int j = 0; j < AT_ONCE; j++) sums[i][j] += queries_[r + i][d] * keys[j];
            }
            for (int i = 0; i < ROWS; i++)
                for (int j = 0; j < AT_ONCE; j++)
                    scores_[r + i][group[j]] = IS_QUANTIZED ? sums[i][j] * key_scales_[group[j]] : sums[i][j];
        }
    }

    // Scores of the keys from `begin` to `end` become weights, and those of others 0.
    void weigh(int r, int begin, int end, int count, SegmentSums &sums) {
        const auto is_seen = [=](Ints key) { return (key >= begin) & (key < end); };
        Ints lane;
        for (int i = 0; i < LANES; i++) lane[i] = i;
        const int groups = (count + LANES - 1) / LANES;
        Floats top = all(sums.largest[r]);
        for (int g = 0; g < groups; g++)
            top = larger(top, is_seen(lane + g * LANES) ? scores_[r][g] : all(-INFINITY));
        const float now = largest(top), base = now == -INFINITY ? 0 : now;
        Floats total{};
        for (int g = 0; g < groups; g++) {
            const Floats weights = is_seen(lane + g * LANES) ? exponential(scores_[r][g] - base) : Floats{};
            total += weights;
            scores_[r][g] = IS_QUANTIZED ? weights * value_scales_[g] : weights;
        }
        if (now > sums.largest[r]) {
            const float shrunk = exponential(all(sums.largest[r] - now))[0];
            sums.totals[r] *= shrunk;
            for (int p = 0; p < PARTS; p++) sums.results[r][p] *= shrunk;
            sums.largest[r] = now;
        }
        sums.totals[r] += total;
    }

    // A key that not all rows of the strip see is left to those that do: 0 times a value that is not finite is nan.
    template <int ROWS, class Tokens>
    void add_values(const Tokens &tokens, int r, int64_t start, int here, SegmentSums &to) {
        int begin[ROWS], end[ROWS];  // ascending
        for (int i = 0; i < ROWS; i++) {
            begin[i] = within(begin_of(r + i), start, here);
            end[i] = within(seen_by(r + i), start, here);
        }
        const int all_begin = begin[ROWS - 1], all_end = std::max(end[0], all_begin);  // seen by all rows
        const float *weights = (const float *)scores_[r];
        for (int first = 0; first < PARTS; first += WIDE) {
            Floats sums[ROWS][WIDE];
            for (int i = 0; i < ROWS; i++)
                for (int p = 0; p < WIDE; p++) sums[i][p] = to.results[r + i][first + p];
            const auto add_others = [&](int i, int from, int to) {
                for (int k = std::max(from, begin[i]); k < std::min(to, end[i]); k++)
                    for (int p = 0; p < WIDE; p++) sums[i][p] += weights[i * KEYS + k] * tokens.value(k, first + p);
            };
            for (int i = 0; i < ROWS - 1; i++) add_others(i, 0, all_begin);
            for (int k = all_begin; k < all_end; k++) {
                Floats values[WIDE];
                for (int p = 0; p < WIDE; p++) values[p] = tokens.value(k, first + p);
#pragma GCC unroll 4
                for (int i = 0; i < ROWS; i++)
                    for (int p = 0; p < WIDE; p++) sums[i][p] += weights[i * KEYS + k] * values[p];
            }
            for (int i = 1; i < ROWS; i++) add_others(i, all_end, here);
            for (int i = 0; i < ROWS; i++)
                for (int p = 0; p < WIDE; p++) to.results[r + i][first + p] = sums[i][p];
        }
    }

    const int rows_;
    const int64_t first_, window_;  // position of the first token; tokens that a query sees
    alignas(64) float queries_[QUERIES][PARTS * LANES];
    Floats scores_[QUERIES][GROUPS];
    Floats key_scales_[GROUPS], value_scales_[GROUPS];  // of a quantized cache
    CopiedTokens copied_;
    TokensInPlace in_place_;
};

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

    static int64_t segments(const Tile &tile) { return (tile.context + SEGMENT_SIZE - 1) / SEGMENT_SIZE; }

    // Of one head of keys and values.
    void attend(const Tile &tile, int64_t head, int64_t first, int64_t last, SegmentSums *sums) const {
        TileAttention attention(tile, queries(tile, head), row.size(), row.step(), scale, window);
        const HeadCache cached{cache, kv_heads, head, tables + tile.sequence * width};
        SegmentSums next;
        for (int64_t segment = first; segment < last; segment++) {
            attention.attend(cached, segment, segment == first ? *sums : next);
            if (segment > first) sums->merge(next, rows(tile));
        }
    }

    void write(const Tile &tile, int64_t head, const SegmentSums &sums) const {
        const int64_t stride = GROUP_SIZE * kv_heads * HEAD_DIM;
        Element *to = out + tile.row * stride + head * GROUP_SIZE * HEAD_DIM;
        sums.write(tile, to, stride);
        if (!row.has_gates) return;
        const Element *gates = queries(tile, head) + HEAD_DIM;
        for (int r = 0; r < rows(tile); r++) {
            const int64_t token = r / GROUP_SIZE, query = r % GROUP_SIZE;
            gate_row(to + token * stride + query * HEAD_DIM, gates + token * row.size() + query * row.step(), HEAD_DIM);
        }
    }

    // Of one head of keys and values.
    const Element *queries(const Tile &tile, int64_t head) const {
        return heads + tile.row * row.size() + head * GROUP_SIZE * row.step();
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
