// Rotary embedding of queries and keys with new keys and values written where they stay, floats or bfloat16.

#include "../rope/rotate.h"

using namespace weft;

namespace {

struct Sizes {
    long rows, heads, kv_heads, dim;  // of one row: its queries' heads, its keys' and as many of values
    long parts, part, block_tokens;   // a head of a block has `parts` parts: keys go to this one, values to the next
};

template <typename Item>
void rope_kv(const Item* qkv, const Item* cos, const Item* sin, Item* pool, const int64_t* slots, Item* q,
             const Sizes& s, int threads) {
    long all = s.heads + 2 * s.kv_heads;
#pragma omp parallel for num_threads(threads) if (threads > 1 && s.rows * all * s.dim > SERIAL_ITEMS)
    for (long r = 0; r < s.rows; r++) {
        const Item *row = qkv + r * all * s.dim, *c = cos + r * s.dim, *n = sin + r * s.dim;
        for (long h = 0; h < s.heads; h++)
            rotate(row + h * s.dim, c, n, q + (r * s.heads + h) * s.dim, s.dim / 2);
        const Item *keys = row + s.heads * s.dim, *values = keys + s.kv_heads * s.dim;
        long block = slots[r] / s.block_tokens, offset = slots[r] % s.block_tokens;
        for (long h = 0; h < s.kv_heads; h++) {
            long place = ((block * s.kv_heads + h) * s.parts + s.part) * s.block_tokens + offset;
            rotate(keys + h * s.dim, c, n, pool + place * s.dim, s.dim / 2);
            std::memcpy(pool + (place + s.block_tokens) * s.dim, values + h * s.dim, s.dim * sizeof(Item));
        }
    }
}

}  // namespace

// sizes: as in Sizes.
WEFT_EXPORT void weft_rope_kv_f32(const float* qkv, const float* cos, const float* sin, float* pool,
                                  const int64_t* slots, float* q, const Sizes* sizes, int threads) {
    rope_kv(qkv, cos, sin, pool, slots, q, *sizes, threads);
}

WEFT_EXPORT void weft_rope_kv_bf16(const uint16_t* qkv, const uint16_t* cos, const uint16_t* sin, uint16_t* pool,
                                   const int64_t* slots, uint16_t* q, const Sizes* sizes, int threads) {
    rope_kv(qkv, cos, sin, pool, slots, q, *sizes, threads);
}
