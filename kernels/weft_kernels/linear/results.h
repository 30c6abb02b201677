// Final step of a linear layer: adds the bias to the float sums and rounds once.
#pragma once

#include "panels.h"

#include <algorithm>

namespace weft {

// Sums of bfloat16 products as bfloat16: rows of `stride` floats, with room for whole vectors, to rows of
// `out_stride` of which `count` columns are given. bias: of the same columns, or null.
inline void give_rounded(const float* sums, long stride, long rows, long count, const uint16_t* bias, uint16_t* out,
                         long out_stride) {
    for (long r = 0; r < rows; r++, sums += stride, out += out_stride)
        for (long c = 0; c < count; c += W) {
            uint16_t last[W] = {};
            long size = std::min<long>(W, count - c) * sizeof *out;
            Floats value = load<Floats>(sums + c);
            if (bias) {
                std::memcpy(last, bias + c, size);
                value += load_wide(last);
            }
            store_narrow(last, value);
            std::memcpy(out + c, last, size);
        }
}

}  // namespace weft
