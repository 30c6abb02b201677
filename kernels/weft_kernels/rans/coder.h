// A chunk on its way to words: the lanes' states, how elements are coded one at a time, and by vectors of 32 bits.

#pragma once

#include "lanes.h"

namespace {

// What coding takes of each element of a block: its symbol's share, and where that one's grains begin.
struct Block {
    alignas(LINE) uint16_t places[BLOCK];  // class and symbol
    alignas(LINE) uint32_t slots[BLOCK];   // share | begin << 16

    template <int Low>
    void fill(const uint16_t* values, const int16_t* contexts, long count, const Pairs& of_places, const Shape& shape) {
        const uint16_t mask = 0xFF & -shape.symbols(), last = uint16_t(shape.symbols() - FIRST), base = uint16_t(4 * shape.base);
        for (long i = 0; i < count; i++) {
            uint16_t size = values[i] & 0x7FFF, key = uint16_t((size >> Low) - 4 * (contexts[i] >> 4) - base);
            uint16_t symbol = uint16_t(key - FIRST) < last ? key : uint16_t(ESCAPE);
            places[i] = uint16_t((contexts[i] << 4 & mask) | (size ? symbol : uint16_t(ZERO)));
        }
        std::fill(places + count, places + (count + LANES - 1) / LANES * LANES, uint16_t(0));  // whole vectors are looked up
        of_places.look_up_all(slots, places, count);
    }
};
struct Coder {
    const uint16_t* grains;  // see weft_rans_slots
    int class_bits;
    uint32_t states[LANES];
    uint16_t* next;     // the word that was written last: they come backwards
    uint32_t* escapes;  // places in the chunk of elements that are coded as escapes, the last one first
    long num_escapes = 0;

    // Of a class the escapes' grains come first.
    template <typename Any>
    WEFT_INLINE Any in_class(Any begin) const { return begin & uint32_t((UNITS / GRAIN * SYMBOLS >> class_bits) - 1); }

    // What of a slot's number says which one of its grain it is.
    template <typename Any>
    WEFT_INLINE Any in_grain(Any rest) const { return (rest & ((uint32_t(GRAIN) << class_bits) - 1)) << (8 - class_bits); }

    void escape(uint32_t lanes, long at) {
        for (; lanes; lanes &= ~(1u << (31 - __builtin_clz(lanes)))) escapes[num_escapes++] = uint32_t(at + 31 - __builtin_clz(lanes));
    }

    // Elements [from, end) of a block that begins at element `at` of the chunk, the last one first.
    void code_slowly(const Block& block, long from, long end, long at) {
        for (long i = end - 1; i >= from; i--) {
            uint32_t share = block.slots[i] & 0xFFFF, begin = block.slots[i] >> 16, &state = states[i % LANES];
            if (!in_class(begin)) escape(1, at + i);
            if (state >> 16 >= share) {
                *--next = uint16_t(state);
                state >>= 16;
            }
            uint32_t whole = state / share, rest = state % share;
            state = whole << 16 | grains[begin + (rest >> (class_bits + GRAIN_BITS))] | in_grain(rest);
        }
    }

    // Whole turns of all lanes, the last one first; there is room for W words before the first one.
    void code(const Block& block, long count, long at) {
        Words state[LANES / W];
        std::memcpy(state, states, sizeof state);
        Coder local = *this;  // else each store might be into a member, as compilers see it, and all are read again
        for (long turn = count - LANES; turn >= 0; turn -= LANES) {
#pragma GCC unroll 8
            for (int part = LANES / W - 1; part >= 0; part--) {
                long i = turn + part * W;
                state[part] = local.step(state[part], load<Words>(block.slots + i), at + i);
            }
        }
        next = local.next, num_escapes = local.num_escapes;
        std::memcpy(states, state, sizeof state);
    }

    WEFT_INLINE Words step(Words state, Words slot, long at) {
        Words share = slot & 0xFFFFu, begin = slot >> 16;
        if (uint32_t lanes = bits_of(below(in_class(begin), Words{} + 1))) escape(lanes, at);
        Mask is_full = at_least(state >> 16, share);
        put_before(next, is_full, state);
        next -= __builtin_popcount(bits_of(is_full));
        state = where(is_full, state >> 16, state);
        Words whole = quotient(state, share), rest = state - whole * share;
        Mask is_one_more = at_least(rest, share);
        whole = where(is_one_more, whole + 1, whole), rest = where(is_one_more, rest - share, rest);
        Words grain = look_up(grains, begin + (rest >> (class_bits + GRAIN_BITS))) & 0xFFFFu;
        return whole << 16 | grain | in_grain(rest);
    }
};

}  // namespace
