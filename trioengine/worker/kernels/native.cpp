// The CPU's kernels, compiled for one model: ELEMENT (float or bfloat16), HEAD_DIM, GROUP_SIZE (query heads that share
// keys and values), TILE_SIZE (tokens of queries at a time), BLOCK_SIZE (tokens in a KV block).
//
// All is computed in float32, 16 numbers at a time, in GCC's vector extension: two, four or more instructions where the
// CPU has no registers of 64 bytes. Not compiled with -ffast-math: what is not finite must be seen, in its sequence and in
// no other.

#include "lanes.h"

namespace {

using Element = ELEMENT;

// e to the x by Cephes' expf: 2 to the n times a polynomial. Off by some 2 units of the last place; beyond the range of
// float32's normal numbers 0 or infinity, and nan of nan.
inline Floats exponential(Floats x) {
    const Floats shifted = x * 1.44269504f + 12582912.0f;  // 1.5 * 2 ** 23: rounds, and leaves n in the low bits
    const Floats n = shifted - 12582912.0f;
    const Floats f = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    Floats p = all(1.9875691500e-4f);
    for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
        p = p * f + c;
    p = p * f * f + f + 1.0f;
    const Floats inside = (Floats)((Words)p + ((Words)shifted << 23));
    return x < -87.0f ? Floats{} : x <= 88.0f ? inside : x + all(INFINITY);
}

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
    swap_blocks<8>(square);
    swap_blocks<4>(square);
    swap_blocks<2>(square);
    swap_blocks<1>(square);
}

// ---- attention ----

constexpr int PARTS = (HEAD_DIM + LANES - 1) / LANES;  // of a head, in lanes
constexpr int REST = HEAD_DIM - (PARTS - 1) * LANES;   // elements of the last part
constexpr int STRIP = 4;                               // rows whose sums are in registers together
constexpr int ROWS = (TILE_SIZE * GROUP_SIZE + STRIP - 1) / STRIP * STRIP;
constexpr int GROUPS = 4;  // of keys, in lanes, between two looks at the maximum
constexpr int KEYS = GROUPS * LANES;

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

// Attention of a tile's queries, which for each token are a group of heads, by an online softmax (arXiv 1805.02867,
// 2205.14135): the sums are scaled down whenever a larger score is met.
class TileAttention {
  public:
    TileAttention(const Tile &tile, const Element *queries, int64_t stride, float scale)
        : rows_(tile.tokens * GROUP_SIZE), first_(tile.context - tile.tokens) {
        for (int r = 0; r < padded(); r++) {
            const Element *query = queries + r / GROUP_SIZE * stride + r % GROUP_SIZE * HEAD_DIM;
            for (int p = 0; p < PARTS; p++) {
                const Floats part = r < rows_ ? load(query + p * LANES, part_size(p)) : Floats{};
                ((Floats *)queries_[r])[p] = part * scale;
                results_[r][p] = Floats{};
            }
            largest_[r] = -INFINITY;
            totals_[r] = 0;
        }
    }

    void attend(const Context &context) {
        const int64_t end = seen_by(rows_ - 1);
        for (int64_t start = 0; start < end; start += KEYS) {
            const int here = int(std::min<int64_t>(KEYS, end - start));
            read(context, start, here);
            for (int r = 0; r < padded(); r += STRIP) {
                const int count = seen_here(r + STRIP - 1, start, here);
                if (count == 0) continue;
                score(r, count);
                for (int i = r; i < r + STRIP; i++) weigh(i, seen_here(i, start, here), count);
                add_values(r, count);
            }
        }
    }

    void write(Element *out, int64_t stride) const {
        for (int r = 0; r < rows_; r++) {
            Element *to = out + r / GROUP_SIZE * stride + r % GROUP_SIZE * HEAD_DIM;
            for (int p = 0; p < PARTS; p++)
                store_lanes(to + p * LANES, results_[r][p] / totals_[r], part_size(p));
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
    void weigh(int r, int seen, int count) {
        Ints lane;
        for (int i = 0; i < LANES; i++) lane[i] = i;
        const int groups = (count + LANES - 1) / LANES;
        Floats top = all(largest_[r]);
        for (int g = 0; g < groups; g++)
            top = larger(top, lane + g * LANES < seen ? scores_[r][g] : all(-INFINITY));
        const float now = largest(top), base = now == -INFINITY ? 0 : now;
        Floats total{};
        for (int g = 0; g < groups; g++) {
            scores_[r][g] = lane + g * LANES < seen ? exponential(scores_[r][g] - base) : Floats{};
            total += scores_[r][g];
        }
        if (now > largest_[r]) {
            const float shrunk = exponential(all(largest_[r] - now))[0];
            totals_[r] *= shrunk;
            for (int p = 0; p < PARTS; p++) results_[r][p] *= shrunk;
            largest_[r] = now;
        }
        totals_[r] += sum(total);
    }

    void add_values(int r, int count) {
        Floats sums[STRIP][PARTS];
        const float *weights = (const float *)scores_[r];
        std::memcpy(sums, results_[r], sizeof sums);
        for (int k = 0; k < count; k++)
#pragma GCC unroll 4
            for (int i = 0; i < STRIP; i++)
                for (int p = 0; p < PARTS; p++) sums[i][p] += weights[i * KEYS + k] * values_[k][p];
        std::memcpy(results_[r], sums, sizeof sums);
    }

    const int rows_;
    const int64_t first_;  // position of the first token
    alignas(64) float queries_[ROWS][PARTS * LANES];
    Floats results_[ROWS][PARTS];
    Floats scores_[ROWS][GROUPS];
    Floats keys_[GROUPS][PARTS * LANES];
    Floats values_[KEYS][PARTS];
    float largest_[ROWS], totals_[ROWS];
};

}  // namespace

// ---- what native_kernels.py calls ----

extern "C" {

// heads [tokens, (group_size + 2) * kv_heads, head_dim]; cache [blocks, 2 * kv_heads, block_size, head_dim].
void store(const Element *heads, int64_t tokens, int64_t kv_heads, const int64_t *slots, Element *cache) {
    const int64_t queries = kv_heads * GROUP_SIZE * HEAD_DIM, width = queries + 2 * kv_heads * HEAD_DIM;
#pragma omp parallel for schedule(static) if (tokens > 1)
    for (int64_t t = 0; t < tokens; t++) {
        const Element *from = heads + t * width + queries;
        const int64_t block = slots[t] / BLOCK_SIZE, offset = slots[t] % BLOCK_SIZE;
        Element *to = cache + (block * 2 * kv_heads * BLOCK_SIZE + offset) * HEAD_DIM;
        for (int64_t h = 0; h < 2 * kv_heads; h++)
            std::memcpy(to + h * BLOCK_SIZE * HEAD_DIM, from + h * HEAD_DIM, HEAD_DIM * sizeof(Element));
    }
}

// tables [sequences, width]; out [tokens, group_size * kv_heads, head_dim].
void attend(const Element *heads, int64_t kv_heads, const Element *cache, const int64_t *tables, int64_t width,
            const Tile *tiles, int64_t num_tiles, float scale, Element *out) {
    const int64_t stride = (GROUP_SIZE + 2) * kv_heads * HEAD_DIM, out_stride = GROUP_SIZE * kv_heads * HEAD_DIM;
#pragma omp parallel for schedule(dynamic)
    for (int64_t i = 0; i < num_tiles * kv_heads; i++) {
        const Tile &tile = tiles[i / kv_heads];
        const int64_t head = i % kv_heads, column = head * GROUP_SIZE * HEAD_DIM;
        TileAttention attention(tile, heads + tile.row * stride + column, stride, scale);
        attention.attend({cache + head * BLOCK_SIZE * HEAD_DIM, kv_heads, tables + tile.sequence * width});
        attention.write(out + tile.row * out_stride + column, out_stride);
    }
}

void add_norm(float *hidden, const Element *delta, const float *weight, float epsilon, int64_t rows, int64_t size,
              Element *out) {
#pragma omp parallel for schedule(static) if (rows > 1)
    for (int64_t r = 0; r < rows; r++) {
        float *x = hidden + r * size;
        Floats squares{};
        for_lanes(size, [&](int64_t i, int count) {
            const Floats v = load(x + i, count) + load(delta + r * size + i, count);
            store_lanes(x + i, v, count);
            squares += v * v;
        });
        const float scale = 1.0f / std::sqrt(sum(squares) / size + epsilon);
        for_lanes(size, [&](int64_t i, int count) {
            store_lanes(out + r * size + i, load(x + i, count) * scale * load(weight + i, count), count);
        });
    }
}

// Hugging Face's layout: element i turns with i + head_dim / 2. A position's row of the table is cos, cos, -sin, sin.
void rotate(Element *heads, int64_t tokens, int64_t all_heads, int64_t count, const Element *table,
            const int64_t *positions) {
#pragma omp parallel for schedule(static) if (tokens > 1)
    for (int64_t t = 0; t < tokens; t++) {
        const Element *cosines = table + positions[t] * 2 * HEAD_DIM, *sines = cosines + HEAD_DIM + HEAD_DIM / 2;
        for (int64_t h = 0; h < count; h++) {
            Element *x = heads + (t * all_heads + h) * HEAD_DIM, *y = x + HEAD_DIM / 2;
            for_lanes(HEAD_DIM / 2, [&](int64_t i, int n) {
                const Floats a = load(x + i, n), b = load(y + i, n), c = load(cosines + i, n), s = load(sines + i, n);
                store_lanes(x + i, a * c - b * s, n);
                store_lanes(y + i, b * c + a * s, n);
            });
        }
    }
}

void silu_and_multiply(const Element *gate_up, int64_t rows, int64_t size, Element *out) {
#pragma omp parallel for schedule(static) if (rows > 1)
    for (int64_t r = 0; r < rows; r++) {
        const Element *gates = gate_up + r * 2 * size, *ups = gates + size;
        for_lanes(size, [&](int64_t i, int count) {
            const Floats gate = load(gates + i, count);
            store_lanes(out + r * size + i, gate / (1.0f + exponential(-gate)) * load(ups + i, count), count);
        });
    }
}

}  // extern "C"
