// From 16-bit floats to words and packed bits. See format.h for what a weight is made of.

#include "lanes.h"

namespace {

constexpr uint32_t SHARE = TOTAL - 1, ESCAPES = TOTAL;  // in a slot

// Where a slot of each element lies: one for each class and symbol.
template <int Low>
void find_places(uint16_t* places, const int16_t* contexts, const uint16_t* values, long count, const Shape& shape) {
    const int spare = 4 - shape.class_bits, base = shape.base;
    for (long i = 0; i < count; i++) {
        uint16_t size = values[i] & 0x7FFF, key = uint16_t((size >> Low) - 4 * ((contexts[i] >> 4) + base));
        uint16_t symbol = uint16_t(key - FIRST) < SYMBOLS - FIRST ? key : uint16_t(ESCAPE);
        places[i] = uint16_t(((contexts[i] & 15) >> spare) * SYMBOLS + (size ? symbol : uint16_t(ZERO)));
    }
}

// A slot holds share | start << 16, and ESCAPES where the symbol is an escape or has no share and becomes one.
struct Coder {
    const uint32_t* slots;
    uint32_t states[LANES];
    uint16_t* next;     // the word that was written last: they come backwards
    uint32_t* escapes;  // places in the chunk of elements that are coded as escapes, the last one first
    long num_escapes = 0;

    void escape(uint32_t lanes, long at) {
        for (; lanes; lanes &= ~(1u << (31 - __builtin_clz(lanes)))) escapes[num_escapes++] = uint32_t(at + 31 - __builtin_clz(lanes));
    }

    // Elements [0, end) of a turn of all lanes that begins at element `at` of the chunk, the last one first.
    void code_slowly(const uint16_t* places, int end, long at) {
        for (int i = end - 1; i >= 0; i--) {
            uint32_t slot = slots[places[i]], share = slot & SHARE, &state = states[i];
            if (slot & ESCAPES) escape(1, at + i);
            if (state >= uint64_t(share) << (32 - PRECISION)) {
                *--next = uint16_t(state);
                state >>= 16;
            }
            state = (state / share << PRECISION) + state % share + (slot >> 16);
        }
    }

    // Whole turns, the last one first; there is room for W words before the first one.
    void code(const uint16_t* places, long count, long at) {
        Words state[LANES / W];
        std::memcpy(state, states, sizeof state);
        for (long turn = count - LANES; turn >= 0; turn -= LANES) {
#pragma GCC unroll 4
            for (int part = LANES / W - 1; part >= 0; part--) state[part] = step(state[part], places + turn + part * W, at + turn + part * W);
        }
        std::memcpy(states, state, sizeof state);
    }

    WEFT_INLINE Words step(Words state, const uint16_t* places, long at) {
        Words slot = look_up(slots, places), share = slot & SHARE;
        if (uint32_t lanes = bits_of(at_least(slot & ESCAPES, Words{} + 1))) escape(lanes, at);
        // state >= share << 20, for shares of 12 bits without a bit too many
        Mask is_full = at_least(state >> (32 - PRECISION), share);
        put_before(next, is_full, state);
        next -= __builtin_popcount(bits_of(is_full));
        state = where(is_full, state >> 16, state);
        Words whole = quotient(state, share), rest = state - whole * share;
        Words next_state = (whole << PRECISION) + rest + (slot >> 16);
        return where(at_least(rest, share), next_state + (TOTAL - share), next_state);
    }
};

template <int Low>
void pack_slowly(uint8_t* rest, const uint16_t* values, int count) {
    std::memset(rest, 0, Half<Low>::GROUP_BYTES);
    for (int i = 0; i < count; i++) {
        Half<Low>::put_rest(rest, i, (values[i] & ((1u << Low) - 1)) | uint32_t(values[i] >> 15) << Low);
    }
}

template <int Low>
WEFT_INLINE void pack_group(uint8_t* rest, const uint16_t* values) {
    Bytes parts[GROUP / PART];
    for (int part = 0; part < GROUP / PART; part++) {
        Shorts value = load<Shorts>(values + PART * part);
        parts[part] = bytes_of((value & uint16_t((1 << Low) - 1)) | (Low < 8 ? (value >> 15) << Low : Shorts{}));
    }
    if (Low == 8) {
        std::memcpy(rest, parts, GROUP);
        for (int eight = 0; eight < 8; eight++) {
            __m128i value = _mm_loadu_si128((const __m128i*)(values + 8 * eight));
            rest[GROUP + eight] = uint8_t(_mm_movemask_epi8(_mm_packs_epi16(value, value)));
        }
    } else {
        __m128i quarters[4];
        std::memcpy(quarters, parts, sizeof quarters);
        for (int third = 0; third < 3; third++) {
            __m128i spare = _mm_and_si128(_mm_srl_epi16(quarters[3], _mm_cvtsi32_si128(2 * third)), _mm_set1_epi8(3));
            store(rest + 16 * third, _mm_or_si128(quarters[third], _mm_slli_epi16(spare, 6)));
        }
    }
}

template <int Low>
void pack(uint8_t* rest, const uint16_t* values, long count) {
    for (; count >= GROUP; count -= GROUP, values += GROUP, rest += Half<Low>::GROUP_BYTES) pack_group<Low>(rest, values);
    if (count) pack_slowly<Low>(rest, values, int(count));
}

template <int Low>
void encode(Coder& coder, const uint16_t* values, const int8_t* rows, const int8_t* columns, const Shape& shape, uint8_t* rest) {
    int16_t contexts[BLOCK];
    uint16_t places[BLOCK];
    for (long block = (shape.count - 1) / BLOCK * BLOCK; block >= 0; block -= BLOCK) {
        long size = std::min(BLOCK, shape.count - block), whole = size / LANES * LANES;
        for (long i = LINE / 2; block && i <= BLOCK; i += LINE / 2) __builtin_prefetch(values + block - i);
        fill_contexts(contexts, shape.first + block, size, rows, columns, shape);
        find_places<Low>(places, contexts, values + block, size, shape);
        coder.code_slowly(places + whole, int(size - whole), block + whole);
        coder.code(places, whole, block);
        pack<Low>(rest + block / GROUP * Half<Low>::GROUP_BYTES, values + block, size);
    }
}

}  // namespace

// Returns how many words it wrote, the last of them just before `words_end`; there is room for one for each element and
// 16 more. See Coder for `slots`. `escapes` has room for all elements and gets their number first, then the last one first.
WEFT_EXPORT long weft_rans_encode(const uint16_t* values, const uint32_t* slots, const int8_t* row_scales,
                                  const int8_t* column_scales, const long* shape_of, int is_bf16, uint32_t* states,
                                  uint16_t* words_end, uint8_t* rest, uint32_t* escapes) {
    Shape shape{shape_of[0], shape_of[1], shape_of[2], int(shape_of[3]), int(shape_of[4])};
    Coder coder{slots, {}, words_end, escapes + 1};
    std::fill(coder.states, coder.states + LANES, LOWEST);
    (is_bf16 ? encode<5> : encode<8>)(coder, values, row_scales, column_scales, shape, rest);
    std::memcpy(states, coder.states, sizeof coder.states);
    escapes[0] = uint32_t(coder.num_escapes);
    return words_end - coder.next;
}
