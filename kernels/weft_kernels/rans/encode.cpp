// From 16-bit floats to words and packed bits, and what has to be counted before. See format.h.

#include "format.h"

namespace {

constexpr uint32_t SHARE = TOTAL - 1, ESCAPES = TOTAL;  // in a slot

struct Writer {
    uint32_t states[LANES];
    uint16_t* next;
    uint32_t* escapes;  // places of elements that are coded as escapes, counted through the chunk
    long num_escapes = 0;
};

// Elements [0, end) of a group that begins at element `at` of the chunk, last one first. A slot, one for each class and
// symbol, holds share | start << 16, and ESCAPES where the symbol is an escape or has no share and becomes one.
template <int Low>
void encode_slowly(Writer& to, const uint32_t* slots, const int16_t* contexts, const uint16_t* values, int end, long at,
                   const Shape& shape) {
    for (int i = end - 1; i >= 0; i--) {
        uint32_t slot = slots[class_of(contexts[i], shape.class_bits) * SYMBOLS + Half<Low>::symbol(values[i], contexts[i], shape)];
        if (slot & ESCAPES) to.escapes[to.num_escapes++] = uint32_t(at + i);
        uint32_t share = slot & SHARE, &state = to.states[i % LANES];
        if (state >= uint64_t(share) << (32 - PRECISION)) {
            *--to.next = uint16_t(state);
            state >>= 16;
        }
        state = (state / share << PRECISION) + state % share + (slot >> 16);
    }
}

template <int Low>
void pack_slowly(uint8_t* rest, const uint16_t* values, int count) {
    std::memset(rest, 0, Half<Low>::GROUP_BYTES);
    for (int i = 0; i < count; i++) {
        Half<Low>::put_rest(rest, i, (values[i] & ((1u << Low) - 1)) | uint32_t(values[i] >> 15) << Low);
    }
}

#if WEFT_WIDTH == 16
WEFT_INLINE __m512i divide(__m512i a, __m512i b) {
    // Doubles hold both exactly, and no quotient of theirs rounds up to the next whole number.
    auto half = [](__m256i x, __m256i y) { return _mm512_cvttpd_epu32(_mm512_div_pd(_mm512_cvtepu32_pd(x), _mm512_cvtepu32_pd(y))); };
    __m256i low = half(_mm512_castsi512_si256(a), _mm512_castsi512_si256(b));
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), half(_mm512_extracti64x4_epi64(a, 1), _mm512_extracti64x4_epi64(b, 1)), 1);
}

template <int Low>
WEFT_INLINE void encode_group(Writer& to, const uint32_t* slots, const int16_t* contexts, const uint16_t* values, long at,
                              const Shape& shape) {
#pragma GCC unroll 4
    for (int quarter = 3; quarter >= 0; quarter--) {
        __m512i context = _mm512_cvtepi16_epi32(_mm256_loadu_si256((const __m256i*)(contexts + 16 * quarter)));
        __m512i size = _mm512_and_si512(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(values + 16 * quarter))), _mm512_set1_epi32(0x7FFF));
        __m512i moved = _mm512_slli_epi32(_mm512_add_epi32(_mm512_srai_epi32(context, 4), _mm512_set1_epi32(shape.base)), 2);
        __m512i key = _mm512_sub_epi32(_mm512_srli_epi32(size, Low), moved);
        __mmask16 fits = _mm512_cmplt_epu32_mask(_mm512_sub_epi32(key, _mm512_set1_epi32(FIRST)), _mm512_set1_epi32(SYMBOLS - FIRST));
        __m512i symbol = _mm512_mask_blend_epi32(fits, _mm512_set1_epi32(ESCAPE), key);
        symbol = _mm512_maskz_mov_epi32(_mm512_test_epi32_mask(size, size), symbol);
        __m512i kind = _mm512_srl_epi32(_mm512_and_si512(context, _mm512_set1_epi32(15)), _mm_cvtsi32_si128(4 - shape.class_bits));
        __m512i slot = _mm512_i32gather_epi32(_mm512_or_si512(_mm512_slli_epi32(kind, 8), symbol), slots, 4);
        __mmask16 escapes = _mm512_test_epi32_mask(slot, _mm512_set1_epi32(ESCAPES));
        for (uint32_t rest = escapes; rest; rest &= rest - 1) {
            to.escapes[to.num_escapes++] = uint32_t(at + 16 * quarter + __builtin_ctz(rest));
        }
        __m512i share = _mm512_and_si512(slot, _mm512_set1_epi32(SHARE));
        __m512i state = _mm512_loadu_si512(to.states + 16 * (quarter % 2));
        // state >= share << 20, for shares of 12 bits without a bit too many
        __mmask16 is_full = _mm512_cmpge_epu32_mask(_mm512_srli_epi32(state, 32 - PRECISION), share);
        to.next -= __builtin_popcount(is_full);
        __m512i spilled = _mm512_maskz_compress_epi32(is_full, state);
        _mm512_mask_cvtepi32_storeu_epi16(to.next, __mmask16((1u << __builtin_popcount(is_full)) - 1), spilled);
        state = _mm512_mask_srli_epi32(state, is_full, state, 16);
        __m512i quotient = divide(state, share);
        __m512i remainder = _mm512_sub_epi32(state, _mm512_mullo_epi32(quotient, share));
        state = _mm512_add_epi32(_mm512_slli_epi32(quotient, PRECISION), _mm512_add_epi32(remainder, _mm512_srli_epi32(slot, 16)));
        _mm512_storeu_si512(to.states + 16 * (quarter % 2), state);
    }
}

template <int Low>
WEFT_INLINE void pack_group(uint8_t* rest, const uint16_t* values) {
    __m512i bits[4];
    for (int quarter = 0; quarter < 4; quarter++) {
        __m512i value = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(values + 16 * quarter)));
        __m512i low = _mm512_and_si512(value, _mm512_set1_epi32((1 << Low) - 1));
        bits[quarter] = _mm512_or_si512(low, _mm512_slli_epi32(_mm512_srli_epi32(value, 15), Low));
        if (Low == 8) {
            uint16_t signs = _mm512_test_epi32_mask(bits[quarter], _mm512_set1_epi32(256));
            std::memcpy(rest + 64 + 2 * quarter, &signs, 2);
        }
    }
    for (int quarter = 0; quarter < (Low == 8 ? 4 : 3); quarter++) {
        __m512i spare = _mm512_and_si512(_mm512_srl_epi32(bits[3], _mm_cvtsi32_si128(2 * quarter)), _mm512_set1_epi32(3));
        __m512i byte = Low == 8 ? bits[quarter] : _mm512_or_si512(bits[quarter], _mm512_slli_epi32(spare, 6));
        _mm_storeu_si128((__m128i*)(rest + 16 * quarter), _mm512_cvtepi32_epi8(byte));
    }
}
#else
template <int Low>
void encode_group(Writer& to, const uint32_t* slots, const int16_t* contexts, const uint16_t* values, long at, const Shape& shape) {
    encode_slowly<Low>(to, slots, contexts, values, GROUP, at, shape);
}

template <int Low>
void pack_group(uint8_t* rest, const uint16_t* values) {
    pack_slowly<Low>(rest, values, GROUP);
}
#endif

template <int Low>
void encode(Writer& to, const uint16_t* values, const uint32_t* slots, const int8_t* rows, const int8_t* columns,
            const Shape& shape, uint8_t* rest) {
    int16_t contexts[BLOCK];
    for (long block = (shape.count - 1) / BLOCK * BLOCK; block >= 0; block -= BLOCK) {
        long size = std::min(BLOCK, shape.count - block);
        fill_contexts(contexts, shape.first + block, size, rows, columns, shape);
        for (long group = (size - 1) / GROUP * GROUP; group >= 0; group -= GROUP) {
            const uint16_t* of_group = values + block + group;
            uint8_t* rest_of_group = rest + (block + group) / GROUP * Half<Low>::GROUP_BYTES;
            int count = int(std::min(long(GROUP), size - group));
            if (count == GROUP) {
                pack_group<Low>(rest_of_group, of_group);
                encode_group<Low>(to, slots, contexts + group, of_group, block + group, shape);
            } else {
                pack_slowly<Low>(rest_of_group, of_group, count);
                encode_slowly<Low>(to, slots, contexts + group, of_group, count, block + group, shape);
            }
        }
    }
}

// 1,152 keys a class: 1,024 of BF16, moved by at most 16 octaves either way; the last one counts zeros.
constexpr int KEYS = 1153, COUNT_OFFSET = 64, TABLES = 4;

template <int Low>
void count(const uint16_t* values, const int8_t* rows, const int8_t* columns, long num_rows, const Shape& shape, uint64_t* out) {
    // Several tables, since adding to one place twice in a row has to wait.
    const int places = KEYS << shape.class_bits;
    std::vector<uint64_t> tables(size_t(TABLES) * places);
    int16_t contexts[BLOCK];
    uint16_t place[BLOCK];
    for (long block = 0; block < num_rows * shape.columns; block += BLOCK) {
        long size = std::min(BLOCK, num_rows * shape.columns - block);
        fill_contexts(contexts, block, size, rows, columns, shape);
        for (long i = 0; i < size; i++) {
            int bits = values[block + i] & 0x7FFF, key = (bits >> Low) - 4 * (contexts[i] >> 4) + COUNT_OFFSET;
            place[i] = uint16_t(class_of(contexts[i], shape.class_bits) * KEYS + (bits ? key : KEYS - 1));
        }
        for (long i = 0; i < size; i++) tables[size_t(i % TABLES) * places + place[i]]++;
    }
    for (int i = 0; i < TABLES * places; i++) out[i % places] += tables[i];
}

WEFT_INLINE float square(uint16_t value, bool is_bf16) {
    uint32_t word = is_bf16 ? uint32_t(value & 0x7FFF) << 16 : uint32_t(value & 0x7FFF) << 13;
    float wide;
    std::memcpy(&wide, &word, 4);
    wide = is_bf16 ? wide : wide * 0x1p112f;
    return wide < 1e15f ? wide * wide : 0.0f;  // infinities and NaN say nothing about a scale
}

}  // namespace

// sums[i] = sum over j of value[i, j]^2 * weights[j]; or, by columns, sums[j] = sum over i of value[i, j]^2 * weights[i].
WEFT_EXPORT void weft_rans_squares(const uint16_t* values, long rows, long columns, int is_bf16, int by_columns,
                                   const float* weights, float* sums) {
    for (long i = 0; i < rows; i++) {
        const uint16_t* row = values + i * columns;
        if (by_columns) {
            for (long j = 0; j < columns; j++) sums[j] += square(row[j], is_bf16) * weights[i];
        } else {
            float parts[16] = {};
            long j = 0;
            for (; j + 16 <= columns; j += 16) {
                for (int k = 0; k < 16; k++) parts[k] += square(row[j + k], is_bf16) * weights[j + k];
            }
            for (; j < columns; j++) parts[0] += square(row[j], is_bf16) * weights[j];
            for (float part : parts) sums[i] += part;
        }
    }
}

WEFT_EXPORT void weft_rans_count(const uint16_t* values, const int8_t* row_scales, const int8_t* column_scales, long rows,
                                 long columns, int class_bits, int is_bf16, uint64_t* counts) {
    Shape shape{0, 0, columns, 0, class_bits};
    (is_bf16 ? count<5> : count<8>)(values, row_scales, column_scales, rows, shape, counts);
}

// Returns how many words it wrote, the last of them just before `words_end`; see encode_slowly for `slots`. `escapes` has
// room for all elements and gets their number first.
WEFT_EXPORT long weft_rans_encode(const uint16_t* values, const uint32_t* slots, const int8_t* row_scales,
                                  const int8_t* column_scales, const long* shape_of, int is_bf16, uint32_t* states,
                                  uint16_t* words_end, uint8_t* rest, uint32_t* escapes) {
    Shape shape{shape_of[0], shape_of[1], shape_of[2], int(shape_of[3]), int(shape_of[4])};
    Writer to{{}, words_end, escapes + 1};
    std::fill(to.states, to.states + LANES, LOWEST);
    (is_bf16 ? encode<5> : encode<8>)(to, values, slots, row_scales, column_scales, shape, rest);
    std::memcpy(states, to.states, sizeof to.states);
    escapes[0] = uint32_t(to.num_escapes);
    return words_end - to.next;
}
