// Rotation and KV write for use inside other kernels.
#pragma once

#include "../native/pool.h"
#include "../native/vector.h"

namespace weft {

// Queries to q, keys and values into the pool, see `weft_kernels.rope_kv`; with null for cos nothing is rotated.
// `heads`: of a row's queries. Each row is the work of one thread. All threads of a team call it, without a barrier at
// the end.
template <typename Item, typename Angle>
void rope_kv(long rows, long heads, const Item* qkv, const Angle* cos, const Angle* sin, const Pool& pool,
             const int64_t* slots, Item* q);

}  // namespace weft
