// Attention of many query rows of one sequence over keys and values where they lie in the pool.
//
// One piece of work is one key head and as many queries as fill two vectors: a query is a row and one of the heads that
// share the key head. Queries lie across the vectors, so that masks, maxima and sums need no sum across one, and a key
// or value enters as one number multiplied by all of them. Weights are kept relative to the highest score so far.

#include "../native/vector.h"

#include <algorithm>
#include <vector>

using namespace weft;

namespace {

constexpr int LANES = 2 * W;
constexpr int MAX_ITEMS = REGISTERS == 32 ? 12 : 6;
constexpr float HIDDEN = -1e30f;

struct Chunk {
    long rows, heads, kv_heads, layers, parts, block_tokens, dim, value_dim, layer;
    long context, window, chunk;  // tokens up to the last row; which keys a row sees, as in Span
    long ratio() const { return heads / kv_heads; }
    long keys(long block, long head) const {
        return ((block * kv_heads + head) * layers + layer) * parts * block_tokens * dim;
    }
    long values(long block, long head) const { return keys(block, head) + (parts - 1) * block_tokens * dim; }
    long first_key(long position) const {
        long start = chunk ? position - position % chunk : 0;
        return window ? std::max(start, position + 1 - window) : start;
    }
};

// out[i, lane] (+)= sum over k of x[i * item_stride + k * k_stride] * lines[k, lane].
template <int Items>
void product(const float* x, long item_stride, long k_stride, long count, const float* lines, float* out,
             bool is_first) {
    Floats low[Items], high[Items];
#pragma GCC unroll 12
    for (int i = 0; i < Items; i++) {
        low[i] = is_first ? Floats{} : load<Floats>(out + i * LANES);
        high[i] = is_first ? Floats{} : load<Floats>(out + i * LANES + W);
    }
    for (long k = 0; k < count; k++) {
        Floats a = load<Floats>(lines + k * LANES), b = load<Floats>(lines + k * LANES + W);
#pragma GCC unroll 12
        for (int i = 0; i < Items; i++) {
            Floats value = splat(x[i * item_stride + k * k_stride]);
            low[i] += value * a;
            high[i] += value * b;
        }
    }
#pragma GCC unroll 12
    for (int i = 0; i < Items; i++) {
        store(out + i * LANES, low[i]);
        store(out + i * LANES + W, high[i]);
    }
}

using Product = void (*)(const float*, long, long, long, const float*, float*, bool);

void products(const float* x, long items, long item_stride, long k_stride, long count, const float* lines, float* out,
              bool is_first) {
    static constexpr Product all[] = {product<1>, product<2>, product<3>, product<4>, product<5>, product<6>,
#if WEFT_WIDTH == 16
                                      product<7>, product<8>, product<9>, product<10>, product<11>, product<12>
#endif
    };
    long groups = (items + MAX_ITEMS - 1) / MAX_ITEMS;
    for (long g = 0; g < groups; g++) {
        long first = g * items / groups, size = (g + 1) * items / groups - first;
        all[size - 1](x + first * item_stride, item_stride, k_stride, count, lines, out + first * LANES, is_first);
    }
}

// What one thread keeps for one piece of work.
struct Work {
    std::vector<float> queries, scores, sums, wide, result;
    float first[LANES], end[LANES], highest[LANES], total[LANES], shrink[LANES];

    explicit Work(const Chunk& c)
        : queries(c.dim * LANES), scores(c.block_tokens * LANES), sums(c.value_dim * LANES),
          wide(c.block_tokens * c.dim), result(c.value_dim + W) {}
};

const float* widened(const float* from, long, std::vector<float>&) { return from; }
const float* widened(const uint16_t* from, long count, std::vector<float>& wide) {
    for (long i = 0; i < count; i++) wide[i] = widen(from[i]);
    return wide.data();
}

// Scores of `count` keys from position `at` on become weights; the sums so far shrink to the new highest scores.
void weigh(Work& work, long at, long count) {
    for (int v = 0; v < LANES; v += W) {
        Floats first = load<Floats>(work.first + v), end = load<Floats>(work.end + v);
        Floats before = load<Floats>(work.highest + v), highest = before, total = {};
        for (long t = 0; t < count; t++) {
            Floats place = splat(float(at + t)), score = load<Floats>(&work.scores[t * LANES + v]);
            score = (place >= first) & (place < end) ? score : splat(HIDDEN);
            highest = score > highest ? score : highest;
            store(&work.scores[t * LANES + v], score);
        }
        for (long t = 0; t < count; t++) {
            Floats score = load<Floats>(&work.scores[t * LANES + v]);
            Floats weight = score == HIDDEN ? Floats{} : exponential(score - highest);
            total += weight;
            store(&work.scores[t * LANES + v], weight);
        }
        Floats shrink = exponential(before - highest);
        store(work.shrink + v, shrink);
        store(work.highest + v, highest);
        store(work.total + v, load<Floats>(work.total + v) * shrink + total);
    }
}

template <typename Item>
void attend(const Chunk& c, Work& work, const Item* q, const Item* memory, const int* blocks, long head, long start,
            float scale, Item* out) {
    long ratio = c.ratio(), num_lanes = std::min<long>(LANES, c.rows * ratio - start);
    long begin = c.context, end = 0;
    for (long lane = 0; lane < LANES; lane++) {
        long index = start + std::min(lane, num_lanes - 1), row = index / ratio;
        long position = c.context - c.rows + row, first = c.first_key(position);
        const Item* from = q + (row * c.heads + head * ratio + index % ratio) * c.dim;
        for (long d = 0; d < c.dim; d++) work.queries[d * LANES + lane] = widen(from[d]) * scale;
        work.first[lane] = float(first), work.end[lane] = float(position + 1);
        begin = std::min(begin, first), end = std::max(end, position + 1);
    }
    std::fill_n(work.highest, LANES, HIDDEN);
    std::fill_n(work.total, LANES, 0.0f);
    std::fill(work.sums.begin(), work.sums.end(), 0.0f);
    for (long at = begin; at < end;) {
        long offset = at % c.block_tokens, count = std::min(c.block_tokens - offset, end - at);
        long block = blocks[at / c.block_tokens];
        const float* keys = widened(memory + c.keys(block, head) + offset * c.dim, count * c.dim, work.wide);
        products(keys, count, c.dim, 1, c.dim, work.queries.data(), work.scores.data(), true);
        weigh(work, at, count);
        for (int v = 0; v < LANES; v += W) {
            Floats shrink = load<Floats>(work.shrink + v);
            for (long d = 0; d < c.value_dim; d++)
                store(&work.sums[d * LANES + v], load<Floats>(&work.sums[d * LANES + v]) * shrink);
        }
        const float* values = widened(memory + c.values(block, head) + offset * c.dim, count * c.dim, work.wide);
        products(values, c.value_dim, 1, c.dim, count, work.scores.data(), work.sums.data(), false);
        at += count;
    }
    for (long lane = 0; lane < num_lanes; lane++) {
        long index = start + lane, row = index / ratio;
        Item* to = out + (row * c.heads + head * ratio + index % ratio) * c.value_dim;
        float factor = 1 / work.total[lane];
        for (long d = 0; d < c.value_dim; d++) work.result[d] = work.sums[d * LANES + lane] * factor;
        for (long d = 0; d < c.value_dim; d += W) {
            Item last[W];
            store_narrow(last, load<Floats>(&work.result[d]));
            std::memcpy(to + d, last, std::min<long>(W, c.value_dim - d) * sizeof(Item));
        }
    }
}

template <typename Item>
void attend_chunk(const Item* q, const Item* memory, const int* blocks, Item* out, const long* sizes, float scale,
                  int num_threads) {
    Chunk c{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4],  sizes[5],
            sizes[6], sizes[7], sizes[8], sizes[9], sizes[10], sizes[11]};
    long pieces = (c.rows * c.ratio() + LANES - 1) / LANES;
#pragma omp parallel num_threads(num_threads) if (num_threads > 1 && c.rows * c.heads * c.context > SERIAL_ITEMS)
    {
        Work work(c);
        // The last rows see the most keys: they come first, and nobody waits for them in the end.
#pragma omp for schedule(dynamic)
        for (long i = 0; i < pieces * c.kv_heads; i++) {
            long piece = pieces - 1 - i / c.kv_heads;
            attend(c, work, q, memory, blocks, i % c.kv_heads, piece * LANES, scale, out);
        }
    }
}

}  // namespace

// sizes: rows, heads, kv_heads, layers, parts, block_tokens, dim, value_dim, layer, context, window, chunk.
WEFT_EXPORT void weft_attend_chunk_f32(const float* q, const float* memory, const int* blocks, float* out,
                                       const long* sizes, float scale, int num_threads) {
    attend_chunk(q, memory, blocks, out, sizes, scale, num_threads);
}

WEFT_EXPORT void weft_attend_chunk_bf16(const uint16_t* q, const uint16_t* memory, const int* blocks, uint16_t* out,
                                        const long* sizes, float scale, int num_threads) {
    attend_chunk(q, memory, blocks, out, sizes, scale, num_threads);
}
