// 16-bit floats as symbols of an entropy coder and bits that are left as they are: interleaved rANS, exact both ways.
//
// A weight is sign, key (exponent and the two highest bits of the mantissa) and low bits. The key, less the power of
// two that its row and column suggest, is the symbol; the fraction of that power chooses one of the tables. Sign and
// low bits are noise and are packed. See reference.py for the format, docs/bundles.md for the file around it.

#pragma once

#include "../native/vector.h"

#include <algorithm>
#include <vector>

using namespace weft;

namespace {

constexpr int LANES = 32, GROUP = 64, PRECISION = 12, SYMBOLS = 256;
constexpr uint32_t LOWEST = 1u << 16, TOTAL = 1u << PRECISION;
constexpr int ZERO = 0, ESCAPE = 1, FIRST = 4;  // symbols below FIRST stand for no key
constexpr long BLOCK = 4096;                     // elements whose contexts are worked out at a time
constexpr long LINE = 64;                        // bytes that memory is fetched by

struct Shape {
    long first, count, columns;  // of the chunk, counted through the tensor row by row
    int base, class_bits;
};

// Sixteenths of an octave by which the row and the column of each element are louder than the tensor.
void fill_contexts(int16_t* to, long first, long count, const int8_t* rows, const int8_t* columns, const Shape& shape) {
    for (long done = 0; done < count;) {
        long row = (first + done) / shape.columns, column = (first + done) % shape.columns;
        long run = std::min(count - done, shape.columns - column);
        for (long i = 0; i < run; i++) to[done + i] = int16_t(rows[row] + columns[column + i]);
        done += run;
    }
}

template <int Low>
struct Half {
    static constexpr int REST = Low + 1;  // bits left as they are
    static constexpr long GROUP_BYTES = GROUP * REST / 8;

    // The rest of element i of a group: six bits each with the fourth quarter in the spare bits of the other three,
    // or a byte each and then the signs.
    static WEFT_INLINE uint32_t rest(const uint8_t* group, int i) {
        if (Low == 8) return group[i] | ((group[64 + i / 8] >> (i % 8)) & 1u) << 8;
        if (i < 48) return group[i] & 63u;
        return group[i - 48] >> 6 | (group[i - 32] >> 6) << 2 | (group[i - 16] >> 6) << 4;
    }
    static WEFT_INLINE void put_rest(uint8_t* group, int i, uint32_t bits) {
        if (Low == 8) {
            group[i] = uint8_t(bits);
            group[64 + i / 8] |= uint8_t((bits >> 8) << (i % 8));
        } else if (i < 48) {
            group[i] |= uint8_t(bits);
        } else {
            for (int part = 0; part < 3; part++) group[i - 48 + 16 * part] |= uint8_t((bits >> (2 * part)) << 6);
        }
    }
    static WEFT_INLINE uint16_t join(uint32_t symbol, int context, uint32_t rest_bits, const Shape& shape) {
        uint32_t key = symbol + 4 * uint32_t((context >> 4) + shape.base);
        uint32_t size = symbol < FIRST ? 0 : (key << Low) | (rest_bits & ((1u << Low) - 1));
        return uint16_t((size & 0x7FFF) | (rest_bits >> Low) << 15);
    }
};

WEFT_INLINE int class_of(int context, int bits) { return (context & 15) >> (4 - bits); }

}  // namespace
