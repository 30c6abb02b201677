// Attention of single query rows over keys and values in the pool; nothing is gathered or copied.
//
// One piece of work is one row, one key head and at most PIECE keys. The heads that share the key head go over the keys
// together, so that each key is read once; scores stay in a small buffer between the two products. Where a row sees more
// keys, its pieces are summed up afterwards: a few long contexts keep all threads busy, and as the cuts depend on the
// row alone, so does its result, whatever else is in the batch and however many threads there are. Rows of one sequence
// run together, see row_groups.h; their cuts and sums are those of single rows.

#include "row_groups.h"

#include <algorithm>
#include <cmath>

using namespace weft;

namespace {

constexpr long SERIAL_PRODUCTS = 1 << 17;
// Fewer queries gain less from turned keys than turning costs: 8 lost 10%, 16 gained 15% (Sapphire Rapids, AVX-512).
constexpr long MIN_QUERIES = 12;

// Calls visit(place among the keys seen, block, offset in the block, count, next block) for every run of keys in one
// block.
template <typename Visit>
WEFT_INLINE void each_run(const Pool& pool, const Row& row, Visit visit) {
    for (long at = row.first; at < row.end;) {
        long index = at / pool.block_tokens, offset = at % pool.block_tokens;
        long count = std::min(pool.block_tokens - offset, row.end - at);
        bool is_last = at + count >= row.end;
        visit(at - row.first, row.blocks[index], offset, count, row.blocks[is_last ? index : index + 1]);
        at += count;
    }
}

// scores[h, 0..Keys] = q[h] . key, for Heads heads and Keys keys.
template <typename Item, int Heads, int Keys>
WEFT_INLINE void score_keys(const Item* key, long stride, const float* q, long dim, float* scores, long width) {
    Floats sums[Heads][Keys] = {};
    for (long d = 0; d < dim; d += W) {
        Floats parts[Keys];
#pragma GCC unroll 4
        for (int t = 0; t < Keys; t++) parts[t] = load_wide(key + t * stride + d);
#pragma GCC unroll 4
        for (int h = 0; h < Heads; h++) {
            Floats query = load<Floats>(q + h * dim + d);
#pragma GCC unroll 4
            for (int t = 0; t < Keys; t++) sums[h][t] += parts[t] * query;
        }
    }
#pragma GCC unroll 4
    for (int h = 0; h < Heads; h++) {
        if (Keys == 4) {
            store(scores + h * width, sums_of_four(sums[h][0], sums[h][1], sums[h][2 % Keys], sums[h][3 % Keys]));
        } else {
            scores[h * width] = sum(sums[h][0]);
        }
    }
}

// scores[h, place] = q[h] . key, for Heads heads.
template <typename Item, int Heads>
void score(const Pool& pool, const Row& row, long head, const float* q, float* scores, long width) {
    long stride = pool.key_stride;
    each_run(pool, row, [&](long place, long block, long offset, long count, long next) {
        const Item* key = pool.keys<Item>(block, head) + offset * stride;
        const Item* ahead = pool.keys<Item>(next, head);
        long t = 0;
        for (; t + 4 <= count; t += 4) {
            fetch(ahead + t * stride, 4 * stride);
            score_keys<Item, Heads, 4>(key + t * stride, stride, q, pool.dim, scores + place + t, width);
        }
        for (; t < count; t++)
            score_keys<Item, Heads, 1>(key + t * stride, stride, q, pool.dim, scores + place + t, width);
    });
    fetch(pool.values<Item>(row.blocks[row.first / pool.block_tokens], head), 16 * pool.value_stride);
}

// out[h, d ..] = sum over keys of weights[h, place] * value[d ..], for Heads heads and Vectors vectors.
template <typename Item, typename Out, int Heads, int Vectors>
void mix(const Pool& pool, const Row& row, long head, long d, const float* weights, long width, Out* out) {
    Floats sums[Heads][Vectors] = {};
    each_run(pool, row, [&](long place, long block, long offset, long count, long next) {
        const Item* value = pool.values<Item>(block, head) + offset * pool.value_stride + d;
        const Item* ahead = pool.values<Item>(next, head) + d;
        for (long t = 0; t < count; t++, value += pool.value_stride) {
            fetch(ahead + t * pool.value_stride, Vectors * W);
#pragma GCC unroll 4
            for (int v = 0; v < Vectors; v++) {
                Floats part = load_wide(value + v * W);
#pragma GCC unroll 4
                for (int h = 0; h < Heads; h++) sums[h][v] += part * splat(weights[h * width + place + t]);
            }
        }
    });
    for (int h = 0; h < Heads; h++)
        for (int v = 0; v < Vectors; v++) store_narrow(out + h * pool.value_dim + d + v * W, sums[h][v]);
}

// The next Heads heads of one row that share `head`: q [Heads, dim], out [Heads, value_dim], scales [Heads], sinks
// [Heads] or null.
template <typename Item, typename Out, int Heads>
void attend(const Pool& pool, const Row& row, long head, const Item* q, float scale, float* scratch, Out* out,
            Scale* scales, const float* sinks) {
    long count = row.end - row.first, width = (count + W - 1) / W * W;
    float* scores = scratch + Heads * pool.dim;
    for (long i = 0; i < Heads * pool.dim; i += W) store(scratch + i, load_wide(q + i) * scale);
    score<Item, Heads>(pool, row, head, scratch, scores, width);
    for (int h = 0; h < Heads; h++) scales[h] = softmax(scores + h * width, count, width, sinks ? sinks + h : nullptr);
    long d = 0;
    for (; d + MAX_VECTORS * W <= pool.value_dim; d += MAX_VECTORS * W)
        mix<Item, Out, Heads, MAX_VECTORS>(pool, row, head, d, scores, width, out);
    for (; d < pool.value_dim; d += W) mix<Item, Out, Heads, 1>(pool, row, head, d, scores, width, out);
}

// All heads that share `head`: q [ratio, dim], out [ratio, value_dim], scales [ratio], sinks [ratio] or null.
template <typename Item, typename Out>
void attend_all(const Pool& pool, const Row& row, long head, long ratio, const Item* q, float scale, float* scratch,
                Out* out, Scale* scales, const float* sinks) {
    for (long h = 0; h < ratio;) {
        const Item* from = q + h * pool.dim;
        Out* to = out + h * pool.value_dim;
        const float* own = sinks ? sinks + h : nullptr;
        long left = ratio - h;
        if (MAX_HEADS >= 4 && left >= 4) {
            attend<Item, Out, 4>(pool, row, head, from, scale, scratch, to, scales + h, own);
            h += 4;
        } else if (left >= 2) {
            attend<Item, Out, 2>(pool, row, head, from, scale, scratch, to, scales + h, own);
            h += 2;
        } else {
            attend<Item, Out, 1>(pool, row, head, from, scale, scratch, to, scales + h, own);
            h += 1;
        }
    }
}

// out [value_dim] = the pieces' results, each by its share of the exponentials. `stride`: scales from piece to piece.
template <typename Item>
void merge(const float* parts, const Scale* scales, long count, long stride, long value_dim, Item* out,
           const float* sink) {
    float highest = -INFINITY, total = 0;
    for (long i = 0; i < count; i++) highest = std::max(highest, scales[i * stride].highest);
    for (long i = 0; i < count; i++) total += scales[i * stride].total * std::exp(scales[i * stride].highest - highest);
    if (sink) total += std::exp(*sink - highest);
    for (long d = 0; d < value_dim; d += W) {
        Floats value = {};
        for (long i = 0; i < count; i++) {
            float share = scales[i * stride].total * std::exp(scales[i * stride].highest - highest) / total;
            value += load<Floats>(parts + i * stride * value_dim + d) * share;
        }
        store_narrow(out + d, value);
    }
}

template <typename Item>
void rows(const Item* q, const Pool* cache, const int* blocks, const int* spans, Item* out, const long* sizes,
          float scale, const float* sinks, int num_threads) {
    Pool pool = *cache;
    pool.value_dim = sizes[2];
    Works works(blocks, spans, sizes[0], sizes[1], pool, num_threads);
    if (works.total * works.num_heads * pool.dim < SERIAL_PRODUCTS) num_threads = 1;
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
    attend_rows(works, pool, q, out, scale, sinks);
}

}  // namespace

namespace weft {

Works::Works(const int* blocks, const int* spans, long num_rows, long num_heads, const Pool& pool, int num_threads)
    : blocks(blocks), spans(spans), num_heads(num_heads), ratio(num_heads / pool.kv_heads) {
    first_parts.resize(num_rows);
    for (long r = 0; r < num_rows; r++) {
        longest = std::max(longest, std::min(num_keys(r), PIECE));
        total += num_keys(r);
        first_parts[r] = num_parts;
        if (num_pieces(r) == 1) continue;
        num_parts += pool.kv_heads * num_pieces(r) * ratio;
        for (long head = 0; head < pool.kv_heads; head++) split.push_back({r, 1, head, 0});
    }
    // Larger groups read less, but every thread needs work.
    long most = std::clamp(num_rows * pool.kv_heads / (2 * num_threads), 1L, std::max(1L, MAX_QUERIES / ratio));
    for (long r = 0, count; r < num_rows; r += count) {
        long pieces = 0;
        for (count = 0; count < most && r + count < num_rows && spans[4 * (r + count) + 1] == spans[4 * r + 1]; count++)
            pieces = std::max(pieces, num_pieces(r + count));
        if (count * ratio < MIN_QUERIES) count = 1, pieces = num_pieces(r);
        largest = std::max(largest, count);
        for (long head = 0; head < pool.kv_heads; head++)
            for (long piece = 0; piece < pieces; piece++) all.push_back({r, count, head, piece});
    }
    parts.resize(num_parts * pool.value_dim);
    scales.resize(num_parts);
}

template <typename Item>
void attend_rows(Works& works, const Pool& pool, const Item* q, Item* out, float scale, const float* sinks) {
    static thread_local std::vector<float> scratch;
    static thread_local std::vector<Scale> unread;
    static thread_local std::vector<Member<Item>> members;
    long ratio = works.ratio;
    size_t scratch_size = MAX_HEADS * (pool.dim + works.longest + W);
    if (works.largest > 1) scratch_size = group_floats(pool, works.largest * ratio, works.longest);
    if (scratch.size() < scratch_size) scratch.resize(scratch_size);
    if (unread.size() < size_t(ratio)) unread.resize(ratio);
#pragma omp for schedule(dynamic) nowait
    for (size_t i = 0; i < works.all.size(); i++) {
        const Work& work = works.all[i];
        members.clear();
        for (long r = work.row; r < work.row + work.count; r++) {
            if (work.piece >= works.num_pieces(r)) continue;
            const int* span = works.spans + 4 * r;
            long first = span[2] + work.piece * PIECE, end = std::min<long>(span[3], first + PIECE);
            long at = span[0] * works.num_heads + work.head * ratio, part = works.part(r, work.head, work.piece);
            bool is_whole = works.num_pieces(r) == 1;
            // The sink counts once: here, or where pieces are merged.
            members.push_back({{works.blocks + span[1], first, end},
                               q + at * pool.dim,
                               out + at * pool.value_dim,
                               is_whole ? nullptr : works.parts.data() + part * pool.value_dim,
                               is_whole ? unread.data() : works.scales.data() + part,
                               is_whole && sinks ? sinks + work.head * ratio : nullptr});
        }
        const Member<Item>& m = members[0];
        if (members.size() > 1)
            attend_group(pool, members.data(), members.size(), work.head, ratio, scale, works.longest,
                         scratch.data());
        else if (m.part)
            attend_all(pool, m.row, work.head, ratio, m.q, scale, scratch.data(), m.part, m.scales, m.sinks);
        else
            attend_all(pool, m.row, work.head, ratio, m.q, scale, scratch.data(), m.out, m.scales, m.sinks);
    }
    if (works.split.empty()) return;
#pragma omp barrier
#pragma omp for schedule(dynamic) nowait
    for (size_t i = 0; i < works.split.size(); i++) {
        const Work& work = works.split[i];
        long at = works.spans[4 * work.row] * works.num_heads + work.head * ratio;
        for (long h = 0; h < ratio; h++) {
            long part = works.part(work.row, work.head, 0) + h;
            merge(works.parts.data() + part * pool.value_dim, works.scales.data() + part, works.num_pieces(work.row),
                  ratio, pool.value_dim, out + (at + h) * pool.value_dim, sinks ? sinks + work.head * ratio + h : nullptr);
        }
    }
}

template void attend_rows(Works&, const Pool&, const float*, float*, float, const float*);
template void attend_rows(Works&, const Pool&, const uint16_t*, uint16_t*, float, const float*);

}  // namespace weft

// sizes: rows, heads, value_dim. sinks: one for each head, or null.
WEFT_EXPORT void weft_attend_f32(const float* q, const Pool* cache, const int* blocks, const int* spans, float* out,
                                 const long* sizes, float scale, const float* sinks, int num_threads) {
    rows(q, cache, blocks, spans, out, sizes, scale, sinks, num_threads);
}

WEFT_EXPORT void weft_attend_bf16(const uint16_t* q, const Pool* cache, const int* blocks, const int* spans,
                                  uint16_t* out, const long* sizes, float scale, const float* sinks, int num_threads) {
    rows(q, cache, blocks, spans, out, sizes, scale, sinks, num_threads);
}

// Vectors of so many numbers must fill every dimension.
WEFT_EXPORT long weft_width() { return W; }
