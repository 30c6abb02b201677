// How the weights of a linear layer lie for its products: by panels.
//
// A panel holds 2 W outputs: for each input k one line of 2 W weights, so that memory is read in one straight run, a
// line is multiplied by the k-th activation of every row in registers, and no sum goes across a vector.
// In a bfloat16 line word j holds output j in its lower and output j + W in its upper half: a shift and a mask widen it.
#pragma once

#include "../native/vector.h"

namespace weft {

constexpr int PANEL = 2 * W;

// Where weight (output o of the panel, any input) lies in its line.
template <typename Weight>
constexpr int place(int o) {
    return sizeof(Weight) == 2 ? (o % W) * 2 + o / W : o;
}

// Lines of a panel: bfloat16 ones come in pairs, behind an odd last one stands one of zeros.
template <typename Weight>
constexpr long num_lines(long num_inputs) {
    return sizeof(Weight) == 2 ? (num_inputs + 1) / 2 * 2 : num_inputs;
}

}  // namespace weft
