// Attention by products of pairs of bfloat16, which are read in place. A lane has two elements of one token's key, or
// one element of two tokens' values. The first of two tokens has an even position, for every row, and each row adds its
// pairs in ascending order.

#pragma once

#include "dot.h"
#include "tile.h"

#if INSTRUCTIONS >= BF16

namespace {

// A word a lane; zeros behind the count. They stay in a register: GCC would load them again for each product.
inline Words load_words(const void *from, int count = LANES) {
    Words words = count == LANES ? (Words)_mm512_loadu_si512(from)
                                 : (Words)_mm512_maskz_loadu_epi32(__mmask16((1u << count) - 1), from);
    asm("" : "+v"(words));
    return words;
}

// The same as FloatAttention, but weights are rounded to bfloat16, also for their total.
//
// With few rows of queries, memory is the limit, and it is read fastest in its order. So several heads of keys and values
// are computed together: first the keys of all of them, which lie side by side, then their values. Those that come next are
// fetched meanwhile, also while weights are computed. Many rows are computed one head at a time, and share its keys and
// values in registers.
class PairAttention {
  public:
    // How many heads of keys and values can be computed together.
    static int most_heads(const Tile &tile) {
        return tile.tokens * GROUP_SIZE <= FEW ? std::max(1, TILE_SIZE / int(tile.tokens)) : 1;
    }

    // `queries`: of the first of the heads.
    PairAttention(const Tile &tile, int heads, const Element *queries, int64_t stride, int64_t step, float scale,
                  int64_t window)
        : rows_(tile, window), heads_(heads), queries_(queries), stride_(stride), step_(step),
          scale_(scale * 1.44269504f) {}

    // The sums have the rows of each head behind those of the head before. `cache` is the first head's.
    void attend(const HeadCache &cache, int64_t segment, const Next &next, SegmentSums &sums) {
        sums.clear(heads_ * rows_.count);
        rows_.for_pieces(cache, segment, next, [&](const Piece &piece, const Next &next) {
            num_runs_ = 0;
            add_runs(cache, piece);
            add_runs(*next.cache, next.piece);
            if (rows_.count <= FEW) return attend_by_runs(piece, sums);
            const int own = 2 * groups_of(piece), others = num_runs_ - own;
            rows_.for_strips<UNIT>([&](auto rows, int r) {
                for (int i = r * others / rows_.count; i < (r + rows) * others / rows_.count; i++)
                    runs_[own + i].fetch_part(0);
                attend_strip<rows>(r, piece, sums);
            });
        });
    }

  private:
    static constexpr int FEW = std::max(8, GROUP_SIZE);                         // rows of a head, at most
    static constexpr int AT_ONCE = 2;                                           // groups, to hide the latency of sums
    static constexpr int AHEAD = 2;                                             // runs, from the fetch to the use
    static constexpr int UNIT = std::gcd(GROUP_SIZE, STRIP);                    // divides the rows of each strip
    static constexpr int GROUP_PAIRS = LANES / 2;                               // of tokens
    static constexpr int KEY_STEP = 2 * BLOCK_SIZE, VALUE_STEP = 2 * HEAD_DIM;  // to the next two elements, or tokens
    static constexpr int LINE = 2 * LANES;                                      // elements of a register
    static constexpr int LINES = GROUP_PAIRS * PARTS;                           // of a head in a run, at most
    static constexpr uint32_t ONES = 0x3f803f80;

    // The keys or the values of a group, a part for each head.
    struct Run {
        const CacheElement *first;
        int64_t step;  // from line to line

        const CacheElement *part(int head) const { return first + head * HeadCache::SIZE; }
        void fetch_part(int head) const {
            for (int line = 0; line < LINES; line++) fetch(part(head) + line * step);
        }
    };

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

    void add_runs(const HeadCache &cache, const Piece &piece) {
        const int count = groups_of(piece);
        for (int g = 0; g < count; g++) {
            const int64_t position = piece.start + g * LANES;
            runs_[num_runs_ + g] = {cache.keys(position), KEY_STEP};
            runs_[num_runs_ + count + g] = {cache.values(position), LINE};
        }
        num_runs_ += 2 * count;
    }

    // Fetches a head's part of a run, or of the last run if there are fewer.
    void fetch_part(int run, int head) const { runs_[std::min(run, num_runs_ - 1)].fetch_part(head); }

    static int groups_of(const Piece &piece) { return (piece.size + LANES - 1) / LANES; }

    Seen seen_by(int r, const Piece &piece) const {
        return {piece.within(rows_.begin_of(r)), piece.within(rows_.seen_by(r))};
    }

    void attend_by_runs(const Piece &piece, SegmentSums &sums) {
        const int groups = groups_of(piece);
        Seen seen[FEW];
        for (int r = 0; r < rows_.count; r++) seen[r] = seen_by(r, piece);
        int g = 0;
        for (; g + AT_ONCE <= groups; g += AT_ONCE) score_heads<AT_ONCE>(g);
        for (; g < groups; g++) score_heads<1>(g);
        for (int h = 0; h < heads_; h++) {
            fetch_part(groups + AHEAD, h);
            rows_.for_strips<UNIT>([&](auto rows, int r) {
                const int row = h * rows_.count + r;
                weigh<rows>(row, seen + r, groups, row, sums);
            });
        }
        for (int g = 0; g < groups; g++)
            for (int h = 0; h < heads_; h++) {
                fetch_part(groups + g + AHEAD + 1, h);
                rows_.for_strips<UNIT>([&](auto rows, int r) {
                    const int row = h * rows_.count + r;
                    add_values<rows>(seen + r, row, &runs_[groups], h, g, g + 1, row, sums);
                });
            }
    }

    template <int COUNT>
    void score_heads(int g) {
        for (int h = 0; h < heads_; h++) {
            for (int j = 0; j < COUNT; j++) fetch_part(g + j + AHEAD, h);
            rows_.for_strips<UNIT>([&](auto rows, int r) { score<rows, COUNT>(h, r, g, h * rows_.count + r); });
        }
    }

    template <int ROWS>
    void attend_strip(int r, const Piece &piece, SegmentSums &sums) {
        Seen seen[ROWS];  // ascending
        for (int i = 0; i < ROWS; i++) seen[i] = seen_by(r + i, piece);
        const int count = seen[ROWS - 1].end, groups = (count + LANES - 1) / LANES;
        if (count == seen[0].begin) return;
        switch (groups) {
            case 1: score<ROWS, 1>(0, r, 0, 0); break;
            case 2: score<ROWS, 2>(0, r, 0, 0); break;
            case 3: score<ROWS, 3>(0, r, 0, 0); break;
            case 4: score<ROWS, 4>(0, r, 0, 0); break;
        }
        weigh<ROWS>(0, seen, groups, r, sums);
        add_values<ROWS>(seen, 0, &runs_[groups_of(piece)], 0, 0, groups, r, sums);
    }

    // The scores of some groups, for rows of head h, to row `to` of the scores, and those behind it.
    template <int ROWS, int COUNT>
    ONE_COPY void score(int h, int r, int g, int to) {
        const Element *queries[ROWS];
        for (int i = 0; i < ROWS; i++) queries[i] = query(h, r + i);
        const CacheElement *keys[COUNT];
        for (int j = 0; j < COUNT; j++) keys[j] = runs_[g + j].part(h);
        Floats sums[ROWS][COUNT]{};
        for (int d = 0; d < HEAD_DIM / 2; d++) {
            Words words[COUNT];
            for (int j = 0; j < COUNT; j++) words[j] = load_words(keys[j] + d * KEY_STEP);
#pragma GCC unroll 4
            for (int i = 0; i < ROWS; i++) {
                uint32_t pair;
                std::memcpy(&pair, queries[i] + 2 * d, sizeof pair);
#pragma GCC unroll 4
                for (int j = 0; j < COUNT; j++) sums[i][j] = add_pair(sums[i][j], words[j], pair);
            }
        }
        for (int i = 0; i < ROWS; i++)
            for (int j = 0; j < COUNT; j++) scores_[to + i][g + j] = sums[i][j] * scale_;
    }

    const Element *query(int h, int r) const {
        return queries_ + r / GROUP_SIZE * stride_ + (h * GROUP_SIZE + r % GROUP_SIZE) * step_;
    }

    // Scores of keys that a row sees become weights, and those of others 0: in ROWS rows of the scores from row `from` on,
    // whose sums are in as many rows from row r on.
    template <int ROWS>
    void weigh(int from, const Seen *seen, int groups, int r, SegmentSums &sums) {
        if (groups == GROUPS) return weigh_groups<ROWS>(from, seen, std::integral_constant<int, GROUPS>{}, r, sums);
        weigh_groups<ROWS>(from, seen, groups, r, sums);
    }

    // `groups`: a constant, for loops that are unrolled, or a number.
    template <int ROWS, class Count>
    ONE_COPY void weigh_groups(int from, const Seen *seen, Count groups, int r, SegmentSums &sums) {
        constexpr int COUNT = ROWS > 2 ? STRIP : ROWS;  // a power of 2
        __mmask16 masks[ROWS][GROUPS];
        Floats tops[COUNT];
        for (int i = 0; i < ROWS; i++) {
            const uint64_t bits = seen[i].bits();
            __m512 top = _mm512_set1_ps(sums.largest[r + i]);
            for (int g = 0; g < groups; g++) {
                masks[i][g] = __mmask16(bits >> g * LANES);
                top = _mm512_mask_max_ps(top, masks[i][g], (__m512)scores_[from + i][g], top);  // not of nan
            }
            tops[i] = (Floats)top;
        }
        for (int i = ROWS; i < COUNT; i++) tops[i] = tops[0];
        const Floats largest = combine_each<COUNT>(tops, larger);
        for (int i = 0; i < ROWS; i++) {
            const float now = largest[i * (LANES / COUNT)], base = now == -INFINITY ? 0 : now;
            sums.raise(r + i, now);
            Floats weights[GROUPS]{};
            for (int g = 0; g < groups; g++)
                weights[g] = (Floats)_mm512_maskz_mov_ps(masks[i][g], (__m512)weight_of(scores_[from + i][g] - base));
            for (int g = 0; g < GROUPS; g += 2) {
                const Words pairs = (Words)_mm512_cvtne2ps_pbh((__m512)weights[g + 1], (__m512)weights[g]);
                weights_[from + i][g / 2] = pairs;
                sums.totals[r + i] = add_pair(sums.totals[r + i], pairs, ONES);
            }
        }
    }

    // Adds the values of head h in some groups: with row `from` of the weights to row r of the sums, and so on. A row does
    // not add the value of a token that it does not see: 0 times a value that is not finite is nan.
    template <int ROWS>
    void add_values(const Seen *seen, int from, const Run *runs, int h, int first_group, int last_group, int r,
                    SegmentSums &to) const {
        const int begin = first_group * GROUP_PAIRS, end = last_group * GROUP_PAIRS;
        const int all_begin = std::clamp((seen[ROWS - 1].begin + 1) / 2, begin, end);  // seen by all rows
        const int all_end = std::clamp(seen[0].end / 2, all_begin, end);
        for (int i = 0; i < ROWS && begin < all_begin; i++)
            add_some_values(seen[i], from + i, runs, h, begin, all_begin, to.results[r + i]);
        add_pairs<ROWS>(from, runs, h, all_begin, all_end, &to.results[r]);
        for (int i = 0; i < ROWS && all_end < end; i++)
            add_some_values(seen[i], from + i, runs, h, all_end, end, to.results[r + i]);
    }

    // Of pairs of tokens that all rows see.
    template <int ROWS>
    void add_pairs(int from, const Run *runs, int h, int begin, int end, Floats (*results)[PARTS]) const {
        for (int first = 0; first < PARTS; first += WIDE) {
            Floats sums[ROWS][WIDE];
            const uint32_t *weights[ROWS];
            for (int i = 0; i < ROWS; i++) {
                weights[i] = (const uint32_t *)weights_[from + i];
                for (int p = 0; p < WIDE; p++) sums[i][p] = results[i][first + p];
            }
            for (int k = begin; k < end;) {
                const CacheElement *values = values_at(runs, h, k) + first * LINE;
                const int stop = std::min(end, (k / GROUP_PAIRS + 1) * GROUP_PAIRS);  // of the group
                for (; k < stop; k++, values += VALUE_STEP) {
                    Words pairs[WIDE];
                    for (int p = 0; p < WIDE; p++) pairs[p] = load_words(values + p * LINE, part_size(first + p));
#pragma GCC unroll 4
                    for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 4
                        for (int p = 0; p < WIDE; p++) sums[i][p] = add_pair(sums[i][p], pairs[p], weights[i][k]);
                }
            }
            for (int i = 0; i < ROWS; i++)
                for (int p = 0; p < WIDE; p++) results[i][first + p] = sums[i][p];
        }
    }

    // Of a row that does not see all pairs, or tokens of a pair.
    void add_some_values(const Seen &seen, int from, const Run *runs, int h, int begin, int end,
                         Floats (&results)[PARTS]) const {
        const auto *weights = (const uint32_t *)weights_[from];
        for (int k = std::max(begin, seen.pairs_begin()); k < std::min(end, seen.pairs_end()); k++)
            for (int p = 0; p < PARTS; p++) {
                const Words pairs = load_words(values_at(runs, h, k) + p * LINE, part_size(p)) & seen.halves(k);
                results[p] = add_pair(results[p], pairs, weights[k]);
            }
    }

    static const CacheElement *values_at(const Run *runs, int h, int pair) {
        return runs[pair / GROUP_PAIRS].part(h) + pair % GROUP_PAIRS * VALUE_STEP;
    }

    const TileRows rows_;
    const int heads_;
    const Element *const queries_;
    const int64_t stride_, step_;
    const float scale_;
    Run runs_[4 * GROUPS];  // a piece's keys, and its values; the next one's
    int num_runs_;
    Floats scores_[QUERIES][GROUPS];
    Words weights_[QUERIES][GROUPS / 2];  // of two tokens a word
};

}  // namespace

#endif
