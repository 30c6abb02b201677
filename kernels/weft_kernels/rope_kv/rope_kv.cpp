// Rotary embedding of queries and keys, and writes of new keys and values into the pool; float or bfloat16.

#include "../rope/rotate.h"
#include "rope_kv.h"

using namespace weft;

namespace {

// Copies a head to its place, rotated if there are angles.
template <typename Item, typename Angle>
WEFT_INLINE void place_head(const Item* from, const Angle* cos, const Angle* sin, Item* to, long dim) {
    if (cos)
        rotate(from, cos, sin, to, dim / 2);
    else
        std::memcpy(to, from, dim * sizeof(Item));
}

template <typename Item>
void rope_kv_all(const KvSizes& s, const Item* qkv, const Item* cos, const Item* sin, Item* pool, const int64_t* slots,
                 Item* q, int threads) {
    long num_items = s.rows * (s.heads + 2 * s.kv_heads) * s.dim;
#pragma omp parallel num_threads(threads) if (threads > 1 && num_items > SERIAL_ITEMS)
    rope_kv(s, qkv, cos, sin, pool, slots, q);
}

}  // namespace

namespace weft {

template <typename Item, typename Angle>
void rope_kv(const KvSizes& s, const Item* qkv, const Angle* cos, const Angle* sin, Item* pool, const int64_t* slots,
             Item* q) {
    long all = s.heads + 2 * s.kv_heads;
#pragma omp for schedule(static) nowait
    for (long r = 0; r < s.rows; r++) {
        const Item* row = qkv + r * all * s.dim;
        const Angle *c = cos ? cos + r * s.dim : nullptr, *n = sin + r * s.dim;
        for (long h = 0; h < s.heads; h++) place_head(row + h * s.dim, c, n, q + (r * s.heads + h) * s.dim, s.dim);
        const Item *keys = row + s.heads * s.dim, *values = keys + s.kv_heads * s.dim;
        long block = slots[r] / s.block_tokens, offset = slots[r] % s.block_tokens;
        for (long h = 0; h < s.kv_heads; h++) {
            long place = ((block * s.kv_heads + h) * s.parts + s.part) * s.block_tokens + offset;
            place_head(keys + h * s.dim, c, n, pool + place * s.dim, s.dim);
            std::memcpy(pool + (place + s.block_tokens) * s.dim, values + h * s.dim, s.dim * sizeof(Item));
        }
    }
}

template void rope_kv(const KvSizes&, const float*, const float*, const float*, float*, const int64_t*, float*);
template void rope_kv(const KvSizes&, const uint16_t*, const uint16_t*, const uint16_t*, uint16_t*, const int64_t*,
                      uint16_t*);
template void rope_kv(const KvSizes&, const uint16_t*, const float*, const float*, uint16_t*, const int64_t*,
                      uint16_t*);

}  // namespace weft

WEFT_EXPORT void weft_rope_kv_f32(const float* qkv, const float* cos, const float* sin, float* pool,
                                  const int64_t* slots, float* q, const KvSizes* sizes, int threads) {
    rope_kv_all(*sizes, qkv, cos, sin, pool, slots, q, threads);
}

WEFT_EXPORT void weft_rope_kv_bf16(const uint16_t* qkv, const uint16_t* cos, const uint16_t* sin, uint16_t* pool,
                                   const int64_t* slots, uint16_t* q, const KvSizes* sizes, int threads) {
    rope_kv_all(*sizes, qkv, cos, sin, pool, slots, q, threads);
}
