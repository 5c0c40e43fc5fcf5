// Attention by sums of float32, of numbers that are widened.

#pragma once

#include "tile.h"

namespace {

// Some tokens of a context, copied: keys with a token a lane, values with an element a lane. Lanes of keys behind the
// tokens hold anything.
class CopiedTokens {
  public:
    static constexpr int UNIT = std::gcd(GROUP_SIZE, STRIP);  // divides the rows of each strip

    void read(const HeadCache &cache, const Piece &piece, const Next &) {
        for (int k = 0; k < piece.size; k += RUN) {
            const CacheElement *keys = cache.keys(piece.start + k);
            float *to = (float *)keys_[k / LANES] + k % LANES;
            for (int d = 0; d < HEAD_DIM; d++) store_lanes(to + d * LANES, load(keys + d * BLOCK_SIZE, RUN), RUN);
        }
        for (int k = 0; k < piece.size; k++) {
            const CacheElement *values = cache.values(piece.start + k);
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

    void read(const HeadCache &cache, const Piece &piece, const Next &next) {
        for (int k = 0; k < piece.size; k += LANES) {
            keys_[k / LANES] = next_keys_[k / LANES] = cache.keys(piece.start + k);
            values_[k / LANES] = next_values_[k / LANES] = cache.values(piece.start + k);
        }
        for (int k = 0; k < std::min(piece.size, next.piece.size); k += LANES) {
            next_keys_[k / LANES] = next.cache->keys(next.piece.start + k);
            next_values_[k / LANES] = next.cache->values(next.piece.start + k);
        }
    }
    Floats key(int group, int element) const {
        if (element * BLOCK_SIZE * sizeof(CacheElement) % LINE == 0)
            fetch(next_keys_[group] + element * BLOCK_SIZE);
        return load(keys_[group] + element * BLOCK_SIZE);
    }
    Floats value(int token, int part) const {
        const int64_t place = token % LANES * HEAD_DIM + part * LANES;
        if (part * LANES * sizeof(CacheElement) % LINE == 0)
            fetch(next_values_[token / LANES] + place);
        return load(values_[token / LANES] + place, part_size(part));
    }

  private:
    static constexpr int LINE = 64;  // bytes

    const CacheElement *keys_[GROUPS], *values_[GROUPS], *next_keys_[GROUPS], *next_values_[GROUPS];
};

// Attention of a tile's queries by an online softmax (arXiv 1805.02867, 2205.14135): the sums are scaled down whenever a
// larger score is met. Each segment of the context has sums of its own, and they are merged in their order, so that
// threads can share a long context and the bits do not depend on it.
class FloatAttention {
  public:
    static int most_heads(const Tile &) { return 1; }

    // Of one head of keys and values.
    FloatAttention(const Tile &tile, int, const Element *queries, int64_t stride, int64_t step, float scale,
                   int64_t window)
        : rows_(tile, window) {
        for (int r = 0; r < rows_.count; r++) {
            const Element *query = queries + r / GROUP_SIZE * stride + r % GROUP_SIZE * step;
            for (int p = 0; p < PARTS; p++) ((Floats *)queries_[r])[p] = load(query + p * LANES, part_size(p)) * scale;
        }
    }

    void attend(const HeadCache &cache, int64_t segment, const Next &next, SegmentSums &sums) {
        sums.clear(rows_.count);
        rows_.for_pieces(cache, segment, next, [&](const Piece &piece, const Next &next) {
            if constexpr (IS_QUANTIZED) read_scales(cache, piece);
            if constexpr (RUN == LANES && GROUP_SIZE <= STRIP)
                if (rows_.count <= STRIP) return attend_piece(cache, in_place_, piece, next, sums);
            attend_piece(cache, copied_, piece, next, sums);
        });
    }

  private:
    void read_scales(const HeadCache &cache, const Piece &piece) {
        for (int k = 0; k < piece.size; k += RUN) {
            std::memcpy((float *)key_scales_ + k, cache.key_scales(piece.start + k), RUN * sizeof(float));
            std::memcpy((float *)value_scales_ + k, cache.value_scales(piece.start + k), RUN * sizeof(float));
        }
    }

    template <class Tokens>
    void attend_piece(const HeadCache &cache, Tokens &tokens, const Piece &piece, const Next &next, SegmentSums &sums) {
        tokens.read(cache, piece, next);
        rows_.for_strips<Tokens::UNIT>([&](auto rows, int r) { attend_strip<rows>(tokens, r, piece, sums); });
    }

    template <int ROWS, class Tokens>
    void attend_strip(const Tokens &tokens, int r, const Piece &piece, SegmentSums &sums) {
        const int count = piece.within(rows_.seen_by(r + ROWS - 1));
        if (count == piece.within(rows_.begin_of(r))) return;
        score<ROWS>(tokens, r, count);
        for (int i = r; i < r + ROWS; i++)
            weigh(i, piece.within(rows_.begin_of(i)), piece.within(rows_.seen_by(i)), count, sums);
        add_values<ROWS>(tokens, r, piece, sums);
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
        sums.raise(r, now);
        sums.totals[r] += total;
    }

    // A key that not all rows of the strip see is left to those that do: 0 times a value that is not finite is nan.
    template <int ROWS, class Tokens>
    void add_values(const Tokens &tokens, int r, const Piece &piece, SegmentSums &to) {
        int begin[ROWS], end[ROWS];  // ascending
        for (int i = 0; i < ROWS; i++) {
            begin[i] = piece.within(rows_.begin_of(r + i));
            end[i] = piece.within(rows_.seen_by(r + i));
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
            for (int i = 1; i < ROWS; i++) add_others(i, all_end, piece.size);
            for (int i = 0; i < ROWS; i++)
                for (int p = 0; p < WIDE; p++) to.results[r + i][first + p] = sums[i][p];
        }
    }

    const TileRows rows_;
    alignas(64) float queries_[QUERIES][PARTS * LANES];
    Floats scores_[QUERIES][GROUPS];
    Floats key_scales_[GROUPS], value_scales_[GROUPS];  // of a quantized cache
    CopiedTokens copied_;
    TokensInPlace in_place_;
};

}  // namespace
