// W of the coder's lanes at a time, for AVX-512 and AVX2: what it needs beyond the compiler's own vectors.

#pragma once

#include "format.h"

namespace {

static_assert(LANES % W == 0, "lanes are whole vectors");

typedef int32_t Ints __attribute__((vector_size(4 * W)));

template <typename Entry>
WEFT_INLINE __m128i four_of(const Entry* table, uint64_t a, uint64_t b, uint64_t c, uint64_t d) {
    auto entry = [=](uint64_t place) { return load<int>(table + place); };
    __m128i low = _mm_insert_epi32(_mm_cvtsi32_si128(entry(a)), entry(b), 1), high = _mm_insert_epi32(_mm_cvtsi32_si128(entry(c)), entry(d), 1);
    return _mm_unpacklo_epi64(low, high);
}

// Four entries of a table; of one of halves, with what follows above each. As many loads take three quarters of a
// gather's time on Zen 5, and less than it on Zen 3.
template <typename Entry>
WEFT_INLINE __m128i look_up_four(const Entry* table, const uint16_t* places) {
    uint64_t four = load<uint64_t>(places);
    return four_of(table, four & 0xFFFF, four >> 16 & 0xFFFF, four >> 32 & 0xFFFF, four >> 48);
}
template <typename Entry>
WEFT_INLINE __m128i look_up_four(const Entry* table, const uint32_t* places) {
    return four_of(table, places[0], places[1], places[2], places[3]);
}

#if WEFT_WIDTH == 16

typedef __mmask16 Mask;

// Compilers make detours of these conversions.
WEFT_INLINE Words widen(Halves values) { return (Words)_mm512_cvtepu16_epi32((__m256i)values); }
WEFT_INLINE Halves halves_of(Words values) { return (Halves)_mm512_cvtepi32_epi16((__m512i)values); }

WEFT_INLINE Mask below(Words a, Words b) { return _mm512_cmplt_epu32_mask((__m512i)a, (__m512i)b); }
WEFT_INLINE uint32_t bits_of(Mask mask) { return mask; }
WEFT_INLINE Words where(Mask mask, Words a, Words b) { return (Words)_mm512_mask_mov_epi32((__m512i)b, mask, (__m512i)a); }

// table[places[i]]
template <typename Entry, typename Place>
WEFT_INLINE Words look_up(const Entry* table, const Place* places) {
    __m256i low = _mm256_set_m128i(look_up_four(table, places + 4), look_up_four(table, places));
    __m256i high = _mm256_set_m128i(look_up_four(table, places + 12), look_up_four(table, places + 8));
    return (Words)_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}

// table[places[i]] for 32 places in a table of SYMBOLS entries: four times 64 of them, of which two bits of the place choose.
WEFT_INLINE __m512i look_up(const uint16_t* table, __m512i place) {
    __m512i of_four[4];
    for (int four = 0; four < 4; four++) {
        of_four[four] = _mm512_permutex2var_epi16(load<__m512i>(table + 64 * four), place, load<__m512i>(table + 64 * four + 32));
    }
    __mmask32 is_odd = _mm512_test_epi16_mask(place, _mm512_set1_epi16(64));
    __mmask32 is_upper = _mm512_test_epi16_mask(place, _mm512_set1_epi16(128));
    __m512i lower = _mm512_mask_mov_epi16(of_four[0], is_odd, of_four[1]), upper = _mm512_mask_mov_epi16(of_four[2], is_odd, of_four[3]);
    return _mm512_mask_mov_epi16(lower, is_upper, upper);
}

// Two tables' entries side by side.
struct Pairs {
    const uint16_t *lower, *upper;

    Pairs(const uint16_t* of_lower, const uint16_t* of_upper) : lower(of_lower), upper(of_upper) {}

    // to[i] = lower[places[i]] | upper[places[i]] << 16; both end with whole vectors.
    WEFT_INLINE void look_up_all(uint32_t* to, const uint16_t* places, long count) const {
        for (long i = 0; i < count; i += 2 * W) {
            __m512i place = load<__m512i>(places + i);
            Halves halves[4];
            store(halves, look_up(lower, place)), store(halves + 2, look_up(upper, place));
            store(to + i, widen(halves[0]) | widen(halves[2]) << 16);
            store(to + i + W, widen(halves[1]) | widen(halves[3]) << 16);
        }
    }
};

// The lower halves of all lanes but the mask's, as words that end before `end`. Writes W words, the first of them nonsense.
WEFT_INLINE void put_others_before(uint16_t* end, Mask mask, Words values) {
    Mask others = Mask(~mask);
    __m512i count = _mm512_set1_epi32(__builtin_popcount(others));
    __m512i from = _mm512_add_epi32(count, _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
    store(end - W, halves_of((Words)_mm512_permutexvar_epi32(from, _mm512_maskz_compress_epi32(others, (__m512i)values))));
}

// a / b for a < 2^16 b, to the nearest whole number but where it is near the middle of two.
WEFT_INLINE Words quotient(Words a, Words b) {
    __m512 divisor = _mm512_cvtepu32_ps((__m512i)b), inverse = _mm512_rcp14_ps(divisor);
    __m512 error = _mm512_fnmadd_ps(divisor, inverse, _mm512_set1_ps(1.0f));
    inverse = _mm512_fmadd_ps(inverse, error, inverse);
    return (Words)_mm512_cvtps_epi32(_mm512_mul_ps(_mm512_cvtepu32_ps((__m512i)a), inverse));
}

#else

typedef Words Mask;  // all bits of a lane, or none

WEFT_INLINE Words widen(Halves values) { return (Words)_mm256_cvtepu16_epi32((__m128i)values); }
WEFT_INLINE Halves halves_of(Words values) {
    const __m256i lower = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 0, 1, 4, 5, 8, 9, 12, 13));
    return (Halves)_mm256_castsi256_si128(_mm256_permute4x64_epi64(_mm256_shuffle_epi8((__m256i)values, lower), 8));
}

WEFT_INLINE Mask below(Words a, Words b) { return Words(Ints(a) < Ints(b)); }  // of less than 2^31
WEFT_INLINE uint32_t bits_of(Mask mask) { return uint32_t(_mm256_movemask_ps((__m256)mask)); }
WEFT_INLINE Words where(Mask mask, Words a, Words b) { return (Words)_mm256_blendv_epi8((__m256i)b, (__m256i)a, (__m256i)mask); }

template <typename Entry, typename Place>
WEFT_INLINE Words look_up(const Entry* table, const Place* places) {
    return (Words)_mm256_set_m128i(look_up_four(table, places + 4), look_up_four(table, places));
}

struct Pairs {
    uint32_t pairs[SYMBOLS];

    Pairs(const uint16_t* lower, const uint16_t* upper) {
        for (int i = 0; i < SYMBOLS; i++) pairs[i] = lower[i] | uint32_t(upper[i]) << 16;
    }

    WEFT_INLINE void look_up_all(uint32_t* to, const uint16_t* places, long count) const {
        for (long i = 0; i < count; i += W) store(to + i, look_up(pairs, places + i));
    }
};

// For each mask of eight lanes: which of the others stand last.
struct Orders {
    uint8_t last[256][8];
    constexpr Orders() : last() {
        for (int mask = 0; mask < 256; mask++) {
            int place = 8;
            for (int lane = 7; lane >= 0; lane--) {
                if (~mask >> lane & 1) last[mask][--place] = uint8_t(lane);
            }
        }
    }
};
constexpr Orders ORDERS;

WEFT_INLINE __m256i order(const uint8_t* lanes) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)lanes)); }

WEFT_INLINE void put_others_before(uint16_t* end, Mask mask, Words values) {
    store(end - W, halves_of((Words)_mm256_permutevar8x32_epi32((__m256i)values, order(ORDERS.last[bits_of(mask)]))));
}

WEFT_INLINE Words quotient(Words a, Words b) {
    // The processor's conversion knows signed numbers only: 2^32 is missing to those from 2^31 on.
    Floats missing = (Floats)(Words(Ints(a) >> 31) & 0x4F800000u), whole = (Floats)_mm256_cvtepi32_ps((__m256i)a) + missing;
    return (Words)_mm256_cvtps_epi32((__m256)(whole / (Floats)_mm256_cvtepi32_ps((__m256i)b)));
}

#endif

}  // namespace
