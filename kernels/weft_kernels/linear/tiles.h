// Micro kernel: a few rows of activations times one slice of a few panels, with all sums in registers.
//
// A Number is the unit of a row that is multiplied at once: a float, or with AVX512-BF16 a pair of neighbouring bfloat16
// inputs, which is multiplied by two lines of a panel.
#pragma once

#include "panels.h"

#include <type_traits>

namespace weft {

constexpr int MAX_ROWS = REGISTERS == 32 ? 12 : 6;
// Inputs per slice; a slice of a panel stays in the first-level cache for all rows.
constexpr long SLICE_INPUTS = 256;
// Prefetch distance of weights and activations, in Numbers of a row.
constexpr long AHEAD = 256;
// One row is memory-bound: prefetching gained 2%, pages of 2 MiB 6%. With more rows, prefetching the next slice of the
// panel and the next tile's activations gained 20 to 40% (Zen 5, one thread, 8 to 2,048 rows).
constexpr long numbers_ahead(int rows) { return rows <= 3 ? 32 : AHEAD; }

template <typename Number>
constexpr int inputs_of = std::is_same<Number, float>::value ? 1 : 2;

template <typename Number>
constexpr long SLICE = SLICE_INPUTS / inputs_of<Number>;

// The weights that one Number is multiplied by.
template <typename Weight, typename Number>
struct Lines;

template <>
struct Lines<uint16_t, float> {
    Floats low, high;
    WEFT_INLINE explicit Lines(const uint16_t* line) {
        Words words = load<Words>(line);
        low = (Floats)(words << 16);
        high = (Floats)(words & 0xFFFF0000u);
    }
};

template <>
struct Lines<float, float> {
    Floats low, high;
    WEFT_INLINE explicit Lines(const float* line) : low(load<Floats>(line)), high(load<Floats>(line + W)) {}
};

#ifdef WEFT_PAIRS
template <>
struct Lines<uint16_t, Pair> {
    Floats low, high;
    WEFT_INLINE explicit Lines(const uint16_t* line) {
        low = load<Floats>(line);
        high = load<Floats>(line + PANEL);
    }
};
#endif

// Panels multiplied at once. With few rows one panel has too few sums to hide the latency of a product.
constexpr int panels_at_once(int rows) { return rows == 1 ? 4 : rows <= 3 ? 2 : 1; }

struct Span {
    long count, panel_stride, out_stride;  // numbers of a row; weights from panel to panel; floats from row to row
    bool is_first;
};

// out[r, p * PANEL ..] (+)= sum over k of x[k, r] * lines k of panel p; x is packed by rows: [count, Rows].
// Every sum runs over k in order, so that the result of a row is independent of the other rows.
template <typename Weight, typename Number, int Rows, int Panels>
WEFT_INLINE void tile(const Number* x, const Weight* panel, float* out, const Span& span) {
    constexpr int HINT = Rows <= 3 ? 3 : 2;
    constexpr long LINE = inputs_of<Number> * PANEL;
    Floats low[Panels][Rows] = {}, high[Panels][Rows] = {};
    for (long k = 0; k < span.count; k++) {
#pragma GCC unroll 4
        for (int p = 0; p < Panels; p++) {
            const Weight* line = panel + p * span.panel_stride + k * LINE;
            Lines<Weight, Number> lines(line);
            const Weight* later = line + numbers_ahead(Rows) * LINE;
            __builtin_prefetch(later, 0, HINT);
            if (LINE * sizeof(Weight) > 64) __builtin_prefetch(later + LINE / 2, 0, HINT);
            if (Rows > 3) __builtin_prefetch(x + (k + AHEAD) * Rows, 0, 2);
#pragma GCC unroll 12
            for (int r = 0; r < Rows; r++) {
                auto value = everywhere(x[k * Rows + r]);
                low[p][r] = plus_product(low[p][r], value, lines.low);
                high[p][r] = plus_product(high[p][r], value, lines.high);
            }
        }
    }
#pragma GCC unroll 4
    for (int p = 0; p < Panels; p++)
#pragma GCC unroll 12
        for (int r = 0; r < Rows; r++) {
            float* to = out + r * span.out_stride + p * PANEL;
            if (!span.is_first) low[p][r] += load<Floats>(to), high[p][r] += load<Floats>(to + W);
            store(to, low[p][r]);
            store(to + W, high[p][r]);
        }
}

template <typename Weight, typename Number, int Rows>
void tiles(const Number* x, const Weight* panel, float* out, const Span& span, int num_panels) {
    constexpr int MANY = panels_at_once(Rows);
    if (MANY > 1 && num_panels == MANY) return tile<Weight, Number, Rows, MANY>(x, panel, out, span);
    for (int p = 0; p < num_panels; p++)
        tile<Weight, Number, Rows, 1>(x, panel + p * span.panel_stride, out + p * PANEL, span);
}

template <typename Weight, typename Number>
using Tiles = void (*)(const Number*, const Weight*, float*, const Span&, int);

template <typename Weight, typename Number>
Tiles<Weight, Number> tiles_of(long rows) {
    static constexpr Tiles<Weight, Number> all[] = {
        tiles<Weight, Number, 1>,  tiles<Weight, Number, 2>,  tiles<Weight, Number, 3>,
        tiles<Weight, Number, 4>,  tiles<Weight, Number, 5>,  tiles<Weight, Number, 6>,
#if WEFT_WIDTH == 16
        tiles<Weight, Number, 7>,  tiles<Weight, Number, 8>,  tiles<Weight, Number, 9>,
        tiles<Weight, Number, 10>, tiles<Weight, Number, 11>, tiles<Weight, Number, 12>,
#endif
    };
    return all[rows - 1];
}

}  // namespace weft
