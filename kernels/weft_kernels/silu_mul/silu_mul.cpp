// The gate of a SwiGLU layer for rows of floats or bfloat16; half their length is a multiple of the vector's.

#include "silu_mul.h"

#include <algorithm>

using namespace weft;

namespace {

// Items that a thread takes at once; a single row is split too.
constexpr long PIECE = 512;

template <typename Item>
void silu_mul_all(const Item* gate_up, Item* out, long rows, long size, int threads) {
#pragma omp parallel num_threads(threads) if (threads > 1 && rows * size > SERIAL_ITEMS)
    silu_mul(gate_up, out, rows, size);
}

}  // namespace

namespace weft {

template <typename Item>
void silu_mul(const Item* gate_up, Item* out, long rows, long size) {
    long pieces = (size + PIECE - 1) / PIECE;
#pragma omp for schedule(static) nowait
    for (long p = 0; p < rows * pieces; p++) {
        long r = p / pieces, first = p % pieces * PIECE, end = std::min(first + PIECE, size);
        const Item *gate = gate_up + 2 * r * size, *up = gate + size;
        for (long i = first; i < end; i += W) {
            Floats x = load_wide(gate + i);
            // e^-|x| never overflows
            Floats small = exponential(x > 0.0f ? -x : x);
            Floats sigmoid = (x > 0.0f ? splat(1.0f) : small) / (small + 1.0f);
            store_narrow(out + r * size + i, rounded<Item>(x * sigmoid) * load_wide(up + i));
        }
    }
}

template void silu_mul(const float*, float*, long, long);
template void silu_mul(const uint16_t*, uint16_t*, long, long);

}  // namespace weft

WEFT_EXPORT void weft_silu_mul_f32(const float* gate_up, float* out, long rows, long size, int threads) {
    silu_mul_all(gate_up, out, rows, size, threads);
}

WEFT_EXPORT void weft_silu_mul_bf16(const uint16_t* gate_up, uint16_t* out, long rows, long size, int threads) {
    silu_mul_all(gate_up, out, rows, size, threads);
}
