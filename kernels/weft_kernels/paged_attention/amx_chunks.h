// The same for bfloat16 with AMX: 16 keys by 32 dimensions, or 16 dimensions of values by 32 keys, are
// multiplied by two tiles of 16 lanes, and what comes out lies as scores and sums do.
//
// Several groups of lanes share a pass over the keys, because values must be transposed first.
#pragma once

#include "../native/amx.h"
#include "chunks.h"

namespace weft {

constexpr long GROUPS = 4, TILE_KEYS = 16, STEP = 32, TILE_DIMS = 16;

// Keys and values of up to KEYS_AT_ONCE positions in tile order.
struct Turned {
    const Chunk& c;
    std::vector<uint16_t> copied, values;
    std::vector<const uint16_t*> keys;  // 16 each

    explicit Turned(const Chunk& c)
        : c(c), copied(KEYS_AT_ONCE * c.key_stride), values(KEYS_AT_ONCE * c.value_dim + 32), keys(KEYS_AT_ONCE / TILE_KEYS) {}

    uint16_t* tile(long step, long d) { return at_line(values.data()) + (step * c.value_dim + d) * STEP; }

    // Keys are used in place unless 16 of them cross their block. Content after the last key is ignored.
    void take_keys(const HeadLines<uint16_t>& lines, long at, long count) {
        for (long t = 0; t < count; t += TILE_KEYS) {
            keys[t / TILE_KEYS] = lines.at(at + t);
            if (lines.together(at + t, TILE_KEYS) == TILE_KEYS) continue;
            uint16_t* to = copied.data() + t * c.key_stride;
            keys[t / TILE_KEYS] = to;
            for (long i = t; i < std::min(t + TILE_KEYS, count); i++, to += c.key_stride)
                std::memcpy(to, lines.at(at + i), c.dim * sizeof *to);
        }
    }

    // One tile per 32 keys and 16 dimensions, with dimensions as rows; padding is zero.
    void take_values(const HeadLines<uint16_t>& lines, long at, long count) {
        static const uint16_t zeros[W] = {};
        const uint16_t* rows[STEP];
        for (long step = 0; step * STEP < count; step++) {
            for (long t = 0; t < STEP; t++)
                rows[t] = step * STEP + t < count ? lines.at(at + step * STEP + t) : nullptr;
            for (long d = 0; d < c.value_dim; d += TILE_DIMS) {
                Words pairs[W];
                for (long t = 0; t < STEP; t += 2)
                    pairs[t / 2] = pairs_of(rows[t] ? rows[t] + d : zeros, rows[t + 1] ? rows[t + 1] + d : zeros);
                transpose(pairs);
                for (long i = 0; i < TILE_DIMS; i++) store(tile(step, d + i), pairs[i]);
            }
        }
    }
};

// scores [count, lanes] = keys @ queries.
inline void score(const Turned& turned, Work<Pair>& work, long count) {
    asm volatile("" ::: "memory");
    long dim = turned.c.dim, key_bytes = turned.c.key_stride * sizeof(uint16_t);
    constexpr long LANE_BYTES = LANES * sizeof(float);
    for (long t = 0; t < count; t += 2 * TILE_KEYS) {
        bool is_double = t + TILE_KEYS < count;
        const uint16_t *first = turned.keys[t / TILE_KEYS], *second = is_double ? turned.keys[t / TILE_KEYS + 1] : first;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (long d = 0; d < dim; d += STEP) {
            const Pair* queries = work.queries.data() + d / 2 * LANES;
            _tile_loadd(4, first + d, key_bytes);
            _tile_loadd(6, queries, LANE_BYTES);
            _tile_loadd(7, queries + 16, LANE_BYTES);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            if (!is_double) continue;
            _tile_loadd(5, second + d, key_bytes);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        float* to = work.scores.data() + t * LANES;
        _tile_stored(0, to, LANE_BYTES);
        _tile_stored(1, to + 16, LANE_BYTES);
        if (!is_double) continue;
        _tile_stored(2, to + TILE_KEYS * LANES, LANE_BYTES);
        _tile_stored(3, to + TILE_KEYS * LANES + 16, LANE_BYTES);
    }
    asm volatile("" ::: "memory");
}

// sums [value_dim, lanes] += values @ weights.
inline void add_values(Turned& turned, Work<Pair>& work, long count) {
    constexpr long LANE_BYTES = LANES * sizeof(float);
    long steps = (count + STEP - 1) / STEP;
    std::fill(work.weights() + (count + 1) / 2 * LANES, work.weights() + steps * STEP / 2 * LANES, Pair(0));
    asm volatile("" ::: "memory");
    for (long d = 0; d < turned.c.value_dim; d += TILE_DIMS) {
        float* sums = work.sums.data() + d * LANES;
        _tile_loadd(0, sums, LANE_BYTES);
        _tile_loadd(1, sums + 16, LANE_BYTES);
        for (long step = 0; step < steps; step++) {
            const Pair* weights = work.weights() + step * STEP / 2 * LANES;
            _tile_loadd(4, turned.tile(step, d), 64);
            _tile_loadd(6, weights, LANE_BYTES);
            _tile_loadd(7, weights + 16, LANE_BYTES);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
        }
        _tile_stored(0, sums, LANE_BYTES);
        _tile_stored(1, sums + 16, LANE_BYTES);
    }
    asm volatile("" ::: "memory");
}

inline void shrink_sums(Work<Pair>& work, long value_dim) {
    Floats low = load<Floats>(work.shrink), high = load<Floats>(work.shrink + W);
    for (float* sums = work.sums.data(); sums < work.sums.data() + value_dim * LANES; sums += LANES) {
        store(sums, load<Floats>(sums) * low);
        store(sums + W, load<Floats>(sums + W) * high);
    }
}

// Groups of lanes from query `start` of the key head on.
inline void attend_groups(const Chunk& c, Turned& turned, std::vector<Work<Pair>>& works, const uint16_t* q,
                          const int* blocks, long head, long start, float scale, uint16_t* out) {
    HeadLines<uint16_t> keys = keys_of<uint16_t>(c, blocks, head), values = values_of<uint16_t>(c, blocks, head);
    long num_groups = std::min(GROUPS, (c.rows * c.ratio() - start + LANES - 1) / LANES), from = c.context, end = 0;
    for (long g = 0; g < num_groups; g++) {
        take_queries(c, works[g], q, head, start + g * LANES, scale);
        from = std::min(from, long(works[g].least_first));
        end = std::max(end, long(works[g].most_end));
    }
    for (long at = from, count; at < end; at += count) {
        count = std::min(KEYS_AT_ONCE, end - at);
        turned.take_keys(keys, at, count);
        turned.take_values(values, at, count);
        for (long g = 0; g < num_groups; g++) {
            Work<Pair>& work = works[g];
            if (at >= long(work.most_end) || at + count <= long(work.least_first)) continue;
            score(turned, work, count);
            bool is_masked = float(at) < work.most_first || float(at + count) > work.least_end;
            is_masked ? weigh<true>(work, at, count, scale) : weigh<false>(work, at, count, scale);
            shrink_sums(work, c.value_dim);
            add_values(turned, work, count);
        }
    }
    for (long g = 0; g < num_groups; g++) give_results(c, works[g], head, start + g * LANES, out);
}

inline void attend_chunk_by_matrices(const Chunk& c, const uint16_t* q, const int* blocks, uint16_t* out, float scale,
                                     int num_threads) {
    long groups = (c.rows * c.ratio() + LANES - 1) / LANES, pieces = (groups + GROUPS - 1) / GROUPS;
#pragma omp parallel num_threads(num_threads) if (num_threads > 1 && c.rows * c.heads * c.context > SERIAL_ITEMS)
    {
        std::vector<Work<Pair>> works(std::min(GROUPS, groups), Work<Pair>(c));
        Turned turned(c);
        TileRegisters registers(16);
        // the last rows first, and one head after the other, as in chunks.cpp
#pragma omp for schedule(dynamic) nowait
        for (long i = 0; i < pieces * c.kv_heads; i++) {
            long piece = pieces - 1 - i % pieces;
            attend_groups(c, turned, works, q, blocks, i / pieces, piece * GROUPS * LANES, scale, out);
        }
    }
}

}  // namespace weft
