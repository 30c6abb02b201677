// Whole turns of all lanes for processors that permute bytes (AVX-512 VBMI and VBMI2): tables of 256 bytes lie in four
// registers, so that nothing is loaded to be looked up, and symbols are joined with their rest without going to memory.

#pragma once

#include "stream.h"

#if WEFT_WIDTH == 16
#define WEFT_PERMUTING __attribute__((target("avx512vbmi,avx512vbmi2")))

namespace {

static_assert(LANES == 64 && GROUP == LANES, "a turn is 64 lanes and a group");

// Byte i of a vector of bytes is of element ELEMENTS[i], so that interleaved bytes of two vectors are words in order.
struct Orders {
    alignas(LINE) uint8_t elements[64], lower[64], upper[64], six[64];
    constexpr Orders() : elements(), lower(), upper(), six() {
        for (int i = 0; i < 64; i++) {
            int element = i / 16 * 8 + i % 8 + i % 16 / 8 * 32;
            elements[i] = uint8_t(element), lower[i] = uint8_t(2 * element), upper[i] = uint8_t(2 * element + 1);
            six[i] = uint8_t(i / 8 * 6 + i % 8 % 6);
        }
    }
};
constexpr Orders ORDERS_OF_BYTES;

WEFT_PERMUTING WEFT_INLINE __m512i look_up(const uint8_t* table, __m512i places, __mmask64 is_upper) {
    __m512i lower = _mm512_permutex2var_epi8(load<__m512i>(table), places, load<__m512i>(table + 64));
    __m512i upper = _mm512_permutex2var_epi8(load<__m512i>(table + 128), places, load<__m512i>(table + 192));
    return _mm512_mask_blend_epi8(is_upper, lower, upper);
}

// A stream whose states are held in registers.
struct Permuting {
    Stream* stream;
    const Tables* tables;
    const uint16_t* next;
    const uint8_t* rest;
    uint16_t* out;
    __m128i symbol_bits;
    __m512i low[2], high[2], mask;

    WEFT_PERMUTING WEFT_INLINE void begin(Stream* of) {
        stream = of, tables = of->chunk->tables, next = of->next, rest = of->rest(0), out = of->chunk->out + of->done;
        symbol_bits = _mm_cvtsi32_si128(of->shape.symbol_bits()), mask = _mm512_set1_epi8(char(of->shape.symbols() - 1));
        for (int i = 0; i < 2; i++) low[i] = load<__m512i>(of->low + 32 * i), high[i] = load<__m512i>(of->high + 32 * i);
    }

    WEFT_PERMUTING WEFT_INLINE void end() {
        stream->next = next;
        for (int i = 0; i < 2; i++) store(stream->low + 32 * i, low[i]), store(stream->high + 32 * i, high[i]);
    }

    // Takes a turn's symbols out of the states; they come as words, in order.
    WEFT_PERMUTING WEFT_INLINE void decode(long at, __m512i* symbols) {
        __m512i position = _mm512_permutex2var_epi8(low[0], load<__m512i>(ORDERS_OF_BYTES.upper), low[1]);
        __m512i bucket = _mm512_permutex2var_epi8(low[0], load<__m512i>(ORDERS_OF_BYTES.lower), low[1]);
        __m512i classes = _mm512_permutexvar_epi8(load<__m512i>(ORDERS_OF_BYTES.elements), load<__m512i>(stream->classes + at));
        __m512i place = _mm512_or_si512(_mm512_and_si512(bucket, mask), classes);
        __mmask64 is_upper = _mm512_movepi8_mask(place);
        __mmask64 is_other = _mm512_cmpge_epu8_mask(position, look_up(tables->cut, place, is_upper));
        __m512i moved_low = _mm512_maskz_mov_epi8(is_other, look_up(tables->moved_low, place, is_upper));
        __m512i moved_high = _mm512_maskz_mov_epi8(is_other, look_up(tables->moved_high, place, is_upper));
        place = _mm512_mask_blend_epi8(is_other, place, look_up(tables->other, place, is_upper));
        is_upper = _mm512_movepi8_mask(place);
        __m512i share_low = look_up(tables->share_low, place, is_upper), share_high = look_up(tables->share_high, place, is_upper);
        move(0, _mm512_unpacklo_epi8(share_low, share_high), _mm512_unpacklo_epi8(moved_low, moved_high));
        move(1, _mm512_unpackhi_epi8(share_low, share_high), _mm512_unpackhi_epi8(moved_low, moved_high));
        place = _mm512_and_si512(place, mask);
        symbols[0] = _mm512_unpacklo_epi8(place, _mm512_setzero_si512());
        symbols[1] = _mm512_unpackhi_epi8(place, _mm512_setzero_si512());
    }

    // State = share * (state >> 16) + the slot's place within the symbol, and a word more where that is short.
    WEFT_PERMUTING WEFT_INLINE void move(int i, __m512i share, __m512i moved) {
        __m512i within = _mm512_add_epi16(_mm512_srl_epi16(low[i], symbol_bits), moved);
        __m512i lower = _mm512_add_epi16(_mm512_mullo_epi16(share, high[i]), within), upper = _mm512_mulhi_epu16(share, high[i]);
        __mmask32 carry = _mm512_cmplt_epu16_mask(lower, within);
        upper = _mm512_mask_sub_epi16(upper, carry, upper, _mm512_set1_epi16(-1));
        __mmask32 is_low = _mm512_testn_epi16_mask(upper, upper);
        high[i] = _mm512_mask_mov_epi16(upper, is_low, lower);
        low[i] = _mm512_mask_expand_epi16(lower, is_low, load<__m512i>(next));
        next += __builtin_popcount(is_low);
    }

    template <int Low>
    WEFT_PERMUTING WEFT_INLINE void turn(long at) {
        __m512i symbols[2];
        decode(at, symbols);
        const uint8_t* group = rest + at / GROUP * Half<Low>::GROUP_BYTES;
        __m512i bytes;
        uint64_t signs = 0;
        if (Low == 5) {
            const __m512i sixes = _mm512_set1_epi64(0x2A241E18120C0600);  // where each byte's bits begin among 48
            __m512i packed = _mm512_maskz_loadu_epi8((1ull << Half<5>::GROUP_BYTES) - 1, group);
            bytes = _mm512_multishift_epi64_epi8(sixes, _mm512_permutexvar_epi8(load<__m512i>(ORDERS_OF_BYTES.six), packed));
        } else {
            bytes = load<__m512i>(group), signs = load<uint64_t>(group + GROUP);
        }
        for (int i = 0; i < 2; i++) {
            __m512i bits = _mm512_cvtepu8_epi16(i ? _mm512_extracti64x4_epi64(bytes, 1) : _mm512_castsi512_si256(bytes));
            __m512i sign = Low == 5 ? _mm512_slli_epi16(bits, 10) : _mm512_maskz_set1_epi16(__mmask32(signs >> (32 * i)), short(0x8000));
            __m512i key = _mm512_add_epi16(symbols[i], load<__m512i>(stream->before + at + 32 * i));
            key = _mm512_maskz_slli_epi16(_mm512_test_epi16_mask(symbols[i], symbols[i]), key, Low);
            // the key's bits from the key, all others from sign and rest
            const __m512i keys = _mm512_set1_epi16(short(0x7FFF & (0xFFFF << Low)));
            store(out + at + 32 * i, _mm512_ternarylogic_epi32(keys, key, _mm512_or_si512(bits, sign), 0xCA));
        }
    }
};

bool can_permute() { return __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vbmi2"); }

// One stream's turn in the time that the other's waits; returns where they ended.
template <int N, int Low>
WEFT_PERMUTING long permuted_turns(Stream* streams, long from, long count) {
    Permuting at_work[N];
    for (int n = 0; n < N; n++) at_work[n].begin(streams + n);
    for (; from + LANES <= count; from += LANES) {
        bool has_words = true;
        for (int n = 0; n < N; n++) has_words &= streams[n].end - at_work[n].next >= LANES;
        if (!has_words) break;
#pragma GCC unroll 2
        for (int n = 0; n < N; n++) at_work[n].template turn<Low>(from);
    }
    for (int n = 0; n < N; n++) at_work[n].end();
    return from;
}

}  // namespace

#else
namespace {

bool can_permute() { return false; }

template <int N, int Low>
long permuted_turns(Stream*, long from, long) { return from; }

}  // namespace
#endif
