// Attention of many query rows of one sequence over keys and values where they lie in the pool.
//
// One piece of work is one key head and as many queries as fill two vectors: a query is a row and one of the heads that
// share the key head. Queries lie across the vectors, so that masks, maxima and sums need no sum across one, and a key
// or value enters as one number multiplied by all of them. Weights are kept relative to the highest score so far.
// Weights are rounded to bfloat16 where values are multiplied as pairs of those, see products.h; their sum is not.

#include "products.h"

#include <algorithm>
#include <type_traits>
#include <vector>

using namespace weft;

namespace {

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

// What one thread keeps for one piece of work.
template <typename Number>
struct Work {
    std::vector<Number> queries, made;  // `made`: keys or values that are not multiplied as they lie
    std::vector<float> scores, sums, result;
    std::vector<Run<Number>> runs;
    std::vector<uint16_t> zeros;
    std::vector<const uint16_t*> rows;
    float first[LANES], end[LANES], highest[LANES], total[LANES], shrink[LANES];

    explicit Work(const Chunk& c)
        : queries(c.dim * LANES), made(KEYS_AT_ONCE * c.dim), scores(KEYS_AT_ONCE * LANES), sums(c.value_dim * LANES),
          result(c.value_dim + W), runs(KEYS_AT_ONCE), zeros(c.value_dim), rows(KEYS_AT_ONCE + 1) {}

    // In the place of the scores that they are made of, which are read before.
    Number* weights() { return (Number*)scores.data(); }
};

void ask_for(const void* memory, long size) {
    for (long at = 0; at < size; at += LINE_BYTES) __builtin_prefetch((const char*)memory + at, 0, 2);
}

const float* widened(const float* from, long, float*) { return from; }
const float* widened(const uint16_t* from, long count, float* wide) {
    for (long i = 0; i < count; i++) wide[i] = widen(from[i]);
    return wide;
}

// Keys, or values, of one head where they lie.
template <typename Item>
struct Lines {
    const Chunk& c;
    const Item* memory;
    const int* blocks;
    const Item* at(long position) const {
        return memory + blocks[position / c.block_tokens] * c.block_stride() + position % c.block_tokens * c.dim;
    }
    // How many of `count` from a position on lie in its block.
    long together(long position, long count) const {
        return std::min(c.block_tokens - position % c.block_tokens, count);
    }
};

// Scores are exponents of e, or, for pairs, 1 / ln 2 times as large and exponents of 2.
template <typename Number>
constexpr float EXPONENT = std::is_same<Number, float>::value ? 1.0f : 1.44269504f;

template <typename Number>
Floats power(Floats x);

template <>
WEFT_INLINE Floats power<float>(Floats x) {
    return exponential(x);
}

void store_weights(float* to, Floats weight, Floats) { store(to, weight); }

// A query into its lane, number by number.
template <typename Item>
void take_query(const Item* from, long dim, float scale, float* to) {
    for (long d = 0; d < dim; d++) to[d * LANES] = widen(from[d]) * scale;
}

// The runs of `count` keys from position `at` on; returns how many.
template <typename Item>
long runs_of_keys(const Lines<Item>& keys, Work<float>& work, long at, long count) {
    long num_runs = 0;
    for (long done = 0, size; done < count; done += size) {
        size = keys.together(at + done, count - done);
        float* wide = work.made.data() + done * keys.c.dim;
        work.runs[num_runs++] = {widened(keys.at(at + done), size * keys.c.dim, wide), size};
    }
    return num_runs;
}

template <typename Item>
long runs_of_values(const Lines<Item>& values, Work<float>& work, long at, long count) {
    return runs_of_keys(values, work, at, count);
}

#ifdef WEFT_PAIRS
template <>
WEFT_INLINE Floats power<Pair>(Floats x) {
    return rough_power(x);
}

void store_weights(Pair* to, Floats first, Floats second) { store(to, pairs_of(first, second)); }

void take_query(const uint16_t* from, long dim, float, Pair* to) {
    for (long d = 0; d < dim / 2; d++) std::memcpy(to + d * LANES, from + 2 * d, sizeof *to);
}

long runs_of_keys(const Lines<uint16_t>& keys, Work<Pair>& work, long at, long count) {
    long num_runs = 0;
    for (long done = 0, size; done < count; done += size) {
        size = keys.together(at + done, count - done);
        work.runs[num_runs++] = {(const Pair*)keys.at(at + done), size};
    }
    return num_runs;
}

// Behind an odd last value stands one of zeros.
long runs_of_values(const Lines<uint16_t>& values, Work<Pair>& work, long at, long count) {
    const uint16_t** rows = work.rows.data();
    for (long done = 0, size; done < count; done += size) {
        size = values.together(at + done, count - done);
        const uint16_t* from = values.at(at + done);
        for (long t = 0; t < size; t++) rows[done + t] = from + t * values.c.dim;
    }
    rows[count] = work.zeros.data();
    Pair* to = work.made.data();
    for (long t = 0; t < count; t += 2) {
        long d = 0, size = values.c.value_dim;
        for (; d + W <= size; d += W) store(to + d, pairs_of(rows[t] + d, rows[t + 1] + d));
        for (; d < size; d++) to[d] = rows[t][d] | Pair(rows[t + 1][d]) << 16;
        to += size;
    }
    work.runs[0] = {work.made.data(), (count + 1) / 2};
    return 1;
}
#endif

// Scores of `count` keys from position `at` on, taken times `scale`, become weights, and `shrink` what the sums so far
// are to be taken times.
template <bool Masked, typename Number>
void weigh(Work<Number>& work, long at, long count, float scale) {
    constexpr long STEP = std::is_same<Number, float>::value ? 1 : 2;
    scale *= EXPONENT<Number>;
    Floats before[2], highest[2] = {splat(HIDDEN), splat(HIDDEN)}, total[2] = {};
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
    for (int v = 0; v < 2; v++) {
        before[v] = load<Floats>(work.highest + v * W);
        highest[v] = larger(highest[v] * scale, before[v]);
    }
    auto weight_of = [&](long t, int v) {
        Floats score = load<Floats>(&work.scores[t * LANES + v * W]);
        Floats weight = power<Number>(score * scale - highest[v]);
        if (Masked) weight = score == HIDDEN ? Floats{} : weight;
        total[v] += weight;
        return weight;
    };
    for (long t = 0; t < count; t += STEP)
        for (int v = 0; v < 2; v++) {
            Floats weight = weight_of(t, v), next = STEP == 2 && t + 1 < count ? weight_of(t + 1, v) : Floats{};
            store_weights(work.weights() + t / STEP * LANES + v * W, weight, next);
        }
    for (int v = 0; v < 2; v++) {
        Floats shrink = exponential((before[v] - highest[v]) * (1 / EXPONENT<Number>));
        store(work.shrink + v * W, shrink);
        store(work.highest + v * W, highest[v]);
        store(work.total + v * W, load<Floats>(work.total + v * W) * shrink + total[v]);
    }
}

// The lanes' queries, from query `start` of the key head on, and which keys they see; the last query fills up the rest.
template <typename Item, typename Number>
void take_queries(const Chunk& c, Work<Number>& work, const Item* q, long head, long start, float scale) {
    long num_queries = c.rows * c.ratio();
    for (long lane = 0; lane < LANES; lane++) {
        long index = std::min(start + lane, num_queries - 1), row = index / c.ratio();
        long position = c.context - c.rows + row;
        const Item* from = q + (row * c.heads + head * c.ratio() + index % c.ratio()) * c.dim;
        take_query(from, c.dim, scale, &work.queries[lane]);
        work.first[lane] = float(c.first_key(position)), work.end[lane] = float(position + 1);
    }
    std::fill_n(work.highest, LANES, HIDDEN);
    std::fill_n(work.total, LANES, 0.0f);
    std::fill(work.sums.begin(), work.sums.end(), 0.0f);
}

template <typename Item, typename Number>
void give_results(const Chunk& c, Work<Number>& work, long head, long start, Item* out) {
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

template <typename Item, typename Number>
void attend(const Chunk& c, Work<Number>& work, const Item* q, const Item* memory, const int* blocks, long head,
            long start, float scale, Item* out) {
    constexpr bool ARE_PAIRS = !std::is_same<Number, float>::value;
    long dim = ARE_PAIRS ? c.dim / 2 : c.dim, value_stride = ARE_PAIRS ? c.value_dim : c.dim;
    take_queries(c, work, q, head, start, scale);
    Lines<Item> keys{c, memory + c.keys(head), blocks}, values{c, memory + c.values(head), blocks};
    auto [least_first, most_first] = std::minmax_element(work.first, work.first + LANES);
    auto [least_end, most_end] = std::minmax_element(work.end, work.end + LANES);
    for (long at = long(*least_first), count; at < long(*most_end); at += count) {
        count = std::min(KEYS_AT_ONCE, long(*most_end) - at);
        long num_runs = runs_of_keys(keys, work, at, count), done = 0;
        for (long r = 0; r < num_runs; done += work.runs[r++].count) {
            Run<Number> run{work.runs[r].data, dim};
            ask_for(values.at(at + done), work.runs[r].count * c.dim * sizeof(Item));
            float* scores = &work.scores[done * LANES];
            products<false>(&run, 1, work.runs[r].count, dim, work.queries.data(), scores, nullptr);
        }
        bool is_masked = float(at) < *most_first || float(at + count) > *least_end;
        float left = ARE_PAIRS ? scale : 1;  // floats have been taken times the scale already
        is_masked ? weigh<true>(work, at, count, left) : weigh<false>(work, at, count, left);
        num_runs = runs_of_values(values, work, at, count);
        const Run<Number>* runs = work.runs.data();
        products<true>(runs, num_runs, c.value_dim, value_stride, work.weights(), work.sums.data(), work.shrink);
    }
    give_results(c, work, head, start, out);
}

template <typename Number, typename Item>
void attend_chunk(const Chunk& c, const Item* q, const Item* memory, const int* blocks, Item* out, float scale,
                  int num_threads) {
    long pieces = (c.rows * c.ratio() + LANES - 1) / LANES;
#pragma omp parallel num_threads(num_threads) if (num_threads > 1 && c.rows * c.heads * c.context > SERIAL_ITEMS)
    {
        Work<Number> work(c);
        // The last rows see the most keys: they come first, and nobody waits for them in the end. One head after the
        // other: its keys and values may still lie in a cache.
#pragma omp for schedule(dynamic) nowait
        for (long i = 0; i < pieces * c.kv_heads; i++) {
            long piece = pieces - 1 - i % pieces;
            attend(c, work, q, memory, blocks, i / pieces, piece * LANES, scale, out);
        }
    }
}

Chunk chunk_of(const long* sizes) {
    return {sizes[0], sizes[1], sizes[2], sizes[3], sizes[4],  sizes[5],
            sizes[6], sizes[7], sizes[8], sizes[9], sizes[10], sizes[11]};
}

}  // namespace

// sizes: rows, heads, kv_heads, layers, parts, block_tokens, dim, value_dim, layer, context, window, chunk.
WEFT_EXPORT void weft_attend_chunk_f32(const float* q, const float* memory, const int* blocks, float* out,
                                       const long* sizes, float scale, int num_threads) {
    attend_chunk<float>(chunk_of(sizes), q, memory, blocks, out, scale, num_threads);
}

WEFT_EXPORT void weft_attend_chunk_bf16(const uint16_t* q, const uint16_t* memory, const int* blocks, uint16_t* out,
                                        const long* sizes, float scale, int num_threads) {
    Chunk c = chunk_of(sizes);
#ifdef WEFT_PAIRS
    if (c.dim % 2 == 0) return attend_chunk<Pair>(c, q, memory, blocks, out, scale, num_threads);
#endif
    attend_chunk<float>(c, q, memory, blocks, out, scale, num_threads);
}
