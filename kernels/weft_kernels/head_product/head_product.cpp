// Each head of some rows times a matrix of that head. A line of a matrix holds all outputs of one input.
//
// Every sum runs over the inputs in order, so the result of a row is independent of the other rows.

#include "../native/vector.h"

#include <algorithm>
#include <cmath>
#include <vector>

using namespace weft;

namespace {

// Rows at a time: with two vectors of outputs their sums fill the registers.
constexpr int MAX_ROWS = REGISTERS == 32 ? 12 : 6;
constexpr long SERIAL_PRODUCTS = 1 << 17;

// Few rows need more vectors of outputs, to hide the latency of a product.
constexpr int vectors_at_once(int rows) { return rows <= 2 ? 4 : 2; }

// Rows of one head, widened and packed by rows: x is [inputs, Rows].
template <typename Item, int Rows, int Vectors>
WEFT_INLINE void tile(const float* x, const Item* weight, long inputs, long outputs, Item* out, long out_stride) {
    Floats sums[Rows][Vectors] = {};
    for (long k = 0; k < inputs; k++, weight += outputs) {
        Floats line[Vectors];
#pragma GCC unroll 4
        for (int v = 0; v < Vectors; v++) line[v] = load_wide(weight + v * W);
#pragma GCC unroll 12
        for (int r = 0; r < Rows; r++) {
            Floats value = splat(x[k * Rows + r]);
#pragma GCC unroll 4
            for (int v = 0; v < Vectors; v++) sums[r][v] += value * line[v];
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < Rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < Vectors; v++) store_narrow(out + r * out_stride + v * W, sums[r][v]);
}

// The outputs behind the last whole vector.
template <typename Item>
void last_outputs(const float* x, int rows, const Item* weight, long inputs, long outputs, long first, Item* out,
                  long out_stride) {
    for (int r = 0; r < rows; r++)
        for (long c = first; c < outputs; c++) {
            float sum = 0;
            for (long k = 0; k < inputs; k++) sum = std::fma(x[k * rows + r], widen(weight[k * outputs + c]), sum);
            Item narrow[W];
            store_narrow(narrow, splat(sum));
            out[r * out_stride + c] = narrow[0];
        }
}

template <typename Item, int Rows>
void tiles(const float* x, const Item* weight, long inputs, long outputs, Item* out, long out_stride) {
    constexpr int MANY = vectors_at_once(Rows);
    long c = 0;
    for (; c + MANY * W <= outputs; c += MANY * W)
        tile<Item, Rows, MANY>(x, weight + c, inputs, outputs, out + c, out_stride);
    for (; c + W <= outputs; c += W) tile<Item, Rows, 1>(x, weight + c, inputs, outputs, out + c, out_stride);
    last_outputs(x, Rows, weight, inputs, outputs, c, out, out_stride);
}

template <typename Item>
using Tiles = void (*)(const float*, const Item*, long, long, Item*, long);

template <typename Item>
Tiles<Item> tiles_of(long rows) {
    static constexpr Tiles<Item> all[] = {
        tiles<Item, 1>,  tiles<Item, 2>,  tiles<Item, 3>, tiles<Item, 4>, tiles<Item, 5>, tiles<Item, 6>,
#if WEFT_WIDTH == 16
        tiles<Item, 7>,  tiles<Item, 8>,  tiles<Item, 9>, tiles<Item, 10>, tiles<Item, 11>, tiles<Item, 12>,
#endif
    };
    return all[rows - 1];
}

struct Sizes {
    long rows, heads, inputs, outputs, row_stride, head_stride;  // strides of x
};

template <typename Item>
void head_product(const Item* x, const Item* weight, Item* out, const Sizes& s, int threads) {
    long num_tiles = (s.rows + MAX_ROWS - 1) / MAX_ROWS;
    bool is_serial = s.rows * s.heads * s.inputs * s.outputs < SERIAL_PRODUCTS;
#pragma omp parallel num_threads(threads) if (threads > 1 && !is_serial)
    {
        static thread_local std::vector<float> packed;
        if (packed.size() < size_t(s.inputs * MAX_ROWS)) packed.resize(s.inputs * MAX_ROWS);
        // the tiles of one head run one after the other, because its matrix may still be cached
#pragma omp for schedule(static)
        for (long i = 0; i < s.heads * num_tiles; i++) {
            long head = i / num_tiles, t = i % num_tiles;
            long first = t * s.rows / num_tiles, rows = (t + 1) * s.rows / num_tiles - first;
            for (long r = 0; r < rows; r++) {
                const Item* from = x + (first + r) * s.row_stride + head * s.head_stride;
                for (long k = 0; k < s.inputs; k++) packed[k * rows + r] = widen(from[k]);
            }
            tiles_of<Item>(rows)(packed.data(), weight + head * s.inputs * s.outputs, s.inputs, s.outputs,
                                 out + (first * s.heads + head) * s.outputs, s.heads * s.outputs);
        }
    }
}

}  // namespace

// x: [rows, heads, inputs], weight: [heads, inputs, outputs], out: [rows, heads, outputs].
WEFT_EXPORT void weft_head_product_f32(const float* x, const float* weight, float* out, long rows, long heads,
                                       long inputs, long outputs, long row_stride, long head_stride, int threads) {
    head_product(x, weight, out, Sizes{rows, heads, inputs, outputs, row_stride, head_stride}, threads);
}

WEFT_EXPORT void weft_head_product_bf16(const uint16_t* x, const uint16_t* weight, uint16_t* out, long rows, long heads,
                                        long inputs, long outputs, long row_stride, long head_stride, int threads) {
    head_product(x, weight, out, Sizes{rows, heads, inputs, outputs, row_stride, head_stride}, threads);
}
