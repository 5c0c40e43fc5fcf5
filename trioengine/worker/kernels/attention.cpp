// Attention, compiled beside native.cpp for the same model.

#include <omp.h>

#include "attention.h"
#include "float_attention.h"
#include "pair_attention.h"

namespace {

#if INSTRUCTIONS >= BF16
using TileAttention = std::conditional_t<CACHE_IN_PAIRS, PairAttention, FloatAttention>;
#else
using TileAttention = FloatAttention;
#endif

// Attention of all tiles in one layer.
struct LayerAttention : Tiles {
    static int64_t segments(const Tile &tile) { return (tile.context + SEGMENT_SIZE - 1) / SEGMENT_SIZE; }
    // The first one of which a query sees tokens.
    int64_t first_segment(const Tile &tile) const { return TileRows(tile, window).begin_of(0) / SEGMENT_SIZE; }

    // Of some heads of keys and values. `next`: the piece that this thread reads after them. One copy, because GCC makes
    // slower loops of it inside others.
    ONE_COPY void attend(const Tile &tile, int64_t head, int64_t heads, int64_t first, int64_t last, const Next &next,
                         SegmentSums *sums) const {
        TileAttention attention(tile, int(heads), queries(tile, head), row.size(), row.step(), scale, window);
        const HeadCache cached = head_cache(tile, head);
        SegmentSums latest;
        for (int64_t segment = first; segment < last; segment++) {
            const Next behind{&cached, TileRows(tile, window).first_of(segment + 1)};
            attention.attend(cached, segment, segment + 1 < last ? behind : next, segment == first ? *sums : latest);
            if (segment > first) sums->merge(latest, 0, int(heads) * rows(tile));
        }
    }

    HeadCache head_cache(const Tile &tile, int64_t head) const {
        return {cache, kv_heads, head, tables + tile.sequence * width};
    }

    // Writes the results of some rows of a head of keys and values, whose sums begin at row `first`.
    void write(const Tile &tile, int64_t head, const SegmentSums &sums, int first, int begin, int end) const {
        const int64_t stride = GROUP_SIZE * kv_heads * HEAD_DIM;
        Element *to = out + tile.row * stride + head * GROUP_SIZE * HEAD_DIM;
        const Element *gates = queries(tile, head) + HEAD_DIM;
        for (int r = begin; r < end; r++) {
            const int64_t token = r / GROUP_SIZE, query = r % GROUP_SIZE;
            Element *result = to + token * stride + query * HEAD_DIM;
            sums.write(first + r, result);
            if (row.has_gates) gate_row(result, gates + token * row.size() + query * row.step(), HEAD_DIM);
        }
    }

    // Of a head of keys and values.
    const Element *queries(const Tile &tile, int64_t head) const {
        return heads + tile.row * row.size() + head * GROUP_SIZE * row.step();
    }

    static int rows(const Tile &tile) { return int(tile.tokens) * GROUP_SIZE; }
};

inline int64_t divided_up(int64_t number, int64_t by) { return (number + by - 1) / by; }

// How many heads of keys and values of a tile are computed together, at most: parts of the same size of all heads.
inline int64_t heads_together(const Tile &tile, int64_t kv_heads) {
    return divided_up(kv_heads, divided_up(kv_heads, TileAttention::most_heads(tile)));
}

// Whether threads share the segments of a context, lest one waits for another: they do, unless each has at least eight
// times the work of the longest one.
inline bool shares_segments(const Tile *tiles, int64_t count, int64_t kv_heads, int64_t threads) {
    int64_t longest = 0, total = 0;
    for (const Tile *tile = tiles; tile < tiles + count; tile++) {
        longest = std::max(longest, tile->context);
        total += tile->context * divided_up(kv_heads, heads_together(*tile, kv_heads));
    }
    return longest > SEGMENT_SIZE && longest * 8 * threads > total;
}

// The work that threads share: a unit is some heads of a tile, over one segment or over all. Its number has a place for
// each tile, segment and head; those without a unit have no heads.
class Units {
  public:
    struct Unit {
        const Tile *tile;
        int64_t head, heads, first, last;  // segments
    };

    Units(const LayerAttention &layer, bool by_segments) : layer_(layer), by_segments_(by_segments) {
        int64_t count = 0;
        for (const Tile *tile = layer.tiles; tile < layer.tiles + layer.count; tile++) {
            const int64_t spans = by_segments ? layer.segments(*tile) - layer.first_segment(*tile) : 1;
            spans_ = std::max(spans_, spans);
            count += spans * divided_up(layer.kv_heads, heads_together(*tile, layer.kv_heads));
        }
        has_heads_together_ = 4 * divided_up(count, threads_) * threads_ <= 5 * count;
        chunk_ = std::max<int64_t>(1, this->count() / ((by_segments ? 8 : 32) * threads_));
    }

    int64_t count() const { return layer_.count * spans_ * layer_.kv_heads; }

    // Threads take chunks of units, in the order of these numbers.
    int64_t num_chunks() const {
        const int64_t chunks = divided_up(count(), chunk_);
        return by_segments_ ? divided_up(chunks, threads_) * threads_ : chunks;
    }

    struct Range {
        int64_t begin, end;  // it is empty unless the end is behind the beginning
    };

    // The units of a chunk. Segments are dealt so that threads of the same speed have one part of the context each, and
    // read it in its order.
    Range chunk(int64_t number) const {
        const int64_t part = num_chunks() / threads_;
        const int64_t place = by_segments_ ? number % threads_ * part + number / threads_ : number;
        return {place * chunk_, std::min((place + 1) * chunk_, count())};
    }

    Unit operator[](int64_t i) const {
        const int64_t head = i % layer_.kv_heads, span = i / layer_.kv_heads % spans_;
        const Tile &tile = layer_.tiles[i / layer_.kv_heads / spans_];
        const int64_t first = layer_.first_segment(tile) + span, end = layer_.segments(tile);
        const bool is_there = first < end && head % heads(tile) == 0;
        return {&tile, head, is_there ? std::min(heads(tile), layer_.kv_heads - head) : 0, first,
                by_segments_ ? first + 1 : end};
    }

    // Of a unit: one, where threads would have nothing to do otherwise.
    int64_t heads(const Tile &tile) const {
        return has_heads_together_ ? heads_together(tile, layer_.kv_heads) : 1;
    }

    // The place of the first segment of all.
    int64_t first(int64_t tile, int64_t head) const { return tile * spans_ * layer_.kv_heads + head; }

  private:
    const LayerAttention &layer_;
    const bool by_segments_;
    const int64_t threads_ = omp_get_num_threads();
    int64_t spans_ = 1;  // units of some heads of a tile, at most
    int64_t chunk_;      // units
    bool has_heads_together_;
};

}  // namespace

extern "C" {

// ---- called by native.cpp, and below ----

void attend_tiles(const Tiles &tiles, SegmentSums *sums) {
    const LayerAttention layer{tiles};
    const Units units(layer, sums != nullptr);
#pragma omp for schedule(dynamic)
    for (int64_t number = 0; number < units.num_chunks(); number++)
        for (auto [i, end] = units.chunk(number); i < end; i++) {
            const auto [tile, head, heads, first, last] = units[i];
            if (heads == 0) continue;
            const auto next = units[std::min(i + heads, units.count() - 1)];  // if it is not another thread's
            const HeadCache next_cache = layer.head_cache(*next.tile, next.head);
            const Next behind{&next_cache, TileRows(*next.tile, layer.window).first_of(next.first)};
            SegmentSums own;
            layer.attend(*tile, head, heads, first, last, behind, sums == nullptr ? &own : sums + i);
            const int rows = layer.rows(*tile);
            for (int h = 0; h < heads && sums == nullptr; h++) layer.write(*tile, head + h, own, h * rows, 0, rows);
        }
    if (sums == nullptr) return;
#pragma omp for schedule(static)
    for (int64_t i = 0; i < layer.count * layer.kv_heads * GROUP_SIZE; i++) {  // as many rows as the tile has tokens
        const int64_t number = i / GROUP_SIZE / layer.kv_heads, head = i / GROUP_SIZE % layer.kv_heads;
        const Tile &tile = layer.tiles[number];
        const int64_t heads_before = head % units.heads(tile);  // in the same sums
        const SegmentSums *own = sums + units.first(number, head - heads_before);
        const int tokens = int(tile.tokens), begin = int(i % GROUP_SIZE) * tokens;
        const int first = int(heads_before) * layer.rows(tile) + begin, last = first + tokens;
        SegmentSums merged;  // rows of other threads lie in the same lines of `sums`
        merged.copy(*own, first, last);
        for (int64_t segment = 1; segment < layer.segments(tile) - layer.first_segment(tile); segment++)
            merged.merge(own[segment * layer.kv_heads], first, last);
        layer.write(tile, head, merged, first - begin, begin, begin + tokens);
    }
}

// ---- called by native_attention.py and native_kernels.py ----

// tables [sequences, width]; sums as of attend_tiles; out [tokens, group_size * kv_heads, head_dim].
void attend(const Element *heads, int64_t kv_heads, const LayerCache *cache, const int64_t *tables, int64_t width,
            const Tile *tiles, int64_t num_tiles, float scale, int64_t window, SegmentSums *sums, Element *out) {
#pragma omp parallel
    attend_tiles({tiles, num_tiles, kv_heads, heads, {kv_heads, false}, *cache, tables, width, scale, window, out}, sums);
}

// Whether threads are to share the segments of contexts. Their sums need room for all segments.
int64_t shares_segments(const Tile *tiles, int64_t num_tiles, int64_t kv_heads) {
    return shares_segments(tiles, num_tiles, kv_heads, omp_get_max_threads());
}

// Bytes of the sums of a tile over a segment.
int64_t sums_size() { return sizeof(SegmentSums); }

}  // extern "C"
