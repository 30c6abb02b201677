// A few rows of activations times a slice of a panel in 12 bits per weight, unpacked in registers.
#pragma once

#include "tiles.h"
#include "packed12.h"

namespace weft {

// Unpacks units in order, listed weights included, in registers.
class InRegisters {
public:
    InRegisters(const Units& units, uint16_t*) : units(units), upper(load_upper(units.upper)) { look(); }

    // Makes the lines of unit u available; it follows the one before.
    WEFT_INLINE void take(long u) {
        unpack_unit(units.from + u * UNIT_BYTES, upper, lines);
        if (__builtin_expect(u == listed, 0)) {
            alignas(64) uint16_t items[UNIT];
            for (int v = 0; v < UNIT_VECTORS; v++) store(items + v * 2 * W, lines[v]);
            for (; listed == u; next++, look()) items[units.places[next] % UNIT] = units.values[next];
            for (int v = 0; v < UNIT_VECTORS; v++) lines[v] = load<Words>(items + v * 2 * W);
        }
    }

    WEFT_INLINE Words line(long, int v) const { return lines[v]; }

private:
    void look() { listed = next < units.num_listed ? units.places[next] / UNIT : -1; }

    const Units& units;
    Upper upper;
    long next = 0, listed;  // next listed weight, and its unit
    Words lines[UNIT_VECTORS];
};

// The same in memory, one unit ahead of the products, with the slice left unpacked for other tiles. With 16 registers
// the products of 16 rows take 12% less time, and those of one tile the same (Zen 3).
class InMemory {
public:
    InMemory(const Units& units, uint16_t* to) : units(units), upper(load_upper(units.upper)), to(to) {
        look();
        unpack(0);
    }

    WEFT_INLINE void take(long u) {
        if (u + 1 < units.count) unpack(u + 1);
        asm volatile("" ::: "memory");  // else compilers keep the lines in registers and sums in memory
    }

    WEFT_INLINE Words line(long u, int v) const { return load<Words>(to + u * UNIT + v * 2 * W); }

private:
    WEFT_INLINE void unpack(long u) {
        Words lines[UNIT_VECTORS];
        unpack_unit(units.from + u * UNIT_BYTES, upper, lines);
        for (int v = 0; v < UNIT_VECTORS; v++) store(to + u * UNIT + v * 2 * W, lines[v]);
        if (__builtin_expect(u == listed, 0))
            for (; listed == u; next++, look()) to[units.places[next]] = units.values[next];
    }

    void look() { listed = next < units.num_listed ? units.places[next] / UNIT : -1; }

    const Units& units;
    Upper upper;
    uint16_t* to;
    long next = 0, listed;
};

// Adds the products of the first numbers of unit u, at most all of them.
template <typename Number, int Rows, typename Unpacking>
WEFT_INLINE void add_unit(const Number* x, const Unpacking& unpacking, long u, int num_numbers, Floats* low, Floats* high) {
#pragma GCC unroll 4
    for (int n = 0; n < num_numbers; n++) {
        Words line = unpacking.line(u, n);
        Floats first = inputs_of<Number> == 2 ? (Floats)line : (Floats)(line << 16);
        Floats second = inputs_of<Number> == 2 ? (Floats)unpacking.line(u, 1) : (Floats)(line & 0xFFFF0000u);
#pragma GCC unroll 12
        for (int r = 0; r < Rows; r++) {
            auto value = everywhere(x[n * Rows + r]);
            low[r] = plus_product(low[r], value, first);
            high[r] = plus_product(high[r], value, second);
        }
    }
}

// Like `tile` with one panel: the same sums in the same order. `lines`: room for the slice that `InMemory` leaves there.
template <typename Number, int Rows, typename Unpacking>
void packed12_tile(const Number* x, const Units& units, float* out, const Span& span, uint16_t* lines) {
    constexpr int NUMBERS = inputs_of<Number> == 2 ? 1 : UNIT_VECTORS;  // of a unit
    Floats low[Rows] = {}, high[Rows] = {};
    Unpacking unpacking(units, lines);
    long whole = span.count / NUMBERS;
    for (long u = 0; u < whole; u++, x += NUMBERS * Rows) {
        if (Rows > 3) __builtin_prefetch(x + AHEAD * Rows, 0, 2);
        unpacking.take(u);
        add_unit<Number, Rows>(x, unpacking, u, NUMBERS, low, high);
    }
    if (whole < units.count) {
        unpacking.take(whole);
        add_unit<Number, Rows>(x, unpacking, whole, span.count - whole * NUMBERS, low, high);
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
using Packed12Tiles = void (*)(const Number*, const Units&, float*, const Span&, uint16_t*);

template <typename Number, typename Unpacking>
Packed12Tiles<Number> packed12_tiles_of(long rows) {
    static constexpr Packed12Tiles<Number> all[] = {
        packed12_tile<Number, 1, Unpacking>,  packed12_tile<Number, 2, Unpacking>,  packed12_tile<Number, 3, Unpacking>,
        packed12_tile<Number, 4, Unpacking>,  packed12_tile<Number, 5, Unpacking>,  packed12_tile<Number, 6, Unpacking>,
#if WEFT_WIDTH == 16
        packed12_tile<Number, 7, Unpacking>,  packed12_tile<Number, 8, Unpacking>,  packed12_tile<Number, 9, Unpacking>,
        packed12_tile<Number, 10, Unpacking>, packed12_tile<Number, 11, Unpacking>, packed12_tile<Number, 12, Unpacking>,
#endif
    };
    return all[rows - 1];
}

}  // namespace weft
