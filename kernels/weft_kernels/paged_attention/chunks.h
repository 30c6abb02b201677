// Parts of attention of many query rows of one sequence: lanes of queries, and softmax over their scores.
//
// One piece of work is one key head and as many queries as fill two vectors: a query is a row and one of the heads that
// share the key head. Queries lie across the vectors, so that masks, maxima and sums need no sum across one, and a key
// or value enters as one number multiplied by all of them. Weights are kept relative to the highest score so far.
// Weights are rounded to bfloat16 where values are multiplied as pairs of those, see products.h; their sum is not.

#pragma once

#include "../native/pool.h"
#include "products.h"

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

namespace weft {

// Keys per softmax step; the running sums are rescaled and stored once per step.
constexpr long KEYS_AT_ONCE = 64;
constexpr int LINE_BYTES = 64;
constexpr float HIDDEN = -1e30f;

struct Chunk : Pool {
    long rows, heads;
    long context, window, chunk;  // tokens up to the last row; which keys a row sees, as in KeySpan
    long first;                   // no row sees a key below it
    const float* sinks;           // one for each head, or null
    long ratio() const { return heads / kv_heads; }
    long first_key(long position) const {
        long start = std::max(first, chunk ? position - position % chunk : 0);
        return window ? std::max(start, position + 1 - window) : start;
    }
};

// State of one thread for one piece of work.
template <typename Number>
struct Work {
    std::vector<Number> queries, made;  // `made`: keys or values that are not multiplied as they lie
    std::vector<float> scores, sums, result;
    std::vector<Run<Number>> runs;
    std::vector<uint16_t> zeros;
    std::vector<const uint16_t*> rows;
    float least_first, most_first, least_end, most_end;  // of the lanes
    float first[LANES], end[LANES], highest[LANES], total[LANES], shrink[LANES];

    explicit Work(const Chunk& c)
        : queries(c.dim * LANES), made(KEYS_AT_ONCE * std::max(c.dim, c.value_dim)), scores(KEYS_AT_ONCE * LANES), sums(c.value_dim * LANES),
          result(c.value_dim + W), runs(KEYS_AT_ONCE), zeros(c.value_dim), rows(KEYS_AT_ONCE + 1) {}

    // Weights overwrite the scores that they are computed from.
    Number* weights() { return (Number*)scores.data(); }
};

inline void ask_for(const void* memory, long size) {
    for (long at = 0; at < size; at += LINE_BYTES) __builtin_prefetch((const char*)memory + at, 0, 2);
}

// Keys or values of one head in the pool.
template <typename Item>
struct HeadLines {
    const Chunk& c;
    const Item* memory;  // of the first page
    const int* blocks;
    long dim, stride;
    const Item* at(long position) const {
        return memory + blocks[position / c.block_tokens] * c.page_stride + position % c.block_tokens * stride;
    }
    // How many of `count` from a position on lie in its block.
    long together(long position, long count) const {
        return std::min(c.block_tokens - position % c.block_tokens, count);
    }
};

template <typename Item>
HeadLines<Item> keys_of(const Chunk& c, const int* blocks, long head) {
    return {c, c.keys<Item>(0, head), blocks, c.dim, c.key_stride};
}

template <typename Item>
HeadLines<Item> values_of(const Chunk& c, const int* blocks, long head) {
    return {c, c.values<Item>(0, head), blocks, c.value_dim, c.value_stride};
}

// Scores are exponents of e, or, for pairs, 1 / ln 2 times as large and exponents of 2.
template <typename Number>
constexpr float EXPONENT = std::is_same<Number, float>::value ? 1.0f : 1.44269504f;

template <typename Number>
Floats power(Floats x);

template <>
WEFT_INLINE Floats power<float>(Floats x) {
    return exponential(x);
}

inline void store_weights(float* to, Floats weight, Floats) { store(to, weight); }

// Writes a query into its lane.
template <typename Item>
void take_query(const Item* from, long dim, float scale, float* to) {
    for (long d = 0; d < dim; d++) to[d * LANES] = widen(from[d]) * scale;
}

#ifdef WEFT_PAIRS
template <>
WEFT_INLINE Floats power<Pair>(Floats x) {
    return rough_power(x);
}

inline void store_weights(Pair* to, Floats first, Floats second) { store(to, pairs_of(first, second)); }

inline void take_query(const uint16_t* from, long dim, float, Pair* to) {
    for (long d = 0; d < dim / 2; d++) std::memcpy(to + d * LANES, from + 2 * d, sizeof *to);
}
#endif

// Turns the scores of `count` keys from position `at` on, times `scale`, into weights; `shrink` rescales the running sums.
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
    auto firsts = std::minmax_element(work.first, work.first + LANES);
    auto ends = std::minmax_element(work.end, work.end + LANES);
    work.least_first = *firsts.first, work.most_first = *firsts.second;
    work.least_end = *ends.first, work.most_end = *ends.second;
    std::fill_n(work.highest, LANES, HIDDEN);
    std::fill_n(work.total, LANES, 0.0f);
    std::fill(work.sums.begin(), work.sums.end(), 0.0f);
}

template <typename Item, typename Number>
void give_results(const Chunk& c, Work<Number>& work, long head, long start, Item* out) {
    for (long lane = 0; lane < std::min<long>(LANES, c.rows * c.ratio() - start); lane++) {
        long index = start + lane, row = index / c.ratio();
        Item* to = out + (row * c.heads + head * c.ratio() + index % c.ratio()) * c.value_dim;
        float total = work.total[lane];
        float highest = work.highest[lane] / EXPONENT<Number>;
        if (c.sinks) total += std::exp(c.sinks[head * c.ratio() + index % c.ratio()] - highest);
        float factor = 1 / total;
        for (long d = 0; d < c.value_dim; d++) work.result[d] = work.sums[d * LANES + lane] * factor;
        for (long d = 0; d < c.value_dim; d += W) {
            Item last[W];
            store_narrow(last, load<Floats>(&work.result[d]));
            std::memcpy(to + d, last, std::min<long>(W, c.value_dim - d) * sizeof(Item));
        }
    }
}

}  // namespace weft
