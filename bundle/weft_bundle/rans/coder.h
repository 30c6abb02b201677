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
            places[i] = uint16_t((uint16_t(contexts[i]) << 4 & mask) | (size ? symbol : uint16_t(ZERO)));
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
        constexpr int PARTS = LANES / W, BEHIND = 3;
        Words state[PARTS];
        alignas(LINE) uint32_t places[LANES];  // of grains
        std::memcpy(state, states, sizeof state);
        Coder local = *this;  // else each store might be into a member, as compilers see it, and all are read again
        for (long turn = count - LANES; turn >= 0; turn -= LANES) {
            Words least = ~Words{};
#pragma GCC unroll 8
            for (int part = PARTS - 1; part >= 0; part--) {
                Words slot = load<Words>(block.slots + turn + part * W), begin = local.in_class(slot >> 16);
                least = begin < least ? begin : least;
                state[part] = local.step(state[part], slot, places + part * W);
                // Grains are loaded some parts later: a processor's window holds three, and so need not wait for them.
                if (int ready = part + BEHIND; ready < PARTS) state[ready] |= local.grains_at(places + ready * W);
            }
#pragma GCC unroll 8
            for (int part = BEHIND - 1; part >= 0; part--) state[part] |= local.grains_at(places + part * W);
            if (bits_of(below(least, Words{} + 1))) local.escape_turn(block, turn, at + turn);
        }
        next = local.next, num_escapes = local.num_escapes;
        std::memcpy(states, state, sizeof state);
    }

    void escape_turn(const Block& block, long turn, long at) {
        for (int lane = LANES - W; lane >= 0; lane -= W) {
            Words begin = load<Words>(block.slots + turn + lane) >> 16;
            escape(bits_of(below(in_class(begin), Words{} + 1)), at + lane);
        }
    }

    WEFT_INLINE Words grains_at(const uint32_t* places) const { return look_up(grains, places) & 0xFFFFu; }

    // What the states become but for their grains, of which it leaves the places.
    WEFT_INLINE Words step(Words state, Words slot, uint32_t* places) {
        Words share = slot & 0xFFFFu, begin = slot >> 16, high = state >> 16;
        Mask stays = below(high, share);
        put_others_before(next, stays, state);
        next -= W - __builtin_popcount(bits_of(stays));
        state = where(stays, state, high);
        Words whole = quotient(state, share), rest = state - whole * share, one_less = Words(Ints(rest) >> 31);
        whole += one_less, rest += share & one_less;
        store(places, begin + (rest >> (class_bits + GRAIN_BITS)));
        return whole << 16 | in_grain(rest);
    }
};

}  // namespace
