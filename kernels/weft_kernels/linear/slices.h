// Products of panel slices with tiles of rows, for every form of weights.
#pragma once

#include "linear.h"
#include "tiles.h"
#include "packed12_tiles.h"

#include <algorithm>

namespace weft {

// From this number of tiles on, bfloat16 weights are widened once instead of by each tile: 5% faster.
constexpr long WIDENED_TILES = 4;
// From this number of tiles on, 12-bit weights are unpacked once instead of by each tile. Below it, unpacking once loses 2
// to 20%, because nothing is multiplied meanwhile.
template <typename Number>
constexpr long UNPACKED_TILES = inputs_of<Number> == 2 ? 12 : 8;

// Splits rows into tiles as evenly as possible: 13 rows are 7 and 6.
struct Tiling : Shape {
    explicit Tiling(const Shape& shape) : Shape(shape) {}
    long num_tiles() const { return (num_rows + MAX_ROWS - 1) / MAX_ROWS; }
    long first_row(long t) const { return t * num_rows / num_tiles(); }
    long num_panels() const { return (num_outputs + PANEL - 1) / PANEL; }
    template <typename Number>
    long num_numbers() const {
        return (num_inputs + inputs_of<Number> - 1) / inputs_of<Number>;
    }
};

// Destination of sums, from one row of the batch and the first column of some panels on.
struct Sums {
    float* data;
    long first_row, stride, num_columns;
};

// A vector of numbers of one row, from number k on; zeros behind its end.
template <typename Number, typename Item>
WEFT_INLINE Words take_words(const Item* row, long k, long num_inputs) {
    constexpr long ITEMS = W * inputs_of<Number>;
    const Item* from = row + k * inputs_of<Number>;
    auto words = [](const Item* at) { return inputs_of<Number> == 1 ? (Words)load_wide(at) : load<Words>(at); };
    long left = num_inputs - k * inputs_of<Number>;
    if (left >= ITEMS) return words(from);
    Item last[ITEMS] = {};
    std::memcpy(last, from, left * sizeof(Item));
    return words(last);
}

// Tile t of x, each slice of its numbers as [numbers, rows]; one slice of all tiles is one run.
template <typename Number, typename Item>
void pack_rows(const Tiling& shape, const Item* x, long t, Number* packed) {
    long first = shape.first_row(t), rows = shape.first_row(t + 1) - first, all = shape.num_numbers<Number>();
    for (long slice = 0; slice < all; slice += SLICE<Number>) {
        long count = std::min(SLICE<Number>, all - slice);
        Number* to = packed + slice * shape.num_rows + first * count;
        for (long k = 0; k < count; k += W) {
            if (rows == 1) {
                store_some(to + k, take_words<Number>(x + first * shape.num_inputs, slice + k, shape.num_inputs),
                           std::min<long>(W, count - k));
                continue;
            }
            Words lines[W];
            for (long r = 0; r < W; r++)
                lines[r] = r < rows ? take_words<Number>(x + (first + r) * shape.num_inputs, slice + k, shape.num_inputs)
                                    : Words{};
            transpose(lines);
            for (long i = 0; i < std::min<long>(W, count - k); i++) store_some(to + (k + i) * rows, lines[i], rows);
        }
    }
}

// Address and size of a slice. A product with a copy of one slice prefetches the next one, a part with every tile.
struct Stretch {
    const char* from;
    long size;

    WEFT_INLINE void ask_for_part(long part, long num_parts) const {
        const char* end = from + (part + 1) * size / num_parts;
        for (const char* at = from + part * size / num_parts; at < end; at += 64) __builtin_prefetch(at, 0, 2);
    }
};

// From number k of panel p on.
template <typename Number, typename Weight>
Stretch stretch_of(const Tiling& shape, const Weight* packed, long p, long k) {
    constexpr long LINE_BYTES = std::is_same<Weight, Packed12>::value ? PANEL * UNIT_BYTES / UNIT : PANEL * long(sizeof(Weight));
    constexpr bool IS_PAIRED = std::is_same<Weight, Packed12>::value || sizeof(Weight) == 2;
    long lines = IS_PAIRED ? num_lines<uint16_t>(shape.num_inputs) : shape.num_inputs;
    const char* start;
    if constexpr (std::is_same<Weight, Packed12>::value)
        start = (const char*)packed->units;
    else
        start = (const char*)packed;
    long line = k * inputs_of<Number>;
    return {start + (p * lines + line) * LINE_BYTES, std::min(SLICE_INPUTS, lines - line) * LINE_BYTES};
}

// One slice of `count` panels from `panel` on, times the rows of tiles [first_tile, end_tile).
template <typename Weight, typename Number>
void slice_times_tiles(const Tiling& shape, const Number* x, const Weight* panel, int count, long k, long first_tile,
                       long end_tile, const Sums& sums, const Stretch& later = {nullptr, 0}) {
    long panel_stride = num_lines<Weight>(shape.num_inputs) * PANEL;
    Span span{std::min(SLICE<Number>, shape.num_numbers<Number>() - k), panel_stride, sums.stride, k == 0};
    for (long t = first_tile; t < end_tile; t++) {
        long first = shape.first_row(t), rows = shape.first_row(t + 1) - first;
        const Number* from = x + k * shape.num_rows + first * span.count;
        float* to = sums.data + (first - sums.first_row) * sums.stride;
        later.ask_for_part(t - first_tile, end_tile - first_tile);
        if (sums.num_columns >= count * PANEL) {
            tiles_of<Weight, Number>(rows)(from, panel, to, span, count);
            continue;
        }
        float edge[MAX_ROWS * PANEL];  // the last panel is wider than what is left of the output; count is 1
        tiles_of<Weight, Number>(rows)(from, panel, edge, Span{span.count, 0, PANEL, true}, 1);
        for (long r = 0; r < rows; r++)
            for (long c = 0; c < sums.num_columns; c++) {
                float* cell = to + r * sums.stride + c;
                *cell = (k == 0 ? 0.0f : *cell) + edge[r * PANEL + c];
            }
    }
}

// The same, but widens bfloat16 weights once if many tiles use them.
template <typename Weight, typename Number>
void panels_times_tiles(const Tiling& shape, const Number* x, const Weight* panel, int count, long k, long first_tile,
                        long end_tile, const Sums& sums, const Stretch& later) {
    if constexpr (sizeof(Weight) < sizeof(Number) && inputs_of<Number> == 1) {
        if (count == 1 && end_tile - first_tile >= WIDENED_TILES) {
            alignas(64) float wide[SLICE<Number> * PANEL];
            for (long i = 0, size = std::min(SLICE<Number>, shape.num_inputs - k); i < size; i++) {
                Lines<Weight, Number> lines(panel + i * PANEL);
                store(wide + i * PANEL, lines.low);
                store(wide + i * PANEL + W, lines.high);
            }
            return slice_times_tiles(shape, x, (const float*)wide, count, k, first_tile, end_tile, sums, later);
        }
    }
    slice_times_tiles(shape, x, panel, count, k, first_tile, end_tile, sums);
}

// From slice k of panel p on.
template <typename Weight, typename Number>
void slice_times_tiles_at(const Tiling& shape, const Number* x, const Weight* packed, long p, int count, long k,
                          long first_tile, long end_tile, const Sums& sums, const Stretch& later) {
    const Weight* panel = (const Weight*)stretch_of<Number>(shape, packed, p, k).from;
    panels_times_tiles(shape, x, panel, count, k, first_tile, end_tile, sums, later);
}

// 12-bit weights are unpacked while they are multiplied, by each tile or by the first one; for many tiles once before.
template <typename Number>
void slice_times_tiles_at(const Tiling& shape, const Number* x, const Packed12* packed, long p, int, long k,
                          long first_tile, long end_tile, const Sums& sums, const Stretch& later) {
    long items = num_lines<uint16_t>(shape.num_inputs) * PANEL;
    Units units(*packed, p, items / UNIT, k * inputs_of<Number> * PANEL / UNIT);
    if (sums.num_columns < PANEL || end_tile - first_tile >= UNPACKED_TILES<Number>) {
        alignas(64) uint16_t lines[SLICE_ITEMS];
        unpack(units, lines);
        if constexpr (inputs_of<Number> == 2)
            return slice_times_tiles(shape, x, (const uint16_t*)lines, 1, k, first_tile, end_tile, sums, later);
        else
            return panels_times_tiles(shape, x, (const uint16_t*)lines, 1, k, first_tile, end_tile, sums, later);
    }
    alignas(64) uint16_t lines[SLICE_ITEMS];
    Span span{std::min(SLICE<Number>, shape.num_numbers<Number>() - k), 0, sums.stride, k == 0};
    for (long t = first_tile; t < end_tile; t++) {
        long first = shape.first_row(t), rows = shape.first_row(t + 1) - first;
        const Number* from = x + k * shape.num_rows + first * span.count;
        float* to = sums.data + (first - sums.first_row) * sums.stride;
        if (end_tile - first_tile == 1 || REGISTERS == 32) {
            packed12_tiles_of<Number, InRegisters>(rows)(from, units, to, span, lines);
        } else if (t == first_tile) {
            packed12_tiles_of<Number, InMemory>(rows)(from, units, to, span, lines);
        } else {
            later.ask_for_part(t - first_tile - 1, end_tile - first_tile - 1);
            tiles_of<uint16_t, Number>(rows)(from, lines, to, span, 1);
        }
    }
}

}  // namespace weft
