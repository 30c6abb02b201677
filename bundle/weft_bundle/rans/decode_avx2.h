// Whole turns of all lanes for processors that cannot permute bytes of several registers: AVX2. A state is two halves in
// vectors of 16-bit words, as in decode_vbmi.h; buckets are loaded one by one, with all that is known of them.

#pragma once

#include "stream.h"

namespace {

constexpr int PART = 16;  // lanes of a vector

static_assert(LANES % PART == 0 && GROUP == LANES, "a turn is whole vectors, and a group");

// For each mask of eight lanes: which bytes of the words that follow one another each lane takes.
struct Spreads {
    alignas(16) uint8_t bytes[256][16];
    constexpr Spreads() : bytes() {
        for (int mask = 0; mask < 256; mask++) {
            int taken = 0;
            for (int lane = 0; lane < 8; lane++) {
                bool is_fresh = mask >> lane & 1;
                bytes[mask][2 * lane] = uint8_t(is_fresh ? 2 * taken : 0x80);
                bytes[mask][2 * lane + 1] = uint8_t(is_fresh ? 2 * taken + 1 : 0x80);
                taken += is_fresh;
            }
        }
    }
};
constexpr Spreads SPREADS;

WEFT_INLINE __m256i where(__m256i mask, __m256i a, __m256i b) { return _mm256_blendv_epi8(b, a, mask); }

// Of two buckets, in the halves of a register.
WEFT_INLINE __m128i two_buckets(const Bucket* buckets, uint64_t first, uint64_t second) {
    __m128i lower = _mm_loadl_epi64((const __m128i*)(buckets + (first & 0xFFFF)));
    return _mm_castps_si128(_mm_loadh_pi(_mm_castsi128_ps(lower), (const __m64*)(buckets + (second & 0xFFFF))));
}

// Buckets of 16 lanes, which lie in a register each: i, i + 4, i + 8 and i + 12.
struct Found {
    __m256i rows[PART / 4];
};

WEFT_INLINE Found look_up(const Bucket* buckets, __m256i place) {
    Found found;
    alignas(LINE) uint64_t fours[PART / 4];
    store(fours, place);
#pragma GCC unroll 4
    for (int i = 0; i < PART / 4; i++) {
        __m128i lower = two_buckets(buckets, fours[0] >> 16 * i, fours[1] >> 16 * i);
        found.rows[i] = _mm256_set_m128i(two_buckets(buckets, fours[2] >> 16 * i, fours[3] >> 16 * i), lower);
    }
    return found;
}

// Their four fields.
WEFT_INLINE void turn_around(const __m256i* rows, __m256i* fields) {
    __m256i pairs[4], quads[4];
    for (int i = 0; i < 2; i++) {
        pairs[i] = _mm256_unpacklo_epi16(rows[2 * i], rows[2 * i + 1]);
        pairs[2 + i] = _mm256_unpackhi_epi16(rows[2 * i], rows[2 * i + 1]);
    }
    for (int i = 0; i < 2; i++) {  // of the lower four lanes, then of the upper ones
        quads[2 * i] = _mm256_unpacklo_epi32(pairs[2 * i], pairs[2 * i + 1]);
        quads[2 * i + 1] = _mm256_unpackhi_epi32(pairs[2 * i], pairs[2 * i + 1]);
    }
    for (int i = 0; i < 2; i++) {
        fields[2 * i] = _mm256_unpacklo_epi64(quads[i], quads[2 + i]);
        fields[2 * i + 1] = _mm256_unpackhi_epi64(quads[i], quads[2 + i]);
    }
}

// The words from `next` on, one for each lane of `mask`, in the others zero. Reads 8 words more than the lower lanes take.
WEFT_INLINE __m256i spread(const uint16_t*& next, __m256i mask) {
    uint32_t lanes = uint32_t(_mm_movemask_epi8(_mm_packs_epi16(_mm256_castsi256_si128(mask), _mm256_extracti128_si256(mask, 1))));
    const uint16_t* upper = next + __builtin_popcount(lanes & 0xFF);
    __m256i words = _mm256_set_m128i(load<__m128i>(upper), load<__m128i>(next));
    __m256i from = _mm256_set_m128i(load<__m128i>(SPREADS.bytes[lanes >> 8]), load<__m128i>(SPREADS.bytes[lanes & 0xFF]));
    next += __builtin_popcount(lanes);
    return _mm256_shuffle_epi8(words, from);
}

// Low bits, and the sign where it belongs, of 16 elements of a group.
template <int Low>
WEFT_INLINE __m256i rest_of(const uint8_t* group, int part) {
    if (Low == 8) {
        const __m256i bit = _mm256_setr_epi16(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, short(0x8000));
        __m256i signs = _mm256_and_si256(_mm256_set1_epi16(load<short>(group + GROUP + 2 * part)), bit);
        signs = _mm256_slli_epi16(_mm256_cmpeq_epi16(signs, bit), 15);
        return _mm256_or_si256(signs, _mm256_cvtepu8_epi16(load<__m128i>(group + PART * part)));
    }
    // The two bytes in which each one's six bits lie; twelve bytes hold 16 of them, and nothing beyond the group is read.
    const __m256i pairs = _mm256_setr_epi8(0, 1, 0, 1, 1, 2, 2, 3, 3, 4, 3, 4, 4, 5, 5, 6,  //
                                           6, 7, 6, 7, 7, 8, 8, 9, 9, 10, 9, 10, 10, 11, 11, 12);
    const __m256i to_top = _mm256_set1_epi64x(1ll << (10 - 2) << 48 | 1ll << (10 - 4) << 32 | 1ll << (10 - 6) << 16 | 1 << 10);
    int spare = part == 3 ? 4 : 0;
    __m256i packed = _mm256_broadcastsi128_si256(load<__m128i>(group + 12 * part - spare));
    __m256i six = _mm256_shuffle_epi8(packed, _mm256_add_epi8(pairs, _mm256_set1_epi8(char(spare))));
    six = _mm256_mullo_epi16(six, to_top);
    __m256i low = _mm256_and_si256(_mm256_srli_epi16(six, 10), _mm256_set1_epi16(31));
    return _mm256_or_si256(_mm256_and_si256(six, _mm256_set1_epi16(short(0x8000))), low);
}

// States of 16 lanes that have moved, where they do not need a word; and the symbols that were in them.
struct Moved {
    __m256i lower, is_low, symbols;
};

// Takes symbols out of a stream's states and joins them with what was not coded: 16 lanes at a time, in three steps.
template <int Low>
struct Shuffling {
    Stream* stream;
    const uint16_t* next;
    const uint8_t* group;
    uint16_t* out;
    __m128i symbol_bits;
    __m256i mask;

    WEFT_INLINE Shuffling(Stream* of, long from)
        : stream(of), next(of->next), group(of->rest(from)), out(of->chunk->out + of->done + from),
          symbol_bits(_mm_cvtsi32_si128(of->shape.symbol_bits())), mask(_mm256_set1_epi16(short(of->shape.symbols() - 1))) {}

    WEFT_INLINE Found find(int lane, long at) const {
        __m256i own = _mm256_and_si256(load<__m256i>(stream->low + lane), mask);
        return look_up(stream->buckets, _mm256_or_si256(own, _mm256_cvtepu8_epi16(load<__m128i>(stream->classes + at + lane))));
    }

    WEFT_INLINE Moved move(int lane, const Found& found) const {
        __m256i low = load<__m256i>(stream->low + lane), high = load<__m256i>(stream->high + lane), fields[4];
        turn_around(found.rows, fields);
        __m256i cut = _mm256_and_si256(fields[3], _mm256_set1_epi16(0xFF));
        __m256i is_own = _mm256_cmpgt_epi16(cut, _mm256_srli_epi16(low, 8));
        __m256i share = where(is_own, fields[0], fields[1]), moved = _mm256_andnot_si256(is_own, fields[2]);
        __m256i within = _mm256_add_epi16(_mm256_srl_epi16(low, symbol_bits), moved);
        __m256i lower = _mm256_add_epi16(_mm256_mullo_epi16(share, high), within), upper = _mm256_mulhi_epu16(share, high);
        __m256i is_carry_free = _mm256_cmpeq_epi16(_mm256_max_epu16(lower, within), lower);
        upper = _mm256_add_epi16(_mm256_add_epi16(upper, is_carry_free), _mm256_set1_epi16(1));
        __m256i is_low = _mm256_cmpeq_epi16(upper, _mm256_setzero_si256());
        store(stream->high + lane, _mm256_or_si256(upper, _mm256_and_si256(is_low, lower)));
        __m256i symbols = where(is_own, _mm256_and_si256(low, mask), _mm256_srli_epi16(fields[3], 8));
        return {_mm256_andnot_si256(is_low, lower), is_low, symbols};
    }

    WEFT_INLINE void finish(int lane, const Moved& moved, long at) {
        store(stream->low + lane, _mm256_or_si256(moved.lower, spread(next, moved.is_low)));
        __m256i key = _mm256_slli_epi16(_mm256_add_epi16(moved.symbols, load<__m256i>(stream->before + at + lane)), Low);
        __m256i is_none = _mm256_cmpeq_epi16(moved.symbols, _mm256_setzero_si256());
        key = _mm256_andnot_si256(is_none, _mm256_and_si256(key, _mm256_set1_epi16(0x7FFF)));
        store(out + lane, _mm256_or_si256(key, rest_of<Low>(group, lane / PART)));
    }

    // `found`: of the first lanes, then of the next turn's. Each step waits for what it loads: those of three parts go on
    // side by side, as far as processors look ahead.
    WEFT_INLINE void turn(long at, Found& found) {
        fetch_ahead<Low>(out, group, next);
        Moved before;
#pragma GCC unroll 4
        for (int lane = 0; lane < LANES; lane += PART) {
            bool is_last = lane + PART == LANES;
            Found then = is_last ? find(0, at + LANES) : find(lane + PART, at);
            Moved moved = move(lane, found);
            if (lane) finish(lane - PART, before, at);
            before = moved, found = then;
        }
        finish(LANES - PART, before, at);
        group += Half<Low>::GROUP_BYTES, out += LANES;
    }
};

// Whole turns of a stream; returns where they ended.
template <int Low>
long shuffled_turns(Stream& stream, long from, long count) {
    Shuffling<Low> at_work(&stream, from);
    Found found = at_work.find(0, from);
    for (; from + LANES <= count && stream.end - at_work.next >= LANES; from += LANES) at_work.turn(from, found);
    stream.next = at_work.next;
    return from;
}

}  // namespace
