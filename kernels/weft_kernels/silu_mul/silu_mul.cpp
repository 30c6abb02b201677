// The gate of a SwiGLU layer for float rows; half their length is a multiple of the vector's.

#include "../native/vector.h"

using namespace weft;

WEFT_EXPORT void weft_silu_mul(const float* gate_up, float* out, long rows, long size, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * size > SERIAL_ITEMS)
    for (long r = 0; r < rows; r++) {
        const float *gate = gate_up + 2 * r * size, *up = gate + size;
        for (long i = 0; i < size; i += W) {
            Floats x = load<Floats>(gate + i);
            // e^-|x| never overflows
            Floats small = exponential(x > 0.0f ? -x : x);
            Floats sigmoid = (x > 0.0f ? splat(1.0f) : small) / (small + 1.0f);
            store(out + r * size + i, x * sigmoid * load<Floats>(up + i));
        }
    }
}
