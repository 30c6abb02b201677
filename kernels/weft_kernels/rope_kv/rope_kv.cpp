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
void rope_kv_all(long rows, long heads, const Item* qkv, const Item* cos, const Item* sin, const Pool& pool,
                 const int64_t* slots, Item* q, int threads) {
    long num_items = rows * (heads + 2 * pool.kv_heads) * pool.dim;
#pragma omp parallel num_threads(threads) if (threads > 1 && num_items > SERIAL_ITEMS)
    rope_kv(rows, heads, qkv, cos, sin, pool, slots, q);
}

}  // namespace

namespace weft {

template <typename Item, typename Angle>
void rope_kv(long rows, long heads, const Item* qkv, const Angle* cos, const Angle* sin, const Pool& pool,
             const int64_t* slots, Item* q) {
    long all = heads + 2 * pool.kv_heads, dim = pool.dim;
#pragma omp for schedule(static) nowait
    for (long r = 0; r < rows; r++) {
        const Item* row = qkv + r * all * dim;
        const Angle *c = cos ? cos + r * dim : nullptr, *n = sin + r * dim;
        for (long h = 0; h < heads; h++) place_head(row + h * dim, c, n, q + (r * heads + h) * dim, dim);
        const Item *keys = row + heads * dim, *values = keys + pool.kv_heads * dim;
        long page = slots[r] / pool.block_tokens, offset = slots[r] % pool.block_tokens;
        for (long h = 0; h < pool.kv_heads; h++) {
            place_head(keys + h * dim, c, n, pool.keys<Item>(page, h) + offset * pool.key_stride, dim);
            Item* to = pool.values<Item>(page, h) + offset * pool.value_stride;
            std::memcpy(to, values + h * dim, dim * sizeof(Item));
        }
    }
}

template void rope_kv(long, long, const float*, const float*, const float*, const Pool&, const int64_t*, float*);
template void rope_kv(long, long, const uint16_t*, const uint16_t*, const uint16_t*, const Pool&, const int64_t*,
                      uint16_t*);
template void rope_kv(long, long, const uint16_t*, const float*, const float*, const Pool&, const int64_t*, uint16_t*);

}  // namespace weft

WEFT_EXPORT void weft_rope_kv_f32(const float* qkv, const float* cos, const float* sin, const Pool* pool,
                                  const int64_t* slots, float* q, long rows, long heads, int threads) {
    rope_kv_all(rows, heads, qkv, cos, sin, *pool, slots, q, threads);
}

WEFT_EXPORT void weft_rope_kv_bf16(const uint16_t* qkv, const uint16_t* cos, const uint16_t* sin, const Pool* pool,
                                   const int64_t* slots, uint16_t* q, long rows, long heads, int threads) {
    rope_kv_all(rows, heads, qkv, cos, sin, *pool, slots, q, threads);
}
