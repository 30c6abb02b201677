// Whole turns of coding for processors that permute bytes: states are halves in vectors of 16-bit words, as in decode_vbmi.h,
// and what is known of a symbol comes from tables of 256 bytes. Only a grain's place is loaded.

#pragma once

#include "vbmi.h"
#include "coder.h"

#if WEFT_WIDTH == 16

namespace {

// Slots in bytes.
struct SlotBytes {
    alignas(LINE) uint8_t share_low[SYMBOLS], share_high[SYMBOLS], begin_low[SYMBOLS], begin_high[SYMBOLS];
    uint16_t largest = 0;

    explicit SlotBytes(const Slots& slots) {
        for (int i = 0; i < SYMBOLS; i++) {
            share_low[i] = uint8_t(slots.shares[i]), share_high[i] = uint8_t(slots.shares[i] >> 8);
            begin_low[i] = uint8_t(slots.begins[i]), begin_high[i] = uint8_t(slots.begins[i] >> 8);
            largest = std::max(largest, slots.shares[i]);
        }
    }
};

// A remainder is worked out modulo 2^16, and may be a little larger than its divisor at first.
constexpr uint16_t MOST_SHARE = 0xF000;

// Bytes of a turn whose words were narrowed by two, in order.
struct Packing {
    alignas(LINE) uint8_t in_order[64], sixes[64];
    constexpr Packing() : in_order(), sixes() {
        for (int i = 0; i < 64; i++) in_order[i] = uint8_t(i / 8 % 4 * 16 + i / 32 * 8 + i % 8);
        for (int i = 0; i < 48; i++) {  // three bytes of each 32 bits hold four elements
            int four = i / 3;
            sixes[i] = uint8_t(in_order[4 * four] + i % 3);
        }
    }
};
constexpr Packing PACKING;

// The rest of a turn's elements, of which `values` has 32 each.
template <int Low>
WEFT_PERMUTING WEFT_INLINE void pack_rest(uint8_t* group, const __m512i* values) {
    if (Low == 8) {
        const __m512i byte = _mm512_set1_epi16(0xFF);
        __m512i bytes = _mm512_packus_epi16(_mm512_and_si512(values[0], byte), _mm512_and_si512(values[1], byte));
        store(group, _mm512_permutexvar_epi8(load<__m512i>(PACKING.in_order), bytes));
        store(group + GROUP, uint64_t(_mm512_movepi16_mask(values[0])) | uint64_t(_mm512_movepi16_mask(values[1])) << 32);
        return;
    }
    __m512i six[2];
    for (int i = 0; i < 2; i++) {
        // the lower five bits as they are, the sign from above
        __m512i sign = _mm512_and_si512(_mm512_srli_epi16(values[i], 10), _mm512_set1_epi16(32));
        six[i] = _mm512_ternarylogic_epi32(values[i], _mm512_set1_epi16(31), sign, 0xEA);
    }
    __m512i twelve = _mm512_maddubs_epi16(_mm512_packus_epi16(six[0], six[1]), _mm512_set1_epi16(1 | 64 << 8));
    __m512i of_four = _mm512_madd_epi16(twelve, _mm512_set1_epi32(1 | 4096 << 16));
    __m512i bytes = _mm512_permutexvar_epi8(load<__m512i>(PACKING.sixes), of_four);
    _mm512_mask_storeu_epi8(group, (1ull << Half<5>::GROUP_BYTES) - 1, bytes);
}

// a / b for a < 2^16 b: not too large, and too small by one at most, then where a / b is less than 1/16 above a whole number.
WEFT_PERMUTING WEFT_INLINE __m512i near_quotient(__m512i a, __m512i b) {
    __m512 divisor = _mm512_cvtepi32_ps(b), inverse = _mm512_rcp14_ps(divisor);
    __m512 error = _mm512_fnmadd_ps(divisor, inverse, _mm512_set1_ps(1.0f));
    inverse = _mm512_fmadd_ps(inverse, error, inverse);
    return _mm512_cvttps_epi32(_mm512_fmadd_ps(_mm512_cvtepu32_ps(a), inverse, _mm512_set1_ps(-1.0f / 32)));
}

struct PermutedCoder {
    const SlotBytes& slots;
    const uint16_t* grains;
    uint16_t* next;
    __m512i low[2], high[2], in_class, in_grain;
    __m128i unit_bits, symbol_bits;

    WEFT_PERMUTING WEFT_INLINE PermutedCoder(const SlotBytes& of_symbols, const Coder& coder)
        : slots(of_symbols), grains(coder.grains), next(coder.next) {
        alignas(LINE) uint16_t halves[2][LANES];
        for (int i = 0; i < LANES; i++) halves[0][i] = uint16_t(coder.states[i]), halves[1][i] = uint16_t(coder.states[i] >> 16);
        for (int i = 0; i < 2; i++) low[i] = load<__m512i>(halves[0] + 32 * i), high[i] = load<__m512i>(halves[1] + 32 * i);
        const int bits = coder.class_bits;
        in_class = _mm512_set1_epi16(short((UNITS / GRAIN * SYMBOLS >> bits) - 1));
        in_grain = _mm512_set1_epi16(short((GRAIN << bits) - 1));
        unit_bits = _mm_cvtsi32_si128(bits + GRAIN_BITS), symbol_bits = _mm_cvtsi32_si128(8 - bits);
    }

    WEFT_PERMUTING WEFT_INLINE void end(Coder& coder) const {
        alignas(LINE) uint16_t halves[2][LANES];
        for (int i = 0; i < 2; i++) store(halves[0] + 32 * i, low[i]), store(halves[1] + 32 * i, high[i]);
        for (int i = 0; i < LANES; i++) coder.states[i] = halves[0][i] | uint32_t(halves[1][i]) << 16;
        coder.next = next;
    }

    template <bool IsGathering>
    WEFT_PERMUTING WEFT_INLINE __m512i look_up_grains(__m512i places) const {
        const __m512i lower = _mm512_set1_epi32(0xFFFF);
        if (IsGathering) {
            __m512i even = _mm512_i32gather_epi32(_mm512_and_si512(places, lower), grains, sizeof *grains);
            __m512i odd = _mm512_i32gather_epi32(_mm512_srli_epi32(places, 16), grains, sizeof *grains);
            return _mm512_ternarylogic_epi32(lower, even, _mm512_slli_epi32(odd, 16), 0xCA);
        }
        alignas(LINE) uint16_t stored[2 * W];
        store(stored, places);
        Halves found[2] = {halves_of(look_up(grains, stored)), halves_of(look_up(grains, stored + W))};
        return load<__m512i>(found);
    }

    // Codes symbols in the lanes [32 i, 32 i + 32).
    template <bool IsGathering>
    WEFT_PERMUTING WEFT_INLINE void step(int i, __m512i share, __m512i begin) {
        const __m512i lower = _mm512_set1_epi32(0xFFFF);
        __mmask32 is_full = _mm512_cmpge_epu16_mask(high[i], share);
        int count = __builtin_popcount(is_full);
        next -= count;
        _mm512_mask_storeu_epi16(next, __mmask32((1ull << count) - 1), _mm512_maskz_compress_epi16(is_full, low[i]));
        __m512i of_low = _mm512_mask_mov_epi16(low[i], is_full, high[i]), of_high = _mm512_maskz_mov_epi16(~is_full, high[i]);
        // lanes in pairs: those of even numbers, then the others
        __m512i even = _mm512_ternarylogic_epi32(lower, of_low, _mm512_slli_epi32(of_high, 16), 0xCA);
        __m512i odd = _mm512_ternarylogic_epi32(lower, _mm512_srli_epi32(of_low, 16), of_high, 0xCA);
        __m512i of_even = near_quotient(even, _mm512_and_si512(share, lower)), of_odd = near_quotient(odd, _mm512_srli_epi32(share, 16));
        __m512i whole = _mm512_or_si512(of_even, _mm512_slli_epi32(of_odd, 16));
        __m512i rest = _mm512_sub_epi16(of_low, _mm512_mullo_epi16(whole, share));
        __mmask32 is_one_more = _mm512_cmpge_epu16_mask(rest, share);
        high[i] = _mm512_mask_sub_epi16(whole, is_one_more, whole, _mm512_set1_epi16(-1));
        rest = _mm512_mask_sub_epi16(rest, is_one_more, rest, share);
        __m512i place = _mm512_add_epi16(begin, _mm512_srl_epi16(rest, unit_bits));
        __m512i grain = look_up_grains<IsGathering>(place);
        low[i] = _mm512_or_si512(grain, _mm512_sll_epi16(_mm512_and_si512(rest, in_grain), symbol_bits));
    }

    // A turn of places in the order of `Packing`; says which lanes are coded as escapes.
    template <bool IsGathering>
    WEFT_PERMUTING WEFT_INLINE uint64_t turn(__m512i places) {
        __mmask64 is_upper = _mm512_movepi8_mask(places);
        __m512i share_low = look_up(slots.share_low, places, is_upper), share_high = look_up(slots.share_high, places, is_upper);
        __m512i begin_low = look_up(slots.begin_low, places, is_upper), begin_high = look_up(slots.begin_high, places, is_upper);
        __m512i lower = _mm512_unpacklo_epi8(begin_low, begin_high), upper = _mm512_unpackhi_epi8(begin_low, begin_high);
        step<IsGathering>(1, _mm512_unpackhi_epi8(share_low, share_high), upper);
        step<IsGathering>(0, _mm512_unpacklo_epi8(share_low, share_high), lower);
        return _mm512_testn_epi16_mask(lower, in_class) | uint64_t(_mm512_testn_epi16_mask(upper, in_class)) << 32;
    }
};

// Whole turns of a block, the last one first, and what is packed of them; contexts only where there are classes.
template <int Low, bool IsGathering>
WEFT_PERMUTING void permuted_block(Coder& coder, const SlotBytes& slots, const uint16_t* values, const int16_t* contexts, long count,
                                   long at, const Shape& shape, uint8_t* rest) {
    PermutedCoder at_work(slots, coder);
    const __m512i class_mask = _mm512_set1_epi16(short(0xFF & -shape.symbols())), base = _mm512_set1_epi16(short(4 * shape.base));
    const __m512i last = _mm512_set1_epi16(short(shape.symbols() - FIRST)), all_but_sign = _mm512_set1_epi16(0x7FFF);
    const bool has_classes = shape.class_bits;
    for (long turn = count - LANES; turn >= 0; turn -= LANES) {
        __m512i value[2], places[2];
        for (int i = 0; i < 2; i++) {
            value[i] = load<__m512i>(values + turn + 32 * i);
            __m512i size = _mm512_and_si512(value[i], all_but_sign), key = _mm512_sub_epi16(_mm512_srli_epi16(size, Low), base);
            __m512i context = has_classes ? load<__m512i>(contexts + turn + 32 * i) : _mm512_setzero_si512();
            key = _mm512_sub_epi16(key, _mm512_slli_epi16(_mm512_srai_epi16(context, 4), 2));
            __mmask32 is_key = _mm512_cmplt_epu16_mask(_mm512_sub_epi16(key, _mm512_set1_epi16(FIRST)), last);
            __m512i symbol = _mm512_mask_mov_epi16(_mm512_set1_epi16(ESCAPE), is_key, key);
            symbol = _mm512_maskz_mov_epi16(_mm512_test_epi16_mask(size, size), symbol);
            places[i] = _mm512_ternarylogic_epi32(symbol, class_mask, _mm512_slli_epi16(context, 4), 0xF8);
        }
        pack_rest<Low>(rest + turn / GROUP * Half<Low>::GROUP_BYTES, value);
        if (uint64_t lanes = at_work.template turn<IsGathering>(_mm512_packus_epi16(places[0], places[1]))) {
            coder.escape(uint32_t(lanes >> 32), at + turn + 32);
            coder.escape(uint32_t(lanes), at + turn);
        }
    }
    at_work.end(coder);
}

// Intel's processors gather in half the time of as many loads; Zen 4 and 5 do not.
template <int Low>
void code_permuted(Coder& coder, const SlotBytes& slots, const uint16_t* values, const int16_t* contexts, long count, long at,
                   const Shape& shape, uint8_t* rest) {
    auto code = __builtin_cpu_is("intel") ? permuted_block<Low, true> : permuted_block<Low, false>;
    code(coder, slots, values, contexts, count, at, shape, rest);
}

}  // namespace

#else
namespace {

constexpr uint16_t MOST_SHARE = 0;

struct SlotBytes {
    uint16_t largest = 0;
    explicit SlotBytes(const Slots&) {}
};

template <int Low>
void code_permuted(Coder&, const SlotBytes&, const uint16_t*, const int16_t*, long, long, const Shape&, uint8_t*) {}

}  // namespace
#endif
