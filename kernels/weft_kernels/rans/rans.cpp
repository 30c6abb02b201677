// 16-bit floats as symbols of an entropy coder and bits that are left as they are: interleaved rANS, exact both ways.
//
// A weight is sign, key (exponent and the two highest bits of the mantissa) and low bits. The key, less the power of
// two that its row and column suggest, is the symbol; the fraction of that power chooses one of the tables. Sign and
// low bits are noise and are packed. See reference.py for the format, docs/bundles.md for the file around it.

#include "../native/vector.h"

#include <algorithm>
#include <vector>

using namespace weft;

namespace {

constexpr int LANES = 32, GROUP = 64, PRECISION = 12, SYMBOLS = 256;
constexpr uint32_t LOWEST = 1u << 16, TOTAL = 1u << PRECISION;
constexpr int ZERO = 0, ESCAPE = 1, FIRST = 4;  // symbols below FIRST stand for no key
constexpr long BLOCK = 4096;                     // elements whose contexts are worked out at a time

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
    static WEFT_INLINE int symbol(uint16_t value, int context, const Shape& shape) {
        if (!(value & 0x7FFF)) return ZERO;
        int key = ((value & 0x7FFF) >> Low) - 4 * ((context >> 4) + shape.base);
        return key >= FIRST && key < SYMBOLS ? key : ESCAPE;
    }
};

WEFT_INLINE int class_of(int context, int bits) { return (context & 15) >> (4 - bits); }

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

struct Writer {
    uint32_t states[LANES];
    uint16_t* next;
};

// Elements [from, end) of a group, last one first; slots hold share | start << 16 for each class and symbol.
template <int Low>
void encode_slowly(Writer& to, const uint32_t* slots, const int16_t* contexts, const uint16_t* values, int from, int end,
                   const Shape& shape) {
    for (int i = end - 1; i >= from; i--) {
        uint32_t slot = slots[class_of(contexts[i], shape.class_bits) * SYMBOLS + Half<Low>::symbol(values[i], contexts[i], shape)];
        uint32_t share = slot & 0xFFFF, &state = to.states[i % LANES];
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
WEFT_INLINE void encode_group(Writer& to, const uint32_t* slots, const int16_t* contexts, const uint16_t* values, const Shape& shape) {
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
        __m512i share = _mm512_and_si512(slot, _mm512_set1_epi32(0xFFFF));
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
void encode_group(Writer& to, const uint32_t* slots, const int16_t* contexts, const uint16_t* values, const Shape& shape) {
    encode_slowly<Low>(to, slots, contexts, values, 0, GROUP, shape);
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
                encode_group<Low>(to, slots, contexts + group, of_group, shape);
            } else {
                pack_slowly<Low>(rest_of_group, of_group, count);
                encode_slowly<Low>(to, slots, contexts + group, of_group, 0, count, shape);
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

// Returns how many words it wrote, the last of them just before `words_end`; `slots` are shares | starts << 16.
WEFT_EXPORT long weft_rans_encode(const uint16_t* values, const uint32_t* slots, const int8_t* row_scales,
                                  const int8_t* column_scales, const long* shape_of, int is_bf16, uint32_t* states,
                                  uint16_t* words_end, uint8_t* rest) {
    Shape shape{shape_of[0], shape_of[1], shape_of[2], int(shape_of[3]), int(shape_of[4])};
    Writer to{{}, words_end};
    std::fill(to.states, to.states + LANES, LOWEST);
    (is_bf16 ? encode<5> : encode<8>)(to, values, slots, row_scales, column_scales, shape, rest);
    std::memcpy(states, to.states, sizeof to.states);
    return words_end - to.next;
}

// Returns 1 where the words were used up and every state came back to where encoding began, 0 for anything else.
WEFT_EXPORT int weft_rans_decode(const uint32_t* table, const int8_t* row_scales, const int8_t* column_scales, const long* shape_of,
                                 int is_bf16, const uint32_t* states, const uint16_t* words, long num_words,
                                 const uint8_t* rest, uint16_t* out) {
    Shape shape{shape_of[0], shape_of[1], shape_of[2], int(shape_of[3]), int(shape_of[4])};
    Reader reader{words, words + num_words};
    return (is_bf16 ? decode<5> : decode<8>)(table, row_scales, column_scales, shape, states, reader, rest, out);
}
