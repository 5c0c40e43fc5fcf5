// The paged KV cache of a layer, in blocks of BLOCK_SIZE tokens. A block's keys are transposed, [HEAD_DIM, BLOCK_SIZE],
// so that scores of LANES tokens are computed at once; its values are [BLOCK_SIZE, HEAD_DIM].
//
// Where the CPU multiplies pairs of bfloat16, two elements of a key share a word, [HEAD_DIM / 2, BLOCK_SIZE, 2], and so
// do the same elements of two tokens' values, [BLOCK_SIZE / 2, HEAD_DIM, 2].

#pragma once

#include <numeric>

#include "rows.h"

namespace {

using CacheElement = CACHE_ELEMENT;

constexpr bool IS_QUANTIZED = !std::is_same_v<CacheElement, Element>;
constexpr int PARTS = (HEAD_DIM + LANES - 1) / LANES;  // of a head, in lanes
constexpr int REST = HEAD_DIM - (PARTS - 1) * LANES;   // elements of the last part
constexpr int RUN = std::gcd(BLOCK_SIZE, LANES);       // tokens of a group of lanes that lie side by side

enum class CacheOrder : int64_t { ROWS, TRANSPOSED_KEYS, PAIRS };  // kv_cache.py's KVOrder

constexpr bool CACHE_IN_PAIRS = INSTRUCTIONS >= BF16 && std::is_same_v<CacheElement, bfloat16> &&
                                HEAD_DIM % 2 == 0 && RUN == LANES;
constexpr int WORD = CACHE_IN_PAIRS ? 2 : 1;  // elements that lie side by side: of a key, and of tokens' values

inline int part_size(int part) { return part == PARTS - 1 ? REST : LANES; }

struct LayerCache {
    CacheElement *keys, *values;       // [blocks, kv_heads, BLOCK_SIZE * HEAD_DIM]
    float *key_scales, *value_scales;  // [blocks, kv_heads, BLOCK_SIZE], of a token's integers; null: not quantized
    int64_t is_windowed;               // whether tables of windows name the blocks
};

// The place of a token's first element in a block.
inline int64_t key_place(int64_t token) { return token * WORD; }
inline int64_t value_place(int64_t token) { return token / WORD * WORD * HEAD_DIM + token % WORD; }

// A sequence's keys and values of one head.
class HeadCache {
  public:
    static constexpr int64_t SIZE = BLOCK_SIZE * HEAD_DIM;  // elements in a block; those of the next head follow

    // `table`: the sequence's blocks.
    HeadCache(const LayerCache &cache, int64_t kv_heads, int64_t head, const int64_t *table)
        : cache_(cache), kv_heads_(kv_heads), head_(head), table_(table) {}

    // The first element of a token.
    const CacheElement *keys(int64_t position) const {
        return cache_.keys + block(position) * HEAD_DIM + key_place(position % BLOCK_SIZE);
    }
    const CacheElement *values(int64_t position) const {
        return cache_.values + block(position) * HEAD_DIM + value_place(position % BLOCK_SIZE);
    }
    const float *key_scales(int64_t position) const {
        return cache_.key_scales + block(position) + position % BLOCK_SIZE;
    }
    const float *value_scales(int64_t position) const {
        return cache_.value_scales + block(position) + position % BLOCK_SIZE;
    }

  private:
    int64_t block(int64_t position) const {
        return (table_[position / BLOCK_SIZE] * kv_heads_ + head_) * BLOCK_SIZE;
    }

    const LayerCache cache_;
    const int64_t kv_heads_, head_;
    const int64_t *table_;
};

// Reads a line into the second cache: many more such reads may be on their way than into the first one. The CPU drops
// those that come faster than memory answers.
inline void fetch(const void *line) { __builtin_prefetch(line, 0, 2); }

// Stores a head's elements, STEP apart; the first WIDTH ones, and then as many each time, lie side by side.
template <int WIDTH, int STEP>
inline void store_head(const Element *from, Element *to, float *) {
    for (int d = 0; d < HEAD_DIM; d += WIDTH) std::memcpy(to + d * STEP, from + d, WIDTH * sizeof(Element));
}

// Stores the integers nearest to the elements times 127 / the largest magnitude, and the scale, which is nan if not all
// elements are finite.
template <int, int STEP>
inline void store_head(const Element *from, int8_t *to, float *scale) {
    Floats top{};
    Ints are_numbers = top == top;
    for (int p = 0; p < PARTS; p++) {
        const Floats v = load(from + p * LANES, part_size(p));
        top = larger(top, larger(v, -v));
        are_numbers &= v == v;
    }
    const float most = largest(are_numbers ? top : all(INFINITY));
    const bool is_finite = most < INFINITY;
    const float factor = is_finite && most > 1e-30f ? 127.0f / most : 0;
    for (int p = 0; p < PARTS; p++) {
        const Floats v = is_finite ? rounded_product(load(from + p * LANES, part_size(p)), factor) : Floats{};
        const Ints integers = __builtin_convertvector(v, Ints);
        for (int i = 0; i < part_size(p); i++) to[(p * LANES + i) * STEP] = int8_t(integers[i]);
    }
    *scale = is_finite ? most / 127.0f : NAN;
}

// Has the CPU read the lines of a slot, of which a token's elements are a part.
ONE_COPY void fetch_slot(int64_t kv_heads, int64_t slot, const LayerCache &cache) {
    constexpr int LINE = 64 / sizeof(CacheElement), IN_LINE = std::max(WORD, LINE / BLOCK_SIZE);  // elements; of a key
    const int64_t token = slot % BLOCK_SIZE;
    for (int64_t h = 0; h < kv_heads; h++) {
        const int64_t first = (slot / BLOCK_SIZE * kv_heads + h) * BLOCK_SIZE * HEAD_DIM;
        for (int d = 0; d < HEAD_DIM; d += IN_LINE) fetch(cache.keys + first + key_place(token) + d * BLOCK_SIZE);
        for (int d = 0; d < HEAD_DIM * WORD; d += LINE) fetch(cache.values + first + value_place(token) + d);
    }
}

// A token's keys, and the values behind them, to its slot.
ONE_COPY void store_token(const Element *from, int64_t kv_heads, int64_t slot, const LayerCache &cache) {
    const int64_t token = slot % BLOCK_SIZE;
    for (int64_t h = 0; h < kv_heads; h++, from += HEAD_DIM) {
        const int64_t block = (slot / BLOCK_SIZE * kv_heads + h) * BLOCK_SIZE;
        float *key_scale = IS_QUANTIZED ? cache.key_scales + block + token : nullptr;
        float *value_scale = IS_QUANTIZED ? cache.value_scales + block + token : nullptr;
        store_head<WORD, BLOCK_SIZE>(from, cache.keys + block * HEAD_DIM + key_place(token), key_scale);
        store_head<1, WORD>(from + kv_heads * HEAD_DIM, cache.values + block * HEAD_DIM + value_place(token),
                            value_scale);
    }
}

}  // namespace
