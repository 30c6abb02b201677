// Root mean square normalisation of rows of floats or bfloat16; their length is a multiple of the vector's.

#include "rms_norm.h"

#include <cmath>

using namespace weft;

namespace {

// If `total` is given it receives x + residual, and that sum is normed instead of x.
template <typename Item, typename Weight>
void norm_one(const Parts& parts, const Item* x, const Item* residual, const Weight* weight, Item* total, Item* out) {
    Floats squares[2] = {};
    for (long i = 0; i < parts.size; i += W) {
        Floats value = load_wide(x + i);
        if (residual) {
            value = rounded<Item>(load_wide(residual + i) + value);
            store_narrow(total + i, value);
        }
        squares[i / W % 2] += value * value;
    }
    float factor = 1 / std::sqrt(sum(squares[0] + squares[1]) / float(parts.size) + parts.eps);
    const Item* from = residual ? total : x;
    for (long i = 0; i < parts.size; i += W)
        store_narrow(out + i, load_wide(weight + i) * rounded<Weight>(load_wide(from + i) * factor));
}

template <typename Item>
void norm_all(const Parts& parts, const Item* x, const Item* residual, const Item* weight, Item* total, Item* out,
              int threads) {
#pragma omp parallel num_threads(threads) if (threads > 1 && parts.rows * parts.heads * parts.size > SERIAL_ITEMS)
    norm(parts, x, residual, weight, total, out);
}

}  // namespace

namespace weft {

template <typename Item, typename Weight>
void norm(const Parts& parts, const Item* x, const Item* residual, const Weight* weight, Item* total, Item* out) {
#pragma omp for schedule(static) nowait
    for (long i = 0; i < parts.rows * parts.heads; i++) {
        long row = i / parts.heads, at = i % parts.heads * parts.size;
        long whole = row * parts.size;  // where there is a residual
        norm_one(parts, x + row * parts.stride + at, residual ? residual + whole : nullptr, weight,
                 total ? total + whole : nullptr, out + row * parts.out_stride + at);
    }
}

template void norm(const Parts&, const float*, const float*, const float*, float*, float*);
template void norm(const Parts&, const uint16_t*, const uint16_t*, const uint16_t*, uint16_t*, uint16_t*);
template void norm(const Parts&, const uint16_t*, const uint16_t*, const float*, uint16_t*, uint16_t*);

}  // namespace weft

// x: rows of `heads` heads of `size` items, rows `stride` apart; out: the same without gaps.
WEFT_EXPORT void weft_rms_norm_f32(const float* x, const float* weight, float* out, long rows, long heads, long size,
                                   long stride, float eps, int threads) {
    norm_all<float>({rows, heads, size, stride, heads * size, eps}, x, nullptr, weight, nullptr, out, threads);
}

WEFT_EXPORT void weft_rms_norm_bf16(const uint16_t* x, const uint16_t* weight, uint16_t* out, long rows, long heads,
                                    long size, long stride, float eps, int threads) {
    norm_all<uint16_t>({rows, heads, size, stride, heads * size, eps}, x, nullptr, weight, nullptr, out, threads);
}

// x, residual, total, out: [rows, size].
WEFT_EXPORT void weft_add_rms_norm_f32(const float* x, const float* residual, const float* weight, float* total,
                                       float* out, long rows, long size, float eps, int threads) {
    norm_all({rows, 1, size, size, size, eps}, x, residual, weight, total, out, threads);
}

WEFT_EXPORT void weft_add_rms_norm_bf16(const uint16_t* x, const uint16_t* residual, const uint16_t* weight,
                                        uint16_t* total, uint16_t* out, long rows, long size, float eps, int threads) {
    norm_all({rows, 1, size, size, size, eps}, x, residual, weight, total, out, threads);
}
