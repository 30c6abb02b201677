// A linear layer as a part of other kernels.
#pragma once

#include "../native/vector.h"

namespace weft {

struct Shape {
    long num_rows, num_inputs, num_outputs;
    // Activations of these rows as they go into products, in the form that takes most.
    size_t scratch_floats() const { return num_rows * (num_inputs + 1); }
};

// out = x @ weight^T + bias; bias may be null. All threads of a team take part, and do not meet at the end; scratch,
// `scratch_floats` of it, is one for all of them.
template <typename Item, typename Weight>
void multiply(const Shape& shape, const Item* x, const Weight* packed, const Item* bias, Item* out, float* scratch);

}  // namespace weft
