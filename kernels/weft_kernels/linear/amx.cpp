// x @ weight^T of bfloat16 with AMX, the matrix unit of Intel's server processors (TDPBF16PS in Intel's manual).
//
// A step takes 32 inputs: a tile of up to 16 rows of x times two tiles of 32 inputs by 16 outputs, which are a panel's.
// Within a step even inputs are summed apart from odd ones, and steps run in order: the result of a row is independent of
// the other rows, but differs from the result without AMX. Denormals count as zero.

#include "../native/amx.h"
#include "linear.h"
#include "results.h"

#ifdef __AMX_BF16__

#include <vector>

using namespace weft;

namespace {

constexpr long STEP = 32, TILE_ROWS = 16, HALF = STEP * 16;
// Steps per pass with many rows; their weights fit the first-level cache.
constexpr long STEPS_AT_ONCE = 8;
// Tiles of rows whose activations of these steps fit the second-level cache.
constexpr long TILES_AT_ONCE = 24;
// Prefetch distance of weights with few rows, which are memory-bound.
constexpr long STEPS_AHEAD = 2;
// Up to this number of rows every thread packs for itself, which is faster than a barrier.
constexpr long OWN_ROWS = 4;
constexpr long TAKE_BYTES = 128 * 1024, LEAST_TAKE = 4, MOST_TAKE = 16;

// All tiles have the same number of rows; padding rows are zero.
struct Tiling : Shape {
    long num_tiles, tile_rows, num_steps;
    explicit Tiling(const Shape& shape) : Shape(shape) {
        num_tiles = (num_rows + TILE_ROWS - 1) / TILE_ROWS;
        tile_rows = (num_rows + num_tiles - 1) / num_tiles;
        num_steps = (num_inputs + STEP - 1) / STEP;
    }
    long num_panels() const { return (num_outputs + PANEL - 1) / PANEL; }
    long tile_items() const { return num_steps * tile_rows * STEP; }
    long panel_items() const { return num_steps * 2 * HALF; }
};

// Tile t of x: for each step its rows, 32 inputs each.
void lay_out(const Tiling& shape, const uint16_t* x, long t, uint16_t* tile) {
    for (long step = 0; step < shape.num_steps; step++)
        for (long r = 0; r < shape.tile_rows; r++, tile += STEP) {
            long row = t * shape.tile_rows + r, first = step * STEP;
            long count = row < shape.num_rows ? std::min(STEP, shape.num_inputs - first) : 0;
            if (count < STEP) std::memset(tile, 0, STEP * sizeof *tile);
            if (count) std::memcpy(tile, x + row * shape.num_inputs + first, count * sizeof *tile);
        }
}

// Operands of some steps; two tiles or two panels are `further` items apart.
struct Steps {
    const uint16_t *x, *panel;
    long count, tile_rows, further, stride;  // floats from row to row of the sums
    bool is_first;
};

// One or two tiles of x times one panel. `below`: sums of the second tile, or null.
void tiles_times_panel(const Steps& s, float* sums, float* below) {
    asm volatile("" ::: "memory");  // the compiler does not see what the instructions read
    long bytes = s.stride * sizeof(float);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    if (!s.is_first) {
        _tile_loadd(0, sums, bytes);
        _tile_loadd(1, sums + 16, bytes);
        if (below) {
            _tile_loadd(2, below, bytes);
            _tile_loadd(3, below + 16, bytes);
        }
    }
    const uint16_t *x = s.x, *panel = s.panel;
    for (long k = 0; k < s.count; k++, panel += 2 * HALF, x += s.tile_rows * STEP) {
        _tile_loadd(6, panel, 64);
        _tile_loadd(4, x, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, panel + HALF, 64);
        _tile_dpbf16ps(1, 4, 7);
        if (!below) continue;
        _tile_loadd(5, x + s.further, 64);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums, bytes);
    _tile_stored(1, sums + 16, bytes);
    if (below) {
        _tile_stored(2, below, bytes);
        _tile_stored(3, below + 16, bytes);
    }
    asm volatile("" ::: "memory");
}

void ask_for(const uint16_t* weights) {
    for (long i = 0; i < 2 * HALF; i += 32) __builtin_prefetch(weights + i, 0, 3);
}

// All steps of one tile of x times two panels with adjacent sums: memory is read in two streams.
void tile_times_panels(const Steps& s, float* sums) {
    asm volatile("" ::: "memory");
    long bytes = s.stride * sizeof(float);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    const uint16_t *x = s.x, *panel = s.panel;
    for (long k = 0; k < s.count; k++, panel += 2 * HALF, x += s.tile_rows * STEP) {
        ask_for(panel + STEPS_AHEAD * 2 * HALF);
        ask_for(panel + s.further + STEPS_AHEAD * 2 * HALF);
        _tile_loadd(4, x, 64);
        _tile_loadd(6, panel, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, panel + s.further, 64);
        _tile_dpbf16ps(2, 4, 7);
        _tile_loadd(6, panel + HALF, 64);
        _tile_dpbf16ps(1, 4, 6);
        _tile_loadd(7, panel + s.further + HALF, 64);
        _tile_dpbf16ps(3, 4, 7);
    }
    _tile_stored(0, sums, bytes);
    _tile_stored(1, sums + 16, bytes);
    _tile_stored(2, sums + 32, bytes);
    _tile_stored(3, sums + 48, bytes);
    asm volatile("" ::: "memory");
}

// Steps [step, step + count) of a panel times tiles [tile, end).
void panel_times_tiles(const Tiling& shape, const uint16_t* x, const uint16_t* panel, long step, long count, long tile,
                       long end, float* sums, long stride) {
    long below = shape.tile_rows * stride;
    Steps steps{x + tile * shape.tile_items() + step * shape.tile_rows * STEP, panel + step * 2 * HALF, count,
                shape.tile_rows, shape.tile_items(), stride, step == 0};
    for (long t = tile; t < end; t += 2, sums += 2 * below, steps.x += 2 * shape.tile_items())
        tiles_times_panel(steps, sums, t + 1 < end ? sums + below : nullptr);
}

// Panels [first, end) for all rows.
void panels_times_rows(const Tiling& shape, const uint16_t* x, const uint16_t* packed, long first, long end,
                       const uint16_t* bias, uint16_t* out) {
    static thread_local std::vector<float> scratch;
    long stride = (end - first) * PANEL, columns = std::min(stride, shape.num_outputs - first * PANEL);
    long steps_at_once = shape.num_tiles <= 2 ? shape.num_steps : STEPS_AT_ONCE;
    size_t size = std::min(shape.num_tiles, TILES_AT_ONCE) * shape.tile_rows * stride + 16;
    if (scratch.size() < size) scratch.resize(size);
    float* sums = (float*)at_line(scratch.data());
    for (long tile = 0; tile < shape.num_tiles; tile += TILES_AT_ONCE) {
        long end_tile = std::min(tile + TILES_AT_ONCE, shape.num_tiles);
        for (long step = 0; step < shape.num_steps; step += steps_at_once)
            for (long p = first, many; p < end; p += many) {
                long count = std::min(steps_at_once, shape.num_steps - step);
                const uint16_t* panel = packed + p * shape.panel_items();
                float* to = sums + (p - first) * PANEL;
                many = shape.num_tiles == 1 && p + 1 < end ? 2 : 1;
                if (many == 2)
                    tile_times_panels(Steps{x, panel, count, shape.tile_rows, shape.panel_items(), stride, true}, to);
                else
                    panel_times_tiles(shape, x, panel, step, count, tile, end_tile, to, stride);
            }
        long row = tile * shape.tile_rows, rows = std::min(end_tile * shape.tile_rows, shape.num_rows) - row;
        const uint16_t* added = bias ? bias + first * PANEL : nullptr;
        give_rounded(sums, stride, rows, columns, added, out + row * shape.num_outputs + first * PANEL, shape.num_outputs);
    }
}

}  // namespace

namespace weft {

template <>
void multiply(const Shape& plain, const uint16_t* x, const uint16_t* packed, const uint16_t* bias, uint16_t* out,
              float* scratch) {
    Tiling shape(plain);
    uint16_t* rows = at_line(scratch);
    if (shape.num_rows <= OWN_ROWS) {
        static thread_local std::vector<float> own;
        if (own.size() < size_t(shape.tile_items())) own.resize(shape.tile_items());
        lay_out(shape, x, 0, rows = at_line(own.data()));
    } else {
#pragma omp for schedule(static)
        for (long t = 0; t < shape.num_tiles; t++) lay_out(shape, x, t, rows + t * shape.tile_items());
    }
    long take = std::clamp<long>(TAKE_BYTES / (shape.panel_items() * sizeof *packed), LEAST_TAKE, MOST_TAKE);
    TileRegisters registers(shape.tile_rows);
#pragma omp for schedule(dynamic) nowait
    for (long p = 0; p < shape.num_panels(); p += take)
        panels_times_rows(shape, rows, packed, p, std::min(p + take, shape.num_panels()), bias, out);
}

}  // namespace weft

#endif
