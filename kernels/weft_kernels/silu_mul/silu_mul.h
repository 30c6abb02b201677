// Activations of gated MLPs for use inside other kernels.
#pragma once

#include "../native/vector.h"

namespace weft {

// gate_up: [rows, 2 size], out: [rows, size]; see `weft_kernels.silu_mul`. All threads of a team call them, without a
// barrier at the end.
template <typename Item>
void silu_mul(const Item* gate_up, Item* out, long rows, long size);
template <typename Item>
void gelu_mul(const Item* gate_up, Item* out, long rows, long size);

}  // namespace weft
