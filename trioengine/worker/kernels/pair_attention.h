// Attention by products of pairs of bfloat16, which are read in place. A lane has two elements of one token's key, or
// one element of two tokens' values. The first of two tokens has an even position, for every row, and each row adds its
// pairs in ascending order.

#pragma once

#include "dot.h"
#include "tile.h"

#if INSTRUCTIONS >= BF16

namespace {

// A word a lane; zeros behind the count.
inline Words load_words(const void *from, int count = LANES) {
    return count == LANES ? (Words)_mm512_loadu_si512(from)
                          : (Words)_mm512_maskz_loadu_epi32(__mmask16((1u << count) - 1), from);
}

// The same as FloatAttention, but weights are rounded to bfloat16, also for their total.
class PairAttention {
  public:
    PairAttention(const Tile &tile, const Element *queries, int64_t stride, int64_t step, float scale, int64_t window)
        : rows_(tile, window), queries_(queries), stride_(stride), step_(step), scale_(scale * 1.44269504f) {}

    void attend(const HeadCache &cache, int64_t segment, const Next &next, SegmentSums &sums) {
        sums.clear(rows_.count);
        rows_.for_pieces(cache, segment, next, [&](const Piece &piece, const Next &next) {
            read(cache, piece, next);
            rows_.for_strips<UNIT>([&](auto rows, int r) { attend_strip<rows>(r, piece, sums); });
        });
    }

  private:
    static constexpr int UNIT = std::gcd(GROUP_SIZE, STRIP);              // divides the rows of each strip
    static constexpr int PAIRS = KEYS / 2, GROUP_PAIRS = LANES / 2;       // of tokens
    static constexpr int KEY_STEP = 2 * BLOCK_SIZE, VALUE_STEP = 2 * HEAD_DIM;  // to the next two elements, or tokens
    static constexpr int SOON = 4;  // steps, of a line or more each, from `fetch_soon` to the use
    static constexpr uint32_t ONES = 0x3f803f80;

    void read(const HeadCache &cache, const Piece &piece, const Next &next) {
        for (int k = 0; k < piece.size; k += LANES) {
            keys_[k / LANES] = cache.keys(piece.start + k);
            values_[k / LANES] = cache.values(piece.start + k);
        }
        num_next_ = (next.piece.size + LANES - 1) / LANES;
        for (int g = 0; g < num_next_; g++) {
            next_keys_[g] = next.cache->keys(next.piece.start + g * LANES);
            next_values_[g] = next.cache->values(next.piece.start + g * LANES);
        }
    }

    // Fetches two elements of the next groups' keys. Those of all strips are the same.
    void fetch_next_keys(int d) const {
        for (int g = 0; g < num_next_; g++) fetch(next_keys_[g] + d * KEY_STEP);
    }

    // Fetches the values of two tokens.
    void fetch_next_values(int pair) const {
        const CacheElement *values = next_values_[pair / GROUP_PAIRS] + pair % GROUP_PAIRS * VALUE_STEP;
        for (int p = 0; p < PARTS; p++) fetch(values + p * 2 * LANES);
    }

    // The tokens of a piece that a row sees.
    struct Seen {
        int begin, end;

        uint64_t bits() const { return begin == end ? 0 : ~uint64_t(0) >> (KEYS - (end - begin)) << begin; }
        int pairs_begin() const { return begin / 2; }
        int pairs_end() const { return begin == end ? 0 : (end + 1) / 2; }
        // The mask of a word of two tokens, of which at least one is seen.
        uint32_t halves(int pair) const {
            return (2 * pair >= begin ? 0x0000ffff : 0) | (2 * pair + 1 < end ? 0xffff0000 : 0);
        }
    };

    template <int ROWS>
    void attend_strip(int r, const Piece &piece, SegmentSums &sums) {
        Seen seen[ROWS];  // ascending
        for (int i = 0; i < ROWS; i++)
            seen[i] = {piece.within(rows_.begin_of(r + i)), piece.within(rows_.seen_by(r + i))};
        const int count = seen[ROWS - 1].end, groups = (count + LANES - 1) / LANES;
        if (count == seen[0].begin) return;
        switch (groups) {
            case 1: score<ROWS, 1>(r); break;
            case 2: score<ROWS, 2>(r); break;
            case 3: score<ROWS, 3>(r); break;
            case 4: score<ROWS, 4>(r); break;
        }
        for (int i = 0; i < ROWS; i++) weigh(i, seen[i].bits(), groups, r + i, sums);
        add_values<ROWS>(seen, r, sums);
    }

    const Element *query(int r) const { return queries_ + r / GROUP_SIZE * stride_ + r % GROUP_SIZE * step_; }

    template <int ROWS, int COUNT>
    void score(int r) {
        Floats sums[ROWS][COUNT]{};
        const Element *queries[ROWS];
        for (int i = 0; i < ROWS; i++) queries[i] = query(r + i);
        for (int d = 0; d < HEAD_DIM / 2; d++) {
            Words keys[COUNT];
            for (int g = 0; g < COUNT; g++) keys[g] = load_words(keys_[g] + d * KEY_STEP);
            if (r == 0) fetch_next_keys(d);
            if (r == 0 && d + SOON < HEAD_DIM / 2)
                for (int g = 0; g < COUNT; g++) fetch_soon(keys_[g] + (d + SOON) * KEY_STEP);
#pragma GCC unroll 4
            for (int i = 0; i < ROWS; i++) {
                uint32_t pair;
                std::memcpy(&pair, queries[i] + 2 * d, sizeof pair);
#pragma GCC unroll 4
                for (int g = 0; g < COUNT; g++) sums[i][g] = add_pair(sums[i][g], keys[g], pair);
            }
        }
        for (int i = 0; i < ROWS; i++)
            for (int g = 0; g < COUNT; g++) scores_[i][g] = sums[i][g] * scale_;
    }

    // Scores of keys that the strip's row i sees become weights, and those of others 0.
    void weigh(int i, uint64_t seen, int groups, int r, SegmentSums &sums) {
        __m512 top = _mm512_set1_ps(sums.largest[r]);
        for (int g = 0; g < groups; g++)
            top = _mm512_mask_max_ps(top, __mmask16(seen >> g * LANES), (__m512)scores_[i][g], top);  // not of nan
        const float now = _mm512_reduce_max_ps(top), base = now == -INFINITY ? 0 : now;
        sums.raise(r, now);
        Floats weights[GROUPS]{};
        for (int g = 0; g < groups; g++)
            weights[g] = (Floats)_mm512_maskz_mov_ps(__mmask16(seen >> g * LANES),
                                                     (__m512)weight_of(scores_[i][g] - base));
        for (int g = 0; g < GROUPS; g += 2) {
            const Words pairs = (Words)_mm512_cvtne2ps_pbh((__m512)weights[g + 1], (__m512)weights[g]);
            weights_[i][g / 2] = pairs;
            sums.totals[r] = add_pair(sums.totals[r], pairs, ONES);
        }
    }

    // A row does not add the value of a token that it does not see: 0 times a value that is not finite is nan.
    template <int ROWS>
    void add_values(const Seen (&seen)[ROWS], int r, SegmentSums &to) {
        const int all_begin = (seen[ROWS - 1].begin + 1) / 2, all_end = std::max(seen[0].end / 2, all_begin);
        for (int first = 0; first < PARTS; first += WIDE) {
            const bool fetches = r == 0 && first == 0;
            Floats sums[ROWS][WIDE];
            for (int i = 0; i < ROWS; i++)
                for (int p = 0; p < WIDE; p++) sums[i][p] = to.results[r + i][first + p];
            const auto add_others = [&](int i, int begin, int end) {
                for (int k = std::max(begin, seen[i].pairs_begin()); k < std::min(end, seen[i].pairs_end()); k++)
                    for (int p = 0; p < WIDE; p++)
                        sums[i][p] = add_pair(sums[i][p], values(k, first + p) & seen[i].halves(k), weights(i, k));
            };
            for (int i = 0; i < ROWS; i++) add_others(i, 0, all_begin);
            for (int k = all_begin; k < all_end; k++) {
                Words pairs[WIDE];
                for (int p = 0; p < WIDE; p++) pairs[p] = values(k, first + p);
                if (fetches && k < num_next_ * GROUP_PAIRS) fetch_next_values(k);
                if (fetches && k + SOON < all_end)
                    for (int p = 0; p < PARTS; p++) fetch_soon(values_at(k + SOON, p));
#pragma GCC unroll 4
                for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 4
                    for (int p = 0; p < WIDE; p++) sums[i][p] = add_pair(sums[i][p], pairs[p], weights(i, k));
            }
            for (int i = 0; i < ROWS; i++) add_others(i, all_end, PAIRS);
            if (fetches)
                for (int k = all_end; k < num_next_ * GROUP_PAIRS; k++) fetch_next_values(k);
            for (int i = 0; i < ROWS; i++)
                for (int p = 0; p < WIDE; p++) to.results[r + i][first + p] = sums[i][p];
        }
    }

    const CacheElement *values_at(int pair, int part) const {
        return values_[pair / GROUP_PAIRS] + pair % GROUP_PAIRS * VALUE_STEP + part * 2 * LANES;
    }
    Words values(int pair, int part) const { return load_words(values_at(pair, part), part_size(part)); }
    uint32_t weights(int i, int pair) const { return ((const uint32_t *)weights_[i])[pair]; }

    const TileRows rows_;
    const Element *const queries_;
    const int64_t stride_, step_;
    const float scale_;
    const CacheElement *keys_[GROUPS], *values_[GROUPS], *next_keys_[GROUPS], *next_values_[GROUPS];
    int num_next_;
    Floats scores_[STRIP][GROUPS];
    Words weights_[STRIP][GROUPS / 2];  // of two tokens a word
};

}  // namespace

#endif
