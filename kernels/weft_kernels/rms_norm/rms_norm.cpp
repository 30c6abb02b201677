// Root mean square normalisation of float rows; their length is a multiple of the vector's.

#include "../native/vector.h"

#include <cmath>

using namespace weft;

WEFT_EXPORT void weft_rms_norm(const float* x, const float* weight, float* out, long rows, long size, long stride,
                               float eps, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * size > SERIAL_ITEMS)
    for (long r = 0; r < rows; r++) {
        const float* from = x + r * stride;
        float* to = out + r * size;
        Floats squares[2] = {};
        for (long i = 0; i < size; i += W) {
            Floats value = load<Floats>(from + i);
            squares[i / W % 2] += value * value;
        }
        float factor = 1 / std::sqrt(sum(squares[0] + squares[1]) / float(size) + eps);
        for (long i = 0; i < size; i += W) store(to + i, load<Floats>(weight + i) * (load<Floats>(from + i) * factor));
    }
}
