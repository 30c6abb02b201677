// A linear layer as a part of other kernels.
#pragma once

#include "packed12.h"

#include <algorithm>

namespace weft {

struct Shape {
    long num_rows, num_inputs, num_outputs;
    // Activations of these rows as they go into products, in the form that takes most: tiles of bfloat16 may be filled up.
    size_t scratch_floats() const {
        size_t rows = num_rows + (num_rows + 15) / 16, inputs = num_inputs + 31;
        return std::max<size_t>(num_rows * (num_inputs + 1), rows * inputs / 2 + 16);
    }
};

// out = x @ weight^T + bias; bias may be null. All threads of a team take part, and do not meet at the end; scratch,
// `scratch_floats` of it, is one for all of them.
template <typename Item, typename Weight>
void multiply(const Shape& shape, const Item* x, const Weight* packed, const Item* bias, Item* out, float* scratch);

// The same with weights in 12 bits each: results are those of the panels that they were, to the last bit.
template <typename Item>
void multiply(const Shape& shape, const Item* x, const Packed12* packed, const Item* bias, Item* out, float* scratch);

#ifdef __AMX_BF16__
// By the processor's matrix unit; weights lie for it.
template <>
void multiply(const Shape& shape, const uint16_t* x, const uint16_t* packed, const uint16_t* bias, uint16_t* out,
              float* scratch);
#endif

}  // namespace weft
