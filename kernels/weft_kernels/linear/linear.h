// A linear layer for use inside other kernels.
#pragma once

#include "packed12.h"

#include <algorithm>

namespace weft {

struct Shape {
    long num_rows, num_inputs, num_outputs;
    // Floats of scratch for the packed activations, in the largest form: bfloat16 tiles may be padded.
    size_t scratch_floats() const {
        size_t rows = num_rows + (num_rows + 15) / 16, inputs = num_inputs + 31;
        return std::max<size_t>(num_rows * (num_inputs + 1), rows * inputs / 2 + 16);
    }
};

// out = x @ weight^T + bias; bias may be null. All threads of a team call it, without a barrier at the end. They share
// `scratch` of `scratch_floats` floats.
template <typename Item, typename Weight>
void multiply(const Shape& shape, const Item* x, const Weight* packed, const Item* bias, Item* out, float* scratch);

// The same with 12-bit weights; the results equal those of the unpacked panels to the last bit.
template <typename Item>
void multiply(const Shape& shape, const Item* x, const Packed12* packed, const Item* bias, Item* out, float* scratch);

#ifdef __AMX_BF16__
// AMX version; the weights are packed for it.
template <>
void multiply(const Shape& shape, const uint16_t* x, const uint16_t* packed, const uint16_t* bias, uint16_t* out,
              float* scratch);
#endif

}  // namespace weft
