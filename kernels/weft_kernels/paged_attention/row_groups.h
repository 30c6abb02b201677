// Attention of several rows of one sequence together: each reads keys and values that were turned or widened once.
//
// Every row keeps sums of its own, in the order of a row that is alone, so the bits are the same: see rows.cpp.
#pragma once

#include "rows.h"

#include <algorithm>
#include <cmath>
#include <type_traits>

namespace weft {

// Heads at a time and vectors of one value at a time: what the registers hold.
constexpr int MAX_HEADS = REGISTERS == 32 ? 4 : 2;
constexpr int MAX_VECTORS = 4;
// Queries of a group, rows times heads that share a key head; their scores stay in the second-level cache.
constexpr long MAX_QUERIES = 64;
// Floats of values at a time; they stay in the first-level cache for all rows.
constexpr long TILE_FLOATS = 4096;

struct Row {
    const int* blocks;  // of its sequence
    long first, end;    // the keys that it sees
};

// A row of a group. Its results go to `out`, or to `part` if that is not null and they are merged later.
template <typename Item>
struct Member {
    Row row;
    const Item* q;
    Item* out;
    float* part;
    Scale* scales;
    const float* sinks;
};

// scores become weights that add up to 1, or with a sink to less; `width` is a multiple of W.
inline Scale softmax(float* scores, long count, long width, const float* sink) {
    for (long i = count; i < width; i++) scores[i] = -INFINITY;
    Floats highest = splat(-INFINITY), total = {};
    for (long i = 0; i < width; i += W) {
        Floats value = load<Floats>(scores + i);
        highest = value > highest ? value : highest;
    }
    float top = highest[0];
    for (int i = 1; i < W; i++) top = std::max(top, highest[i]);
    for (long i = 0; i < width; i += W) store(scores + i, exponential(load<Floats>(scores + i) - top));
    for (long i = count; i < width; i++) scores[i] = 0;
    for (long i = 0; i < width; i += W) total += load<Floats>(scores + i);
    float sum_of_all = sum(total), factor = 1 / (sink ? sum_of_all + std::exp(*sink - top) : sum_of_all);
    for (long i = 0; i < width; i += W) store(scores + i, load<Floats>(scores + i) * factor);
    return {top, sum_of_all};
}

// The hardware prefetcher follows a run, but not from one block to the next.
template <typename Item>
WEFT_INLINE void fetch(const Item* from, long count) {
    for (long i = 0; i < count; i += 64 / long(sizeof(Item))) __builtin_prefetch(from + i);
}

// W keys from position `at` on, as [dim, W]. Behind the last key, at `end`, that key stands again. Prefetches the next W.
template <typename Item>
void turn_keys(const Pool& pool, const int* blocks, long head, long at, long end, float* turned) {
    auto key_at = [&](long place) {
        place = std::min(place, end - 1);
        return pool.keys<Item>(blocks[place / pool.block_tokens], head) + place % pool.block_tokens * pool.key_stride;
    };
    const Item* keys[W];
    for (long t = 0; t < W; t++) {
        keys[t] = key_at(at + t);
        fetch(key_at(at + W + t), pool.dim);
    }
    for (long d = 0; d < pool.dim; d += W) {
        Words lines[W];
#pragma GCC unroll 16
        for (int t = 0; t < W; t++) lines[t] = (Words)load_wide(keys[t] + d);
        transpose(lines);
#pragma GCC unroll 16
        for (int t = 0; t < W; t++) store(turned + (d + t) * W, lines[t]);
    }
}

// scores[h * width ..] = q[h] . key for W turned keys. A lane of `score_keys` is a vector here: the sum of each lane runs
// over the dimensions in its order, and lanes are added as in `sums_of_four`.
template <int Heads>
WEFT_INLINE void score_turned(const float* turned, const float* q, long dim, float* scores, long width) {
    constexpr int QUARTERS = W / 4;
    Floats total[Heads] = {}, half[Heads] = {};
#pragma GCC unroll 4
    for (int lane = 0; lane < 4; lane++) {
        Floats sums[QUARTERS][Heads] = {};
        for (long d = lane; d < dim; d += W)
#pragma GCC unroll 4
            for (int i = 0; i < QUARTERS; i++) {
                Floats line = load<Floats>(turned + (d + 4 * i) * W);
#pragma GCC unroll 4
                for (int h = 0; h < Heads; h++) sums[i][h] += line * splat(q[h * dim + d + 4 * i]);
            }
#pragma GCC unroll 4
        for (int h = 0; h < Heads; h++) {
            Floats sum = QUARTERS == 2 ? sums[0][h] + sums[1][h]
                                       : (sums[0][h] + sums[2 % QUARTERS][h]) + (sums[1][h] + sums[3 % QUARTERS][h]);
            half[h] = lane % 2 ? half[h] + sum : sum;
            if (lane % 2) total[h] = lane == 1 ? half[h] : total[h] + half[h];
        }
    }
#pragma GCC unroll 4
    for (int h = 0; h < Heads; h++) store(scores + h * width, total[h]);
}

// sums[h, d ..] += weights[h] * values over some keys; values are [keys, value_dim], for Vectors vectors from d on.
template <int Heads, int Vectors>
WEFT_INLINE void mix_tile(const float* values, long count, long value_dim, const float* weights, long width,
                          float* sums) {
    Floats own[Heads][Vectors];
#pragma GCC unroll 4
    for (int h = 0; h < Heads; h++)
#pragma GCC unroll 4
        for (int v = 0; v < Vectors; v++) own[h][v] = load<Floats>(sums + h * value_dim + v * W);
    for (long t = 0; t < count; t++, values += value_dim)
#pragma GCC unroll 4
        for (int v = 0; v < Vectors; v++) {
            Floats part = load<Floats>(values + v * W);
#pragma GCC unroll 4
            for (int h = 0; h < Heads; h++) own[h][v] += part * splat(weights[h * width + t]);
        }
#pragma GCC unroll 4
    for (int h = 0; h < Heads; h++)
#pragma GCC unroll 4
        for (int v = 0; v < Vectors; v++) store(sums + h * value_dim + v * W, own[h][v]);
}

template <int Heads>
void mix_heads(const float* values, long count, long value_dim, const float* weights, long width, float* sums) {
    long d = 0;
    for (; d + MAX_VECTORS * W <= value_dim; d += MAX_VECTORS * W)
        mix_tile<Heads, MAX_VECTORS>(values + d, count, value_dim, weights, width, sums + d);
    for (; d < value_dim; d += W) mix_tile<Heads, 1>(values + d, count, value_dim, weights, width, sums + d);
}

// Calls each(heads, first head) with as many heads at a time as the registers hold, as a constant.
template <typename Each>
WEFT_INLINE void by_heads(long ratio, Each each) {
    long h = 0;
    for (; MAX_HEADS >= 4 && h + 4 <= ratio; h += 4) each(std::integral_constant<int, 4>{}, h);
    for (; h + 2 <= ratio; h += 2) each(std::integral_constant<int, 2>{}, h);
    for (; h < ratio; h++) each(std::integral_constant<int, 1>{}, h);
}

// Floats of scratch memory that a group of `queries` needs, each with at most `longest` keys.
inline long group_floats(const Pool& pool, long queries, long longest) {
    long tile = std::max(TILE_FLOATS, W * pool.value_dim);
    return queries * (pool.dim + longest + 2 * W + pool.value_dim) + pool.dim * W + tile;
}

template <typename Item>
void attend_group(const Pool& pool, const Member<Item>* members, long count, long head, long ratio,
                  float scale, long longest, float* scratch) {
    long width = (longest + W - 1) / W * W + W, dim = pool.dim, value_dim = pool.value_dim;
    float *queries = scratch, *scores = queries + count * ratio * dim, *sums = scores + count * ratio * width;
    float *turned = sums + count * ratio * value_dim, *values = turned + dim * W;
    const int* blocks = members[0].row.blocks;
    long first = members[0].row.first, end = members[0].row.end;
    for (long m = 0; m < count; m++) {
        for (long i = 0; i < ratio * dim; i += W)
            store(queries + m * ratio * dim + i, load_wide(members[m].q + i) * scale);
        first = std::min(first, members[m].row.first), end = std::max(end, members[m].row.end);
    }
    for (long at = first; at < end; at += W) {
        turn_keys<Item>(pool, blocks, head, at, end, turned);
        for (long m = 0; m < count; m++) {
            const Row& row = members[m].row;
            long from = std::max(at, row.first), to = std::min(at + W, row.end);
            if (from >= to) continue;
            by_heads(ratio, [&](auto heads, long h) {
                float *own = scores + (m * ratio + h) * width, some[MAX_HEADS * W];
                const float* q = queries + (m * ratio + h) * dim;
                // There is room behind the last score, but none before the first.
                if (from == at) return score_turned<heads>(turned, q, dim, own + (at - row.first), width);
                score_turned<heads>(turned, q, dim, some, W);
                for (int i = 0; i < heads; i++)
                    std::copy(some + i * W + (from - at), some + i * W + (to - at), own + i * width);
            });
        }
    }
    for (long m = 0; m < count; m++)
        for (long h = 0; h < ratio; h++) {
            long seen = members[m].row.end - members[m].row.first;
            const float* sink = members[m].sinks ? members[m].sinks + h : nullptr;
            members[m].scales[h] = softmax(scores + (m * ratio + h) * width, seen, (seen + W - 1) / W * W, sink);
        }
    std::fill(sums, sums + count * ratio * value_dim, 0.0f);
    long tile = std::max<long>(W, TILE_FLOATS / value_dim);
    auto value_at = [&](long place) {
        place = std::min(place, end - 1);
        return pool.values<Item>(blocks[place / pool.block_tokens], head) + place % pool.block_tokens * pool.value_stride;
    };
    for (long at = first; at < end; at += tile) {
        long last = std::min(at + tile, end);
        for (long place = at; place < last; place++) {
            const Item* value = value_at(place);
            fetch(value_at(place + W), value_dim);
            for (long d = 0; d < value_dim; d += W) store(values + (place - at) * value_dim + d, load_wide(value + d));
        }
        for (long m = 0; m < count; m++) {
            const Row& row = members[m].row;
            long from = std::max(at, row.first), to = std::min(last, row.end);
            if (from >= to) continue;
            by_heads(ratio, [&](auto heads, long h) {
                const float* weights = scores + (m * ratio + h) * width + (from - row.first);
                mix_heads<heads>(values + (from - at) * value_dim, to - from, value_dim, weights, width,
                                 sums + (m * ratio + h) * value_dim);
            });
        }
    }
    for (long m = 0; m < count; m++)
        for (long i = 0; i < ratio * value_dim; i += W) {
            Floats value = load<Floats>(sums + m * ratio * value_dim + i);
            members[m].part ? store(members[m].part + i, value) : store_narrow(members[m].out + i, value);
        }
}

}  // namespace weft
