// 16-bit floats as symbols of an entropy coder and bits that are left as they are: interleaved rANS, exact both ways.
//
// A weight is sign, key (exponent and the two highest bits of the mantissa) and low bits. The key, less the power of
// two that its row and column suggest, is the symbol; the fraction of that power chooses one of the tables. Sign and
// low bits are noise and are packed. See reference.py for the format, docs/bundles.md for the file around it.

#pragma once

#include "native/vector.h"

#include <algorithm>
#include <vector>

using namespace weft;

namespace {

constexpr int LANES = 64, GROUP = 64, SYMBOLS = 256;  // of all classes of a tensor together
constexpr int UNITS = 256;                            // of a bucket
constexpr int GRAIN_BITS = 2, GRAIN = 1 << GRAIN_BITS;  // units that coding tells apart, so that its table is small
constexpr uint32_t LOWEST = 1u << 16;
constexpr int ZERO = 0, ESCAPE = 1, FIRST = 4;  // symbols below FIRST stand for no key
constexpr long BLOCK = WEFT_WIDTH == 16 ? 2048 : 512;  // elements whose contexts are worked out at a time: the grains' table needs the cache
constexpr long LINE = 64;                        // bytes that memory is fetched by

struct Shape {
    long first, count, columns;  // of the chunk, counted through the tensor row by row
    int base, class_bits;

    int symbol_bits() const { return 8 - class_bits; }
    int symbols() const { return SYMBOLS >> class_bits; }
};

// Sum of row and column scale of each element, in sixteenths of an octave.
inline void fill_contexts(int16_t* to, long first, long count, const int8_t* rows, const int8_t* columns, const Shape& shape) {
    for (long done = 0; done < count;) {
        long row = (first + done) / shape.columns, column = (first + done) % shape.columns;
        long run = std::min(count - done, shape.columns - column);
        for (long i = 0; i < run; i++) to[done + i] = int16_t(rows[row] + columns[column + i]);
        done += run;
    }
}

// What the rest of a weight is packed to, for groups of elements: a byte each and then the signs, or six bits each, one
// after another.
template <int Low>
struct Half {
    static constexpr long GROUP_BYTES = GROUP * (Low + 1) / 8;

    // In and out of the lower Low + 1 bits of `bits`.
    static WEFT_INLINE void unpack(const uint8_t* group, uint16_t* bits) {
        if (Low == 8) {
            uint64_t signs = load<uint64_t>(group + GROUP);
            for (int i = 0; i < GROUP; i++) bits[i] = uint16_t(group[i] | ((signs >> i) & 1) << 8);
            return;
        }
        alignas(LINE) uint8_t bytes[GROUP];
        uint64_t sixes[GROUP / 8] = {};
        for (int i = 0; i < GROUP / 8; i++) std::memcpy(sixes + i, group + 6 * i, 6);
        for (uint64_t& six : sixes) {
            six = (six & 0xFFFFFF) | (six & 0xFFFFFF000000) << 8;
            six = (six & 0x00000FFF00000FFF) | (six & 0x00FFF00000FFF000) << 4;
            six = (six & 0x003F003F003F003F) | (six & 0x0FC00FC00FC00FC0) << 2;
        }
        std::memcpy(bytes, sixes, GROUP);
        for (int i = 0; i < GROUP; i++) bits[i] = bytes[i];
    }
    // Of the values of a group.
    static WEFT_INLINE void pack(uint8_t* group, const uint16_t* values) {
        if (Low == 8) {
            uint64_t signs = 0;
            for (int i = 0; i < GROUP; i++) group[i] = uint8_t(values[i]);
            for (int i = 0; i < GROUP; i++) signs |= uint64_t(values[i] >> 15) << i;
            store(group + GROUP, signs);
            return;
        }
        typedef uint64_t Sixes __attribute__((vector_size(GROUP)));
        alignas(LINE) uint8_t bytes[GROUP];
        for (int i = 0; i < GROUP; i++) bytes[i] = uint8_t((values[i] & 31) | (values[i] >> 10 & 32));
        Sixes six = load<Sixes>(bytes);
        six = (six & 0x003F003F003F003F) | (six & 0x3F003F003F003F00) >> 2;
        six = (six & 0x00000FFF00000FFF) | (six & 0x0FFF00000FFF0000) >> 4;
        six = (six & 0xFFFFFF) | (six & 0x00FFFFFF00000000) >> 8;
        for (int i = 0; i < GROUP / 8 - 1; i++) store(group + 6 * i, uint64_t(six[i]));  // what is too much is written over
        uint64_t last = six[GROUP / 8 - 1];
        std::memcpy(group + 6 * (GROUP / 8 - 1), &last, 6);
    }
    // `before`: what its place and the base add to the element's key.
    static WEFT_INLINE uint16_t join(uint16_t symbol, int16_t before, uint16_t rest) {
        uint16_t size = uint16_t(uint16_t(symbol + before) << Low | (rest & ((1 << Low) - 1)));
        return uint16_t((symbol < FIRST ? 0 : size & 0x7FFF) | (rest >> Low) << 15);
    }
};

// How to decode: for each class and bucket, the position from which on the bucket is another symbol's, that symbol, and
// by how much slots of that part are moved within it; for each class and symbol its share of the 2^16 slots.
struct Tables {
    alignas(LINE) uint8_t cut[SYMBOLS], other[SYMBOLS], moved_low[SYMBOLS], moved_high[SYMBOLS];
    alignas(LINE) uint8_t share_low[SYMBOLS], share_high[SYMBOLS];
};

// How to code: for each class and symbol its share of 2^16, and where its grains begin among those of all of them.
struct Slots {
    alignas(LINE) uint16_t shares[SYMBOLS], begins[SYMBOLS];
};

WEFT_INLINE int class_of(int context, int bits) { return (context & 15) >> (4 - bits); }

}  // namespace
