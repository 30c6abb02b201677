// From words and packed bits back to 16-bit floats. See format.h for what a weight is made of.

#include "format.h"

namespace {

struct Reader {
    const uint16_t *next, *end;
    bool is_short = false;
    uint32_t take() {
        if (next < end) return *next++;
        is_short = true;
        return 0;
    }
};

WEFT_INLINE uint32_t decode_one(uint32_t& state, uint32_t entry, Reader& words) {
    state = ((entry >> 8) & 0xFFF) * (state >> PRECISION) + (entry >> 20);
    if (state < LOWEST) state = state << 16 | words.take();
    return entry & 0xFF;
}

// The first `to` elements of a group, one at a time.
template <int Low>
void decode_slowly(uint32_t* states, const uint32_t* table, const int16_t* contexts, const uint8_t* rest, Reader& words,
                   uint16_t* out, int to, const Shape& shape) {
    for (int i = 0; i < to; i++) {
        uint32_t& state = states[i % LANES];
        uint32_t place = uint32_t(class_of(contexts[i], shape.class_bits)) << PRECISION | (state & (TOTAL - 1));
        uint32_t symbol = decode_one(state, table[place], words);
        out[i] = Half<Low>::join(symbol, contexts[i], Half<Low>::rest(rest, i), shape);
    }
}

#if WEFT_WIDTH == 16
template <int Low>
WEFT_INLINE __m512i rest_of_quarter(const uint8_t* group, int quarter) {
    auto bytes = [&](int i) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(group + 16 * i))); };
    if (Low == 8) {
        uint16_t signs;
        std::memcpy(&signs, group + 64 + 2 * quarter, 2);
        return _mm512_or_si512(bytes(quarter), _mm512_maskz_set1_epi32(signs, 256));
    }
    if (quarter < 3) return _mm512_and_si512(bytes(quarter), _mm512_set1_epi32(63));
    __m512i a = _mm512_srli_epi32(bytes(0), 6), b = _mm512_srli_epi32(bytes(1), 6), c = _mm512_srli_epi32(bytes(2), 6);
    return _mm512_or_si512(a, _mm512_or_si512(_mm512_slli_epi32(b, 2), _mm512_slli_epi32(c, 4)));
}

// One whole group; `words` must hold enough for every lane.
template <int Low>
WEFT_INLINE void decode_group(__m512i* states, const uint32_t* table, const int16_t* contexts, const uint8_t* rest,
                              Reader& words, uint16_t* out, const Shape& shape) {
    const __m512i low_mask = _mm512_set1_epi32((1 << Low) - 1), base = _mm512_set1_epi32(4 * shape.base);
#pragma GCC unroll 4
    for (int quarter = 0; quarter < 4; quarter++) {
        __m512i& state = states[quarter % 2];
        __m512i context = _mm512_cvtepi16_epi32(_mm256_loadu_si256((const __m256i*)(contexts + 16 * quarter)));
        __m512i kind = _mm512_srl_epi32(_mm512_and_si512(context, _mm512_set1_epi32(15)), _mm_cvtsi32_si128(4 - shape.class_bits));
        __m512i place = _mm512_or_si512(_mm512_slli_epi32(kind, PRECISION), _mm512_and_si512(state, _mm512_set1_epi32(TOTAL - 1)));
        __m512i entry = _mm512_i32gather_epi32(place, table, 4);
        __m512i share = _mm512_and_si512(_mm512_srli_epi32(entry, 8), _mm512_set1_epi32(0xFFF));
        state = _mm512_add_epi32(_mm512_mullo_epi32(share, _mm512_srli_epi32(state, PRECISION)), _mm512_srli_epi32(entry, 20));
        __mmask16 is_low = _mm512_cmplt_epu32_mask(state, _mm512_set1_epi32(LOWEST));
        __m512i fresh = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)words.next));
        state = _mm512_mask_or_epi32(state, is_low, _mm512_slli_epi32(state, 16), _mm512_maskz_expand_epi32(is_low, fresh));
        words.next += __builtin_popcount(is_low);
        __m512i symbol = _mm512_and_si512(entry, _mm512_set1_epi32(0xFF));
        __m512i key = _mm512_add_epi32(symbol, _mm512_add_epi32(_mm512_slli_epi32(_mm512_srai_epi32(context, 4), 2), base));
        __m512i bits = rest_of_quarter<Low>(rest, quarter);
        __m512i size = _mm512_or_si512(_mm512_slli_epi32(key, Low), _mm512_and_si512(bits, low_mask));
        size = _mm512_maskz_and_epi32(_mm512_cmpge_epu32_mask(symbol, _mm512_set1_epi32(FIRST)), size, _mm512_set1_epi32(0x7FFF));
        __m512i value = _mm512_or_si512(size, _mm512_slli_epi32(_mm512_srli_epi32(bits, Low), 15));
        _mm256_storeu_si256((__m256i*)(out + 16 * quarter), _mm512_cvtepi32_epi16(value));
    }
}

template <int Low>
long decode_groups(uint32_t* states, const uint32_t* table, const int16_t* contexts, const uint8_t* rest, Reader& words,
                   uint16_t* out, long count, const Shape& shape) {
    __m512i wide[2] = {_mm512_loadu_si512(states), _mm512_loadu_si512(states + 16)};
    long done = 0;
    for (; done + GROUP <= count && words.end - words.next >= GROUP + 16; done += GROUP) {
        decode_group<Low>(wide, table, contexts + done, rest + done / GROUP * Half<Low>::GROUP_BYTES, words, out + done, shape);
    }
    _mm512_storeu_si512(states, wide[0]);
    _mm512_storeu_si512(states + 16, wide[1]);
    return done;
}
#else
template <int Low>
long decode_groups(uint32_t*, const uint32_t*, const int16_t*, const uint8_t*, Reader&, uint16_t*, long, const Shape&) {
    return 0;
}
#endif

template <int Low>
int decode(const uint32_t* table, const int8_t* rows, const int8_t* columns, const Shape& shape, const uint32_t* first_states,
           Reader words, const uint8_t* rest, uint16_t* out) {
    uint32_t states[LANES];
    std::memcpy(states, first_states, sizeof states);
    int16_t contexts[BLOCK];
    for (long block = 0; block < shape.count; block += BLOCK) {
        long size = std::min(BLOCK, shape.count - block);
        fill_contexts(contexts, shape.first + block, size, rows, columns, shape);
        const uint8_t* block_rest = rest + block / GROUP * Half<Low>::GROUP_BYTES;
        long done = decode_groups<Low>(states, table, contexts, block_rest, words, out + block, size, shape);
        for (; done < size; done += GROUP) {
            int rows_left = int(std::min(long(GROUP), size - done));
            decode_slowly<Low>(states, table, contexts + done, block_rest + done / GROUP * Half<Low>::GROUP_BYTES, words,
                               out + block + done, rows_left, shape);
        }
    }
    bool is_whole = !words.is_short && words.next == words.end;
    for (uint32_t state : states) is_whole &= state == LOWEST;
    return is_whole;
}

}  // namespace

// Returns 1 where the words were used up and every state came back to where encoding began, 0 for anything else.
WEFT_EXPORT int weft_rans_decode(const uint32_t* table, const int8_t* row_scales, const int8_t* column_scales, const long* shape_of,
                                 int is_bf16, const uint32_t* states, const uint16_t* words, long num_words,
                                 const uint8_t* rest, uint16_t* out) {
    Shape shape{shape_of[0], shape_of[1], shape_of[2], int(shape_of[3]), int(shape_of[4])};
    Reader reader{words, words + num_words};
    return (is_bf16 ? decode<5> : decode<8>)(table, row_scales, column_scales, shape, states, reader, rest, out);
}
