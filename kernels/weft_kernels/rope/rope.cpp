// Rotary embedding of float heads, in the rotate-half convention; half a head is a multiple of the vector's length.

#include "../native/vector.h"

using namespace weft;

// x: rows of `heads` heads, `stride` apart; cos, sin: [rows, dim].
WEFT_EXPORT void weft_rope(const float* x, const float* cos, const float* sin, float* out, long rows, long heads,
                           long dim, long stride, int threads) {
    long half = dim / 2;
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * heads * dim > SERIAL_ITEMS)
    for (long r = 0; r < rows; r++)
        for (long h = 0; h < heads; h++) {
            const float* from = x + r * stride + h * dim;
            float* to = out + (r * heads + h) * dim;
            for (long i = 0; i < half; i += W) {
                Floats low = load<Floats>(from + i), high = load<Floats>(from + half + i);
                const float *c = cos + r * dim + i, *s = sin + r * dim + i;
                store(to + i, low * load<Floats>(c) - high * load<Floats>(s));
                store(to + half + i, high * load<Floats>(c + half) + low * load<Floats>(s + half));
            }
        }
}
