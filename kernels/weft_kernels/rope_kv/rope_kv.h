// Rotation and KV write for use inside other kernels.
#pragma once

#include "../native/vector.h"

namespace weft {

struct KvSizes {
    long rows, heads, kv_heads, dim;  // of one row: its queries' heads, its keys' and as many of values
    long parts, part, block_tokens;   // a head of a block has `parts` parts: keys go to this one, values to the next
};

// Queries to q, keys and values into the pool, see `weft_kernels.rope_kv`; with null for cos nothing is rotated.
// Each row is the work of one thread. All threads of a team call it, without a barrier at the end.
template <typename Item, typename Angle>
void rope_kv(const KvSizes& sizes, const Item* qkv, const Angle* cos, const Angle* sin, Item* pool,
             const int64_t* slots, Item* q);

}  // namespace weft
