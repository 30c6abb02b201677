// Root mean square normalisation for use inside other kernels.
#pragma once

#include "../native/vector.h"

namespace weft {

// Rows of `heads` parts that are normed each for itself; `size` items each, a multiple of the vector's length. Rows are
// `stride` items apart where they are read, `out_stride` where they are written.
struct Parts {
    long rows, heads, size, stride, out_stride;
    float eps;
};

// out = weight * norm(x), which may be x; norm(x) is rounded to the type of the weight. With a `residual`: of total =
// residual + x, which may be residual; there is one head then, and all strides are the size. All threads of a team call
// it, without a barrier at the end.
template <typename Item, typename Weight>
void norm(const Parts& parts, const Item* x, const Item* residual, const Weight* weight, Item* total, Item* out);

}  // namespace weft
