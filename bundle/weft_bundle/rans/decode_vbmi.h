// Whole turns of all lanes for processors that permute bytes (AVX-512 VBMI and VBMI2): tables of 256 bytes lie in four
// registers, so that nothing is loaded to be looked up, and symbols are joined with their rest without going to memory.

#pragma once

#include "vbmi.h"
#include "stream.h"

#if WEFT_WIDTH == 16

namespace {

// Words that are narrowed by two come as bytes in another order: byte i is of element elements[i]. And of each element's
// six bits: the bytes that they lie in, and how far from the top of these two.
struct Orders {
    alignas(LINE) uint8_t elements[64], pairs[2][64];
    alignas(LINE) uint16_t from_top[32];
    constexpr Orders() : elements(), pairs(), from_top() {
        for (int i = 0; i < 64; i++) elements[i] = uint8_t(i / 16 * 8 + i % 8 + i % 16 / 8 * 32);
        for (int i = 0; i < 128; i++) pairs[i / 64][i % 64] = uint8_t(6 * (i / 2) / 8 + i % 2);
        for (int i = 0; i < 32; i++) from_top[i] = uint16_t(10 - 6 * i % 8);
    }
};
constexpr Orders ORDERS_OF_BYTES;

// A stream whose states are held in registers.
struct Permuting {
    Stream* stream;
    const Tables* tables;
    const uint16_t* next;
    const uint8_t* rest;
    uint16_t* out;
    __m128i symbol_bits;
    __m512i low[2], high[2], symbols_of_class;
    // of the turn under way
    __m512i place, within[2], share[2];
    __mmask64 is_upper, is_other;

    WEFT_PERMUTING WEFT_INLINE void begin(Stream* of) {
        stream = of, tables = of->chunk->tables, next = of->next, rest = of->rest(0), out = of->chunk->out + of->done;
        symbol_bits = _mm_cvtsi32_si128(of->shape.symbol_bits()), symbols_of_class = _mm512_set1_epi16(short(of->shape.symbols() - 1));
        for (int i = 0; i < 2; i++) low[i] = load<__m512i>(of->low + 32 * i), high[i] = load<__m512i>(of->high + 32 * i);
    }

    WEFT_PERMUTING WEFT_INLINE void end() {
        stream->next = next;
        for (int i = 0; i < 2; i++) store(stream->low + 32 * i, low[i]), store(stream->high + 32 * i, high[i]);
    }

    template <int Low>
    WEFT_PERMUTING WEFT_INLINE void fetch(long at) const { fetch_ahead<Low>(out + at, group_at<Low>(at), next); }

    template <int Low>
    WEFT_PERMUTING WEFT_INLINE const uint8_t* group_at(long at) const { return rest + at / GROUP * Half<Low>::GROUP_BYTES; }

    // A turn in steps, so that another stream's step fills the time that one of this stream waits. First: in which buckets
    // the slots lie, and whether they are the other owner's.
    WEFT_PERMUTING WEFT_INLINE void find(long at) {
        __m512i position = _mm512_packus_epi16(_mm512_srli_epi16(low[0], 8), _mm512_srli_epi16(low[1], 8));
        __m512i bucket = _mm512_packus_epi16(_mm512_and_si512(low[0], symbols_of_class), _mm512_and_si512(low[1], symbols_of_class));
        place = _mm512_permutexvar_epi8(load<__m512i>(ORDERS_OF_BYTES.elements), load<__m512i>(stream->classes + at));
        place = _mm512_or_si512(bucket, place);
        is_upper = _mm512_movepi8_mask(place);
        is_other = _mm512_cmpge_epu8_mask(position, look_up(tables->cut, place, is_upper));
    }

    // Where the slots lie among those of their symbols, and what these are.
    WEFT_PERMUTING WEFT_INLINE void place_slots() {
        __m512i other = look_up(tables->other, place, is_upper);
        __m512i moved_low = _mm512_maskz_mov_epi8(is_other, look_up(tables->moved_low, place, is_upper));
        __m512i moved_high = _mm512_maskz_mov_epi8(is_other, look_up(tables->moved_high, place, is_upper));
        within[0] = _mm512_add_epi16(_mm512_srl_epi16(low[0], symbol_bits), _mm512_unpacklo_epi8(moved_low, moved_high));
        within[1] = _mm512_add_epi16(_mm512_srl_epi16(low[1], symbol_bits), _mm512_unpackhi_epi8(moved_low, moved_high));
        place = _mm512_mask_blend_epi8(is_other, place, other);
    }

    WEFT_PERMUTING WEFT_INLINE void find_shares() {
        is_upper = _mm512_movepi8_mask(place);
        __m512i share_low = look_up(tables->share_low, place, is_upper), share_high = look_up(tables->share_high, place, is_upper);
        share[0] = _mm512_unpacklo_epi8(share_low, share_high), share[1] = _mm512_unpackhi_epi8(share_low, share_high);
    }

    // State = share * (state >> 16) + the slot's place within the symbol, and a word more where that is short.
    WEFT_PERMUTING WEFT_INLINE void move() {
        for (int i = 0; i < 2; i++) {
            __m512i lower = _mm512_add_epi16(_mm512_mullo_epi16(share[i], high[i]), within[i]), upper = _mm512_mulhi_epu16(share[i], high[i]);
            __mmask32 carry = _mm512_cmplt_epu16_mask(lower, within[i]);
            upper = _mm512_mask_sub_epi16(upper, carry, upper, _mm512_set1_epi16(-1));
            __mmask32 is_low = _mm512_testn_epi16_mask(upper, upper);
            high[i] = _mm512_mask_mov_epi16(upper, is_low, lower);
            low[i] = _mm512_mask_expand_epi16(lower, is_low, load<__m512i>(next));
            next += __builtin_popcount(is_low);
        }
    }

    // Symbols with what was not coded.
    template <int Low>
    WEFT_PERMUTING WEFT_INLINE void join(long at) {
        const uint8_t* group = group_at<Low>(at);
        __m512i packed = Low == 5 ? _mm512_maskz_loadu_epi8((1ull << Half<5>::GROUP_BYTES) - 1, group) : load<__m512i>(group);
        uint64_t signs = Low == 5 ? 0 : load<uint64_t>(group + GROUP);
        for (int i = 0; i < 2; i++) {
            __m512i low_bits, sign;
            if (Low == 5) {  // six bits at the top, of which the first one stays there
                sign = _mm512_permutexvar_epi8(load<__m512i>(ORDERS_OF_BYTES.pairs[i]), packed);
                sign = _mm512_sllv_epi16(sign, load<__m512i>(ORDERS_OF_BYTES.from_top));
                low_bits = _mm512_srli_epi16(sign, 10);
            } else {
                sign = _mm512_maskz_set1_epi16(__mmask32(signs >> (32 * i)), short(0x8000));
                low_bits = _mm512_cvtepu8_epi16(i ? _mm512_extracti64x4_epi64(packed, 1) : _mm512_castsi512_si256(packed));
            }
            __m512i symbol = i ? _mm512_unpackhi_epi8(place, place) : _mm512_unpacklo_epi8(place, place);
            symbol = _mm512_and_si512(symbol, symbols_of_class);
            __m512i key = _mm512_add_epi16(symbol, load<__m512i>(stream->before + at + 32 * i));
            key = _mm512_maskz_slli_epi16(_mm512_test_epi16_mask(symbol, symbol), key, Low);
            key = _mm512_ternarylogic_epi32(_mm512_set1_epi16((1 << Low) - 1), low_bits, key, 0xCA);
            store(out + at + 32 * i, _mm512_ternarylogic_epi32(_mm512_set1_epi16(short(0x8000)), sign, key, 0xCA));
        }
    }
};

// One stream's turn in the time that the others' wait; returns where they ended.
template <int N, int Low>
WEFT_PERMUTING long permuted_turns(Stream* streams, long from, long count) {
    Permuting at_work[N];
    for (int n = 0; n < N; n++) at_work[n].begin(streams + n);
    for (; from + LANES <= count; from += LANES) {
        bool has_words = true;
        for (int n = 0; n < N; n++) has_words &= streams[n].end - at_work[n].next >= LANES;
        if (!has_words) break;
        for (Permuting& each : at_work) each.template fetch<Low>(from);
        for (Permuting& each : at_work) each.find(from);
        for (Permuting& each : at_work) each.place_slots();
        for (Permuting& each : at_work) each.find_shares();
        for (Permuting& each : at_work) each.move();
        for (Permuting& each : at_work) each.template join<Low>(from);
    }
    for (int n = 0; n < N; n++) at_work[n].end();
    return from;
}

}  // namespace

#else
namespace {

template <int N, int Low>
long permuted_turns(Stream*, long from, long) { return from; }

}  // namespace
#endif
