// Rotary embedding of heads of floats or bfloat16, in the rotate-half convention; half a head is a multiple of the
// vector's length.

#include "rotate.h"

using namespace weft;

namespace {

// x: rows of `heads` heads, `stride` apart; cos, sin: [rows, dim]. Each product and their sum are rounded to Item.
template <typename Item>
void rope(const Item* x, const Item* cos, const Item* sin, Item* out, long rows, long heads, long dim, long stride,
          int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * heads * dim > SERIAL_ITEMS)
    for (long r = 0; r < rows; r++)
        for (long h = 0; h < heads; h++)
            rotate(x + r * stride + h * dim, cos + r * dim, sin + r * dim, out + (r * heads + h) * dim, dim / 2);
}

}  // namespace

WEFT_EXPORT void weft_rope_f32(const float* x, const float* cos, const float* sin, float* out, long rows, long heads,
                               long dim, long stride, int threads) {
    rope(x, cos, sin, out, rows, heads, dim, stride, threads);
}

WEFT_EXPORT void weft_rope_bf16(const uint16_t* x, const uint16_t* cos, const uint16_t* sin, uint16_t* out, long rows,
                                long heads, long dim, long stride, int threads) {
    rope(x, cos, sin, out, rows, heads, dim, stride, threads);
}
