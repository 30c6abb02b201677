// A few rows of activations times a slice of a panel in 12 bits per weight, unpacked in registers.
#pragma once

#include "tiles.h"
#include "packed12.h"

namespace weft {

// Unpacks units in order, listed weights included.
struct Unpacking {
    const Units& units;
    Upper upper;
    long next = 0, listed;  // next listed weight, and its unit

    explicit Unpacking(const Units& units) : units(units), upper(load_upper(units.upper)) { look(); }

    void look() { listed = next < units.num_listed ? units.places[next] / UNIT : -1; }

    WEFT_INLINE void take(long u, Words* lines) {
        unpack_unit(units.from + u * UNIT_BYTES, upper, lines);
        if (__builtin_expect(u == listed, 0)) {
            alignas(64) uint16_t items[UNIT];
            for (int v = 0; v < UNIT_VECTORS; v++) store(items + v * 2 * W, lines[v]);
            for (; listed == u; next++, look()) items[units.places[next] % UNIT] = units.values[next];
            for (int v = 0; v < UNIT_VECTORS; v++) lines[v] = load<Words>(items + v * 2 * W);
        }
    }
};

// Like `tile` with one panel: the same sums in the same order.
template <typename Number, int Rows>
void packed12_tile(const Number* x, const Units& units, float* out, const Span& span) {
    constexpr int NUMBERS = inputs_of<Number> == 2 ? 1 : UNIT_VECTORS;  // of a unit
    Floats low[Rows] = {}, high[Rows] = {};
    Unpacking unpacking(units);
    for (long u = 0; u < units.count; u++) {
        Words lines[UNIT_VECTORS];
        unpacking.take(u, lines);
        if (Rows > 3) __builtin_prefetch(x + (u * NUMBERS + AHEAD) * Rows, 0, 2);
#pragma GCC unroll 4
        for (int n = 0; n < NUMBERS; n++) {
            long k = u * NUMBERS + n;
            if (NUMBERS > 1 && k >= span.count) break;
            Floats first = NUMBERS == 1 ? (Floats)lines[0] : (Floats)(lines[n] << 16);
            Floats second = NUMBERS == 1 ? (Floats)lines[1] : (Floats)(lines[n] & 0xFFFF0000u);
#pragma GCC unroll 12
            for (int r = 0; r < Rows; r++) {
                auto value = everywhere(x[k * Rows + r]);
                low[r] = plus_product(low[r], value, first);
                high[r] = plus_product(high[r], value, second);
            }
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < Rows; r++) {
        float* to = out + r * span.out_stride;
        if (!span.is_first) low[r] += load<Floats>(to), high[r] += load<Floats>(to + W);
        store(to, low[r]);
        store(to + W, high[r]);
    }
}

template <typename Number>
using Packed12Tiles = void (*)(const Number*, const Units&, float*, const Span&);

template <typename Number>
Packed12Tiles<Number> packed12_tiles_of(long rows) {
    static constexpr Packed12Tiles<Number> all[] = {
        packed12_tile<Number, 1>,  packed12_tile<Number, 2>,  packed12_tile<Number, 3>,
        packed12_tile<Number, 4>,  packed12_tile<Number, 5>,  packed12_tile<Number, 6>,
#if WEFT_WIDTH == 16
        packed12_tile<Number, 7>,  packed12_tile<Number, 8>,  packed12_tile<Number, 9>,
        packed12_tile<Number, 10>, packed12_tile<Number, 11>, packed12_tile<Number, 12>,
#endif
    };
    return all[rows - 1];
}

}  // namespace weft
