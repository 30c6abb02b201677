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
// Keys whose scores are weighed together: sums so far shrink, and go to memory, once for as many.
constexpr long KEYS_AT_ONCE = 64;
constexpr int LINE_BYTES = 64;
constexpr float HIDDEN = -1e30f;

struct Chunk {
    long rows, heads, kv_heads, layers, parts, block_tokens, dim, value_dim, layer;
    long context, window, chunk;  // tokens up to the last row; which keys a row sees, as in Span
    long ratio() const { return heads / kv_heads; }
    // Where a head's keys and values begin in the first block, and from block to block.
    long keys(long head) const { return (head * layers + layer) * parts * block_tokens * dim; }
    long values(long head) const { return keys(head) + (parts - 1) * block_tokens * dim; }
    long block_stride() const { return kv_heads * layers * parts * block_tokens * dim; }
    long first_key(long position) const {
        long start = chunk ? position - position % chunk : 0;
        return window ? std::max(start, position + 1 - window) : start;
    }
};

// Keys or values that lie one behind the other.
struct Run {
    const float* data;
    long count;
};

// out[i, lane] = share[lane] * out[i, lane] + sum over k of x[i, k] * lines[k, lane]; without a share, nothing is in
// `out` yet. The k go on from run to run. Items that are together lie side by side, and each k `stride` numbers behind
// the last one; of others it is the other way round.
template <int Items, bool AreTogether>
void product(const Run* runs, long num_runs, long first, long stride, const float* lines, float* out,
             const float* share) {
    Floats low[Items], high[Items];
#pragma GCC unroll 12
    for (int i = 0; i < Items; i++) {
        low[i] = share ? load<Floats>(out + i * LANES) * load<Floats>(share) : Floats{};
        high[i] = share ? load<Floats>(out + i * LANES + W) * load<Floats>(share + W) : Floats{};
    }
    for (long r = 0; r < num_runs; r++) {
        const float* x = runs[r].data + first * (AreTogether ? 1 : stride);
        for (long k = 0; k < runs[r].count; k++, lines += LANES) {
            Floats a = load<Floats>(lines), b = load<Floats>(lines + W);
#pragma GCC unroll 12
            for (int i = 0; i < Items; i++) {
                Floats value = splat(AreTogether ? x[k * stride + i] : x[i * stride + k]);
                low[i] += value * a;
                high[i] += value * b;
            }
        }
    }
#pragma GCC unroll 12
    for (int i = 0; i < Items; i++) {
        store(out + i * LANES, low[i]);
        store(out + i * LANES + W, high[i]);
    }
}

using Product = void (*)(const Run*, long, long, long, const float*, float*, const float*);

template <bool AreTogether>
void products(const Run* runs, long num_runs, long items, long stride, const float* lines, float* out,
              const float* share) {
    static constexpr Product all[] = {product<1, AreTogether>, product<2, AreTogether>, product<3, AreTogether>,
                                      product<4, AreTogether>, product<5, AreTogether>, product<6, AreTogether>,
#if WEFT_WIDTH == 16
                                      product<7, AreTogether>, product<8, AreTogether>, product<9, AreTogether>,
                                      product<10, AreTogether>, product<11, AreTogether>, product<12, AreTogether>
#endif
    };
    long groups = (items + MAX_ITEMS - 1) / MAX_ITEMS;
    for (long g = 0; g < groups; g++) {
        long first = g * items / groups, size = (g + 1) * items / groups - first;
        all[size - 1](runs, num_runs, first, stride, lines, out + first * LANES, share);
    }
}

// What one thread keeps for one piece of work.
struct Work {
    std::vector<float> queries, scores, sums, wide, result;
    std::vector<Run> runs;
    float first[LANES], end[LANES], highest[LANES], total[LANES], shrink[LANES];

    explicit Work(const Chunk& c)
        : queries(c.dim * LANES), scores(KEYS_AT_ONCE * LANES), sums(c.value_dim * LANES), wide(KEYS_AT_ONCE * c.dim),
          result(c.value_dim + W), runs(KEYS_AT_ONCE) {}
};

const float* widened(const float* from, long, float*) { return from; }
const float* widened(const uint16_t* from, long count, float* wide) {
    for (long i = 0; i < count; i++) wide[i] = widen(from[i]);
    return wide;
}

void ask_for(const void* memory, long size) {
    for (long at = 0; at < size; at += LINE_BYTES) __builtin_prefetch((const char*)memory + at, 0, 2);
}

// The runs of `count` keys, or values, from position `at` on; returns how many.
template <typename Item>
long runs_of(const Chunk& c, Work& work, const Item* memory, const int* blocks, long at, long count) {
    long num_runs = 0;
    for (long done = 0, size; done < count; done += size) {
        long block = blocks[(at + done) / c.block_tokens], offset = (at + done) % c.block_tokens;
        size = std::min(c.block_tokens - offset, count - done);
        const Item* from = memory + block * c.block_stride() + offset * c.dim;
        work.runs[num_runs++] = Run{widened(from, size * c.dim, work.wide.data() + done * c.dim), size};
    }
    return num_runs;
}

// Scores of `count` keys from position `at` on become weights, and `shrink` what the sums so far are to be taken times.
template <bool Masked>
void weigh(Work& work, long at, long count) {
    Floats before[2], highest[2], total[2] = {};
    for (int v = 0; v < 2; v++) highest[v] = before[v] = load<Floats>(work.highest + v * W);
    for (long t = 0; t < count; t++)
        for (int v = 0; v < 2; v++) {
            float* at_score = &work.scores[t * LANES + v * W];
            Floats score = load<Floats>(at_score);
            if (Masked) {
                Floats place = splat(float(at + t)), first = load<Floats>(work.first + v * W);
                score = (place >= first) & (place < load<Floats>(work.end + v * W)) ? score : splat(HIDDEN);
                store(at_score, score);
            }
            highest[v] = larger(score, highest[v]);
        }
    for (long t = 0; t < count; t++)
        for (int v = 0; v < 2; v++) {
            float* at_score = &work.scores[t * LANES + v * W];
            Floats score = load<Floats>(at_score), weight = exponential(score - highest[v]);
            if (Masked) weight = score == HIDDEN ? Floats{} : weight;
            total[v] += weight;
            store(at_score, weight);
        }
    for (int v = 0; v < 2; v++) {
        Floats shrink = exponential(before[v] - highest[v]);
        store(work.shrink + v * W, shrink);
        store(work.highest + v * W, highest[v]);
        store(work.total + v * W, load<Floats>(work.total + v * W) * shrink + total[v]);
    }
}

// The lanes' queries, from query `start` of the key head on, and which keys they see; the last query fills up the rest.
template <typename Item>
void take_queries(const Chunk& c, Work& work, const Item* q, long head, long start, float scale) {
    long num_queries = c.rows * c.ratio();
    for (long lane = 0; lane < LANES; lane++) {
        long index = std::min(start + lane, num_queries - 1), row = index / c.ratio();
        long position = c.context - c.rows + row;
        const Item* from = q + (row * c.heads + head * c.ratio() + index % c.ratio()) * c.dim;
        for (long d = 0; d < c.dim; d++) work.queries[d * LANES + lane] = widen(from[d]) * scale;
        work.first[lane] = float(c.first_key(position)), work.end[lane] = float(position + 1);
    }
    std::fill_n(work.highest, LANES, HIDDEN);
    std::fill_n(work.total, LANES, 0.0f);
    std::fill(work.sums.begin(), work.sums.end(), 0.0f);
}

template <typename Item>
void give_results(const Chunk& c, Work& work, long head, long start, Item* out) {
    for (long lane = 0; lane < std::min<long>(LANES, c.rows * c.ratio() - start); lane++) {
        long index = start + lane, row = index / c.ratio();
        Item* to = out + (row * c.heads + head * c.ratio() + index % c.ratio()) * c.value_dim;
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
void attend(const Chunk& c, Work& work, const Item* q, const Item* memory, const int* blocks, long head, long start,
            float scale, Item* out) {
    take_queries(c, work, q, head, start, scale);
    const Item *keys = memory + c.keys(head), *values = memory + c.values(head);
    long block_bytes = c.block_tokens * c.dim * sizeof(Item);
    auto [least_first, most_first] = std::minmax_element(work.first, work.first + LANES);
    auto [least_end, most_end] = std::minmax_element(work.end, work.end + LANES);
    for (long at = long(*least_first), count; at < long(*most_end); at += count) {
        count = std::min(KEYS_AT_ONCE, long(*most_end) - at);
        long num_runs = runs_of(c, work, keys, blocks, at, count), done = 0;
        for (long r = 0; r < num_runs; done += work.runs[r++].count) {
            Run run{work.runs[r].data, c.dim};
            ask_for(values + blocks[(at + done) / c.block_tokens] * c.block_stride(), block_bytes);
            float* scores = &work.scores[done * LANES];
            products<false>(&run, 1, work.runs[r].count, c.dim, work.queries.data(), scores, nullptr);
        }
        bool is_masked = float(at) < *most_first || float(at + count) > *least_end;
        is_masked ? weigh<true>(work, at, count) : weigh<false>(work, at, count);
        num_runs = runs_of(c, work, values, blocks, at, count);
        const float* weights = work.scores.data();
        products<true>(work.runs.data(), num_runs, c.value_dim, c.dim, weights, work.sums.data(), work.shrink);
    }
    give_results(c, work, head, start, out);
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
        // The last rows see the most keys: they come first, and nobody waits for them in the end. One head after the
        // other: its keys and values may still lie in a cache.
#pragma omp for schedule(dynamic)
        for (long i = 0; i < pieces * c.kv_heads; i++) {
            long piece = pieces - 1 - i % pieces;
            attend(c, work, q, memory, blocks, i / pieces, piece * LANES, scale, out);
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
