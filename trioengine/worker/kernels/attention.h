// Attention of all tiles of a step, over the paged KV cache.

#pragma once

#include <omp.h>

#include "float_attention.h"
#include "pair_attention.h"

namespace {

#if INSTRUCTIONS >= BF16
using TileAttention = std::conditional_t<CACHE_IN_PAIRS, PairAttention, FloatAttention>;
#else
using TileAttention = FloatAttention;
#endif

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
    bool has_units_for_all = false;  // attend_tiles sets it

    static int64_t segments(const Tile &tile) { return (tile.context + SEGMENT_SIZE - 1) / SEGMENT_SIZE; }

    // How many heads of keys and values are attended to together: several, as they lie side by side, unless threads would
    // have nothing to do then.
    int64_t together(const Tile &tile) const {
        return has_units_for_all ? std::min<int64_t>(TileAttention::heads_together(tile), kv_heads) : 1;
    }

    // `next`: the piece that this thread reads after them.
    void attend(const Tile &tile, int64_t head, int64_t heads, int64_t first, int64_t last, const Next &next,
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

    Piece first_piece(const Tile &tile) const { return TileRows(tile, window).first_of_all(); }

    HeadCache head_cache(const Tile &tile, int64_t head) const {
        return {cache, kv_heads, head, tables + tile.sequence * width};
    }

    // Of one head of keys and values, whose sums begin with row `first`.
    void write(const Tile &tile, int64_t head, const SegmentSums &sums, int first) const {
        const int64_t stride = GROUP_SIZE * kv_heads * HEAD_DIM;
        Element *to = out + tile.row * stride + head * GROUP_SIZE * HEAD_DIM;
        const Element *gates = queries(tile, head) + HEAD_DIM;
        for (int r = 0; r < rows(tile); r++) {
            const int64_t token = r / GROUP_SIZE, query = r % GROUP_SIZE;
            Element *result = to + token * stride + query * HEAD_DIM;
            sums.write(first + r, result);
            if (row.has_gates) gate_row(result, gates + token * row.size() + query * row.step(), HEAD_DIM);
        }
    }

    // Of one head of keys and values.
    const Element *queries(const Tile &tile, int64_t head) const {
        return heads + tile.row * row.size() + head * GROUP_SIZE * row.step();
    }

    static int rows(const Tile &tile) { return int(tile.tokens) * GROUP_SIZE; }
};

// The threads share the tiles and heads. A thread takes some at a time, because it fetches the next one.
inline void attend_whole_tiles(const Tiles &t) {
    const int64_t units = t.count * t.kv_heads, chunk = std::max<int64_t>(1, units / (32 * omp_get_num_threads()));
#pragma omp for schedule(dynamic, chunk)
    for (int64_t i = 0; i < units; i++) {
        const Tile &tile = t.tiles[i / t.kv_heads];
        const int64_t head = i % t.kv_heads, heads = std::min(t.together(tile), t.kv_heads - head);
        if (head % t.together(tile) != 0) continue;
        const int64_t j = std::min(i + heads, units - 1);  // the next one, if it is not another thread's
        const Tile &next = t.tiles[j / t.kv_heads];
        const HeadCache next_cache = t.head_cache(next, j % t.kv_heads);
        SegmentSums sums;
        t.attend(tile, head, heads, 0, t.segments(tile), {&next_cache, t.first_piece(next)}, &sums);
        for (int h = 0; h < heads; h++) t.write(tile, head + h, sums, h * t.rows(tile));
    }
}

// The threads share the segments as well. A thread takes an eighth of its share of one tile's segments at a time: a tile
// with fewer segments may have nothing in its place.
inline void attend_segments(const Tiles &t, int64_t segments, SegmentSums *sums) {
    const int64_t chunk = std::max<int64_t>(1, segments / (8 * omp_get_num_threads())) * t.kv_heads;
#pragma omp for schedule(dynamic, chunk)
    for (int64_t i = 0; i < t.count * segments * t.kv_heads; i++) {
        const int64_t segment = i / t.kv_heads % segments;
        const Tile &tile = t.tiles[i / t.kv_heads / segments];
        const int64_t head = i % t.kv_heads, heads = std::min(t.together(tile), t.kv_heads - head);
        if (segment >= t.segments(tile) || head % t.together(tile) != 0) continue;
        const HeadCache cached = t.head_cache(tile, head);
        const Next behind{&cached, TileRows(tile, t.window).first_of(segment + 1)};
        t.attend(tile, head, heads, segment, segment + 1, behind, sums + i);
    }
#pragma omp for schedule(static)
    for (int64_t i = 0; i < t.count * t.kv_heads; i++) {
        const Tile &tile = t.tiles[i / t.kv_heads];
        const int64_t head = i % t.kv_heads, other_heads = head % t.together(tile);  // before it, in the same sums
        SegmentSums *own = sums + i / t.kv_heads * segments * t.kv_heads + head - other_heads;
        const int first = int(other_heads) * t.rows(tile);
        for (int64_t segment = 1; segment < t.segments(tile); segment++)
            own->merge(own[segment * t.kv_heads], first, first + t.rows(tile));
        t.write(tile, head, *own, first);
    }
}

// Called by all threads of a region. `sums`: [count, segments, kv_heads], where threads are to share the segments of
// contexts, of which a tile has at most `segments`; or null.
inline void attend_tiles(Tiles t, SegmentSums *sums, int64_t segments) {
    const int64_t units = sums == nullptr ? t.count : t.count * segments;
    t.has_units_for_all = units >= 2 * omp_get_num_threads();
    if (sums == nullptr)
        attend_whole_tiles(t);
    else
        attend_segments(t, segments, sums);
}

}  // namespace
