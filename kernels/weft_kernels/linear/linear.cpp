// x @ weight^T with panel-packed weights, summed in float; input and output are both float or both bfloat16.

#include "linear.h"
#include "results.h"
#include "slices.h"

#include <algorithm>
#include <vector>

using namespace weft;

namespace {

// Tiles of rows whose activations of one slice fit the second-level cache.
constexpr long TILES_AT_ONCE = 20;
// Bytes of activations that stay in that cache while weights stream through it.
constexpr long CACHED_BYTES = 256 * 1024;
// Bytes of weights that a thread takes at once; small enough that a preempted thread delays the others little.
constexpr long TAKE_BYTES = 128 * 1024, LEAST_TAKE = 4, MOST_TAKE = 16;
constexpr long SERIAL_PRODUCTS = 1 << 17;

// The Number type of activations of a type.
template <typename Item>
struct NumberOf;
template <>
struct NumberOf<float> {
    using Type = float;
};
template <>
struct NumberOf<uint16_t> {
#ifdef WEFT_PAIRS
    using Type = Pair;
#else
    using Type = float;
#endif
};

// Panels [first, end) of outputs for rows [first_row, end_row).
struct Part {
    long first, end, first_row, end_row;
    long column() const { return first * PANEL; }
    long num_columns(long num_outputs) const { return std::min((end - first) * PANEL, num_outputs - column()); }
};

// Destination of a part's sums; float results are summed in place.
Sums sums_of(const Tiling& shape, const Part& part, float* out) {
    return {out + part.column(), 0, shape.num_outputs, shape.num_outputs - part.column()};
}

void give_results(const Tiling& shape, const Sums&, const Part& part, const float* bias, float* out) {
    if (!bias) return;
    long count = part.num_columns(shape.num_outputs);
    for (long r = part.first_row; r < part.end_row; r++)
        for (long c = part.column(); c < part.column() + count; c++) out[r * shape.num_outputs + c] += bias[c];
}

#ifndef __AMX_BF16__
// bfloat16 results are summed in a float copy with room for whole panels, and rounded once.
Sums sums_of(const Tiling&, const Part& part, uint16_t*) {
    static thread_local std::vector<float> scratch;
    long stride = (part.end - part.first) * PANEL;
    size_t size = (part.end_row - part.first_row) * stride;
    if (scratch.size() < size) scratch.resize(size);
    return {scratch.data(), part.first_row, stride, stride};
}

void give_results(const Tiling& shape, const Sums& sums, const Part& part, const uint16_t* bias, uint16_t* out) {
    long column = part.column(), rows = part.end_row - part.first_row;
    const float* from = sums.data + (part.first_row - sums.first_row) * sums.stride;
    uint16_t* to = out + part.first_row * shape.num_outputs + column;
    give_rounded(from, sums.stride, rows, part.num_columns(shape.num_outputs), bias ? bias + column : nullptr, to,
                 shape.num_outputs);
}
#endif

// If the activations exceed the cache, all panels process one slice before the next.
template <typename Item, typename Weight, typename Number>
void panels_times_rows(const Tiling& shape, const Number* x, const Weight* packed, long first_panel, long end_panel,
                       const Item* bias, Item* out) {
    long num_tiles = shape.num_tiles(), num_blocks = (num_tiles + TILES_AT_ONCE - 1) / TILES_AT_ONCE;
    long all = shape.num_numbers<Number>();
    long many = std::is_same<Weight, Packed12>::value ? 1 : panels_at_once(shape.first_row(1));
    bool is_cached = shape.num_rows * all * long(sizeof(Number)) <= CACHED_BYTES;
    for (long b = 0; b < num_blocks; b++) {
        long tile = b * num_tiles / num_blocks, end_tile = (b + 1) * num_tiles / num_blocks;
        long first_row = shape.first_row(tile), end_row = shape.first_row(end_tile);
        for (long group = first_panel, end; group < end_panel; group = end) {
            end = is_cached ? std::min(group + many, end_panel) : end_panel;
            Part part{group, end, first_row, end_row};
            Sums sums = sums_of(shape, part, out);
            for (long k = 0; k < all; k += SLICE<Number>)
                for (long p = group, count; p < end; p += count) {
                    long before = (p - group) * PANEL, left = sums.num_columns - before;
                    count = p + many <= end && left >= many * PANEL ? many : 1;
                    Sums some{sums.data + before, sums.first_row, sums.stride, left};
                    Stretch later = is_cached ? stretch_of<Number>(shape, packed, p, k + SLICE<Number>)
                                              : stretch_of<Number>(shape, packed, p + count, k);
                    slice_times_tiles_at(shape, x, packed, p, count, k, tile, end_tile, some, later);
                }
            give_results(shape, sums, part, bias, out);
        }
    }
}

template <typename Item, typename Weight>
void linear(const Shape& shape, const Item* x, const Weight* packed, const Item* bias, Item* out, int num_threads) {
    static thread_local std::vector<float> scratch;
    if (scratch.size() < shape.scratch_floats()) scratch.resize(shape.scratch_floats());
    float* shared = scratch.data();
    if (shape.num_rows * shape.num_inputs * shape.num_outputs < SERIAL_PRODUCTS) num_threads = 1;
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
    multiply(shape, x, packed, bias, out, shared);
}

}  // namespace

namespace weft {

template <typename Item, typename Weight>
WEFT_INLINE void multiply_any(const Shape& plain, const Item* x, const Weight* packed, const Item* bias, Item* out,
                              float* scratch) {
    using Number = typename NumberOf<Item>::Type;
    Tiling shape(plain);
    // one row of whole Numbers needs no packing
    bool is_packed = shape.num_rows == 1 && shape.num_inputs % inputs_of<Number> == 0 &&
                     sizeof(Number) == inputs_of<Number> * sizeof(Item);
    Number* rows = is_packed ? (Number*)x : (Number*)scratch;
    long panel_bytes = shape.num_inputs * PANEL * (std::is_same<Weight, Packed12>::value ? 12 : 8 * long(sizeof(Weight))) / 8;
    long take = std::clamp(TAKE_BYTES / panel_bytes, LEAST_TAKE, MOST_TAKE);
    if (!is_packed && shape.num_rows == 1) {
        // faster than waiting for another thread
        static thread_local std::vector<Number> own;
        if (own.size() < size_t(shape.num_numbers<Number>())) own.resize(shape.num_numbers<Number>());
        pack_rows(shape, x, 0, rows = own.data());
    } else if (!is_packed) {
#pragma omp for schedule(static)
        for (long t = 0; t < shape.num_tiles(); t++) pack_rows(shape, x, t, rows);
    }
#pragma omp for schedule(dynamic) nowait
    for (long p = 0; p < shape.num_panels(); p += take)
        panels_times_rows(shape, rows, packed, p, std::min(p + take, shape.num_panels()), bias, out);
}

template <typename Item, typename Weight>
void multiply(const Shape& shape, const Item* x, const Weight* packed, const Item* bias, Item* out, float* scratch) {
    multiply_any(shape, x, packed, bias, out, scratch);
}

template <typename Item>
void multiply(const Shape& shape, const Item* x, const Packed12* packed, const Item* bias, Item* out, float* scratch) {
    multiply_any(shape, x, packed, bias, out, scratch);
}

template void multiply(const Shape&, const float*, const Packed12*, const float*, float*, float*);
template void multiply(const Shape&, const float*, const uint16_t*, const float*, float*, float*);
template void multiply(const Shape&, const float*, const float*, const float*, float*, float*);
#ifndef __AMX_BF16__
template void multiply(const Shape&, const uint16_t*, const uint16_t*, const uint16_t*, uint16_t*, float*);
template void multiply(const Shape&, const uint16_t*, const Packed12*, const uint16_t*, uint16_t*, float*);
#endif

}  // namespace weft

// x: [rows, inputs], bias: [outputs], or null, out: [rows, outputs], floats.
WEFT_EXPORT void weft_linear_f32_bf16(const float* x, long rows, long inputs, long outputs, const uint16_t* packed,
                                  const float* bias, float* out, int threads) {
    linear(Shape{rows, inputs, outputs}, x, packed, bias, out, threads);
}

WEFT_EXPORT void weft_linear_f32_f32(const float* x, long rows, long inputs, long outputs, const float* packed,
                                 const float* bias, float* out, int threads) {
    linear(Shape{rows, inputs, outputs}, x, packed, bias, out, threads);
}

WEFT_EXPORT void weft_linear_f32_packed12(const float* x, long rows, long inputs, long outputs, const Packed12* packed,
                                         const float* bias, float* out, int threads) {
    linear(Shape{rows, inputs, outputs}, x, packed, bias, out, threads);
}

#ifndef __AMX_BF16__
WEFT_EXPORT void weft_linear_bf16_packed12(const uint16_t* x, long rows, long inputs, long outputs, const Packed12* packed,
                                           const uint16_t* bias, uint16_t* out, int threads) {
    linear(Shape{rows, inputs, outputs}, x, packed, bias, out, threads);
}
#endif

// The same, bfloat16 throughout.
WEFT_EXPORT void weft_linear_bf16_bf16(const uint16_t* x, long rows, long inputs, long outputs, const uint16_t* packed,
                                    const uint16_t* bias, uint16_t* out, int threads) {
    linear(Shape{rows, inputs, outputs}, x, packed, bias, out, threads);
}
