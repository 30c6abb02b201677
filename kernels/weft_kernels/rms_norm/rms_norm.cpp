// Root mean square normalisation of rows of floats or bfloat16; their length is a multiple of the vector's.

#include "../native/vector.h"

#include <cmath>

using namespace weft;

namespace {

struct Rows {
    long count, size;
    float eps;
};

// `total`, where it is asked for, takes x + residual, which is then normed in the place of x.
template <typename Item>
void norm(const Item* x, const Item* residual, const Item* weight, Item* total, Item* out, const Rows& rows) {
    Floats squares[2] = {};
    for (long i = 0; i < rows.size; i += W) {
        Floats value = load_wide(x + i);
        if (residual) {
            value = rounded<Item>(load_wide(residual + i) + value);
            store_narrow(total + i, value);
        }
        squares[i / W % 2] += value * value;
    }
    float factor = 1 / std::sqrt(sum(squares[0] + squares[1]) / float(rows.size) + rows.eps);
    const Item* from = residual ? total : x;
    for (long i = 0; i < rows.size; i += W)
        store_narrow(out + i, load_wide(weight + i) * rounded<Item>(load_wide(from + i) * factor));
}

template <typename Item>
void norms(const Item* x, long stride, const Item* residual, const Item* weight, Item* total, Item* out,
           const Rows& rows, int threads) {
    long size = rows.size;
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows.count * size > SERIAL_ITEMS)
    for (long r = 0; r < rows.count; r++)
        norm(x + r * stride, residual ? residual + r * size : nullptr, weight, total ? total + r * size : nullptr,
             out + r * size, rows);
}

}  // namespace

WEFT_EXPORT void weft_rms_norm_f32(const float* x, const float* weight, float* out, long rows, long size, long stride,
                                   float eps, int threads) {
    norms<float>(x, stride, nullptr, weight, nullptr, out, Rows{rows, size, eps}, threads);
}

WEFT_EXPORT void weft_rms_norm_bf16(const uint16_t* x, const uint16_t* weight, uint16_t* out, long rows, long size,
                                    long stride, float eps, int threads) {
    norms<uint16_t>(x, stride, nullptr, weight, nullptr, out, Rows{rows, size, eps}, threads);
}

// x, residual, total, out: [rows, size].
WEFT_EXPORT void weft_add_rms_norm_f32(const float* x, const float* residual, const float* weight, float* total,
                                       float* out, long rows, long size, float eps, int threads) {
    norms(x, size, residual, weight, total, out, Rows{rows, size, eps}, threads);
}

WEFT_EXPORT void weft_add_rms_norm_bf16(const uint16_t* x, const uint16_t* residual, const uint16_t* weight,
                                        uint16_t* total, uint16_t* out, long rows, long size, float eps, int threads) {
    norms(x, size, residual, weight, total, out, Rows{rows, size, eps}, threads);
}
