// Panels of bfloat16 weights in 12 bits each, exactly: a product reads a quarter less memory.
//
// The lower byte of a weight (one exponent bit and the mantissa) is stored unchanged. Four bits select its upper byte among
// the 16 commonest of the matrix. The few other weights are listed.
#pragma once

#include "../native/vector.h"

namespace weft {

// A unit of 64 weights in 96 bytes: 64 lower bytes, then 32 bytes with the number of an upper byte in each half. It is a few
// lines of a panel, ordered so that unpacking stays within 16-byte lanes, see `item_of`.
constexpr long UNIT = 64, UNIT_BYTES = 96;
// A slice is 256 inputs of a panel and has its own part of the lists.
constexpr long SLICE_ITEMS = 256 * 2 * W, SLICE_UNITS = SLICE_ITEMS / UNIT;
constexpr int UNIT_VECTORS = UNIT / (2 * W);
// Prefetch distance in units.
constexpr long UNITS_AHEAD = 32;

struct Packed12 {
    const uint8_t *units, *upper;    // upper: [16], the numbered bytes
    const int32_t* starts;           // [panels * slices + 1]: start of each slice's part of the lists
    const uint16_t *places, *values; // listed weights: place in the slice, and value
};

// The weight of a unit that byte b belongs to.
constexpr long item_of(long b) { return b % 16 / 8 * 32 + b / 16 * 8 + b % 8; }

constexpr long num_slices(long units) { return (units + SLICE_UNITS - 1) / SLICE_UNITS; }

// A slice of one panel; the last one may be shorter.
struct Units {
    const uint8_t *from, *upper;
    const uint16_t *places, *values;
    long num_listed, count;

    Units(const Packed12& packed, long panel, long units, long first)
        : from(packed.units + (panel * units + first) * UNIT_BYTES), upper(packed.upper) {
        long slice = panel * num_slices(units) + first / SLICE_UNITS, start = packed.starts[slice];
        places = packed.places + start, values = packed.values + start;
        num_listed = packed.starts[slice + 1] - start;
        count = first + SLICE_UNITS < units ? SLICE_UNITS : units - first;
    }
};

#if WEFT_WIDTH == 16
typedef __m512i Upper;
static WEFT_INLINE Upper load_upper(const uint8_t* from) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)from));
}
#else
typedef __m256i Upper;
static WEFT_INLINE Upper load_upper(const uint8_t* from) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)from));
}
#endif

// Unpacks one unit to its lines of the panel, except listed weights.
static WEFT_INLINE void unpack_unit(const uint8_t* from, Upper upper, Words* lines) {
    const uint8_t* later = from + UNITS_AHEAD * UNIT_BYTES;
    __builtin_prefetch(later, 0, 3);
    __builtin_prefetch(later + 64, 0, 3);
    __m256i numbers = _mm256_loadu_si256((const __m256i*)(from + UNIT));
#if WEFT_WIDTH == 16
    __m512i lower = _mm512_loadu_si512(from);
    __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(numbers), _mm256_srli_epi16(numbers, 4), 1);
    __m512i high = _mm512_shuffle_epi8(upper, _mm512_and_si512(both, _mm512_set1_epi8(15)));
    lines[0] = (Words)_mm512_unpacklo_epi8(lower, high);
    lines[1] = (Words)_mm512_unpackhi_epi8(lower, high);
#else
    for (int half = 0; half < 2; half++) {
        __m256i lower = _mm256_loadu_si256((const __m256i*)(from + 32 * half));
        __m256i own = _mm256_and_si256(half ? _mm256_srli_epi16(numbers, 4) : numbers, _mm256_set1_epi8(15));
        __m256i high = _mm256_shuffle_epi8(upper, own);
        lines[half] = (Words)_mm256_unpacklo_epi8(lower, high);
        lines[half + 2] = (Words)_mm256_unpackhi_epi8(lower, high);
    }
#endif
}

// Unpacks a slice to its lines of the panel.
static inline void unpack(const Units& units, uint16_t* to) {
    Upper upper = load_upper(units.upper);
    for (long u = 0; u < units.count; u++) {
        Words lines[UNIT_VECTORS];
        unpack_unit(units.from + u * UNIT_BYTES, upper, lines);
        for (int v = 0; v < UNIT_VECTORS; v++) store(to + u * UNIT + v * 2 * W, lines[v]);
    }
    for (long i = 0; i < units.num_listed; i++) to[units.places[i]] = units.values[i];
}

}  // namespace weft
