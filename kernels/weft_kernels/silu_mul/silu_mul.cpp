// The gate of a SwiGLU layer for rows of floats or bfloat16; half their length is a multiple of the vector's.

#include "../native/vector.h"

using namespace weft;

namespace {

template <typename Item>
void silu_mul(const Item* gate_up, Item* out, long rows, long size, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * size > SERIAL_ITEMS)
    for (long r = 0; r < rows; r++) {
        const Item *gate = gate_up + 2 * r * size, *up = gate + size;
        for (long i = 0; i < size; i += W) {
            Floats x = load_wide(gate + i);
            // e^-|x| never overflows
            Floats small = exponential(x > 0.0f ? -x : x);
            Floats sigmoid = (x > 0.0f ? splat(1.0f) : small) / (small + 1.0f);
            store_narrow(out + r * size + i, rounded<Item>(x * sigmoid) * load_wide(up + i));
        }
    }
}

}  // namespace

WEFT_EXPORT void weft_silu_mul_f32(const float* gate_up, float* out, long rows, long size, int threads) {
    silu_mul(gate_up, out, rows, size, threads);
}

WEFT_EXPORT void weft_silu_mul_bf16(const uint16_t* gate_up, uint16_t* out, long rows, long size, int threads) {
    silu_mul(gate_up, out, rows, size, threads);
}
