// Panel layout of the weights of a linear layer.
//
// A panel holds 2 W outputs, with one line of 2 W weights per input k. Memory is read sequentially, a line is multiplied
// by the k-th activation of every row in registers, and no sum crosses a vector.
// In a bfloat16 line word j holds output j in its lower and output j + W in its upper half: a shift and a mask widen it.
#pragma once

#include "../native/vector.h"

namespace weft {

constexpr int PANEL = 2 * W;

// Position of the weight of output o in a line.
template <typename Weight>
constexpr int place(int o) {
    return sizeof(Weight) == 2 ? (o % W) * 2 + o / W : o;
}

// Lines of a panel; bfloat16 lines come in pairs, and an odd last line is followed by zeros.
template <typename Weight>
constexpr long num_lines(long num_inputs) {
    return sizeof(Weight) == 2 ? (num_inputs + 1) / 2 * 2 : num_inputs;
}

}  // namespace weft
