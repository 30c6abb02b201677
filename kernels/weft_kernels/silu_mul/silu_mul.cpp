// Gates of gated MLPs for rows of floats or bfloat16; half their length is a multiple of the vector's.

#include "silu_mul.h"

#include <algorithm>

using namespace weft;

namespace {

// Items that a thread takes at once; a single row is split too.
constexpr long PIECE = 512;

// x * sigmoid(slope); e^-|slope| never overflows.
WEFT_INLINE Floats gated(Floats x, Floats slope) {
    Floats small = exponential(slope > 0.0f ? -slope : slope);
    return x * ((slope > 0.0f ? splat(1.0f) : small) / (small + 1.0f));
}

struct Silu {
    static WEFT_INLINE Floats of(Floats x) { return gated(x, x); }
};

// (1 + tanh(y)) / 2 is sigmoid(2 y), with y = sqrt(2 / pi) (x + 0.044715 x^3).
struct Gelu {
    static WEFT_INLINE Floats of(Floats x) { return gated(x, (x + x * x * x * 0.044715f) * 1.5957691216f); }
};

template <typename Gate, typename Item>
void gate_mul(const Item* gate_up, Item* out, long rows, long size) {
    long pieces = (size + PIECE - 1) / PIECE;
#pragma omp for schedule(static) nowait
    for (long p = 0; p < rows * pieces; p++) {
        long r = p / pieces, first = p % pieces * PIECE, end = std::min(first + PIECE, size);
        const Item *gate = gate_up + 2 * r * size, *up = gate + size;
        for (long i = first; i < end; i += W)
            store_narrow(out + r * size + i, rounded<Item>(Gate::of(load_wide(gate + i))) * load_wide(up + i));
    }
}

template <typename Gate, typename Item>
void gate_mul_all(const Item* gate_up, Item* out, long rows, long size, int threads) {
#pragma omp parallel num_threads(threads) if (threads > 1 && rows * size > SERIAL_ITEMS)
    gate_mul<Gate>(gate_up, out, rows, size);
}

}  // namespace

namespace weft {

template <typename Item>
void silu_mul(const Item* gate_up, Item* out, long rows, long size) {
    gate_mul<Silu>(gate_up, out, rows, size);
}

template <typename Item>
void gelu_mul(const Item* gate_up, Item* out, long rows, long size) {
    gate_mul<Gelu>(gate_up, out, rows, size);
}

template void silu_mul(const float*, float*, long, long);
template void silu_mul(const uint16_t*, uint16_t*, long, long);
template void gelu_mul(const float*, float*, long, long);
template void gelu_mul(const uint16_t*, uint16_t*, long, long);

}  // namespace weft

WEFT_EXPORT void weft_silu_mul_f32(const float* gate_up, float* out, long rows, long size, int threads) {
    gate_mul_all<Silu>(gate_up, out, rows, size, threads);
}

WEFT_EXPORT void weft_silu_mul_bf16(const uint16_t* gate_up, uint16_t* out, long rows, long size, int threads) {
    gate_mul_all<Silu>(gate_up, out, rows, size, threads);
}

WEFT_EXPORT void weft_gelu_mul_f32(const float* gate_up, float* out, long rows, long size, int threads) {
    gate_mul_all<Gelu>(gate_up, out, rows, size, threads);
}

WEFT_EXPORT void weft_gelu_mul_bf16(const uint16_t* gate_up, uint16_t* out, long rows, long size, int threads) {
    gate_mul_all<Gelu>(gate_up, out, rows, size, threads);
}
