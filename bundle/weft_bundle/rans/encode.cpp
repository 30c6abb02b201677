// Encodes 16-bit floats to words and packed bits. format.h defines the parts of a weight.

#include "encode_vbmi.h"

namespace {

template <int Low>
void pack(uint8_t* rest, const uint16_t* values, long count) {
    for (; count >= GROUP; count -= GROUP, values += GROUP, rest += Half<Low>::GROUP_BYTES) Half<Low>::pack(rest, values);
    if (!count) return;
    uint16_t last[GROUP] = {};
    std::memcpy(last, values, 2 * size_t(count));
    Half<Low>::pack(rest, last);
}

struct Encoding {
    Coder coder;
    const Slots& slots;
    const int8_t *rows, *columns;
    const Shape& shape;
    bool is_plain;

    template <int Low>
    void encode(const uint16_t* values, uint8_t* rest) {
        alignas(LINE) int16_t contexts[BLOCK] = {};
        const Pairs of_places(slots.shares, slots.begins);
        const SlotBytes bytes(slots);
        const bool is_permuted = !is_plain && can_permute() && bytes.largest < MOST_SHARE;
        Block block;
        for (long at = (shape.count - 1) / BLOCK * BLOCK; at >= 0; at -= BLOCK) {
            long size = std::min(BLOCK, shape.count - at), whole = size / LANES * LANES, by_words = is_permuted ? whole : 0;
            for (long i = LINE / 2; at && i <= BLOCK; i += LINE / 2) __builtin_prefetch(values + at - i);
            if (shape.class_bits) fill_contexts(contexts, shape.first + at, size, rows, columns, shape);
            uint8_t* of_block = rest + at / GROUP * Half<Low>::GROUP_BYTES;
            const uint16_t* others = values + at + by_words;
            block.fill<Low>(others, contexts + by_words, size - by_words, of_places, shape);
            coder.code_slowly(block, whole - by_words, size - by_words, at + by_words);
            coder.code(block, whole - by_words, at + by_words);
            pack<Low>(of_block + by_words / GROUP * Half<Low>::GROUP_BYTES, others, size - by_words);
            if (is_permuted) code_permuted<Low>(coder, bytes, values + at, contexts, whole, at, shape, of_block);
        }
    }
};

}  // namespace

// Returns how many words it wrote, the last of them just before `words_end`; there is room for one for each element and
// 16 more. `escapes` has room for all elements and gets their number first, then the last one first.
WEFT_EXPORT long weft_rans_encode(const uint16_t* values, const Slots* slots, const uint16_t* grains,
                                  const int8_t* row_scales, const int8_t* column_scales, const long* shape_of, int is_bf16,
                                  int is_plain, uint32_t* states, uint16_t* words_end, uint8_t* rest, uint32_t* escapes) {
    Shape shape{shape_of[0], shape_of[1], shape_of[2], int(shape_of[3]), int(shape_of[4])};
    Encoding coding{{grains, shape.class_bits, {}, words_end, escapes + 1}, *slots, row_scales, column_scales, shape, bool(is_plain)};
    Coder& coder = coding.coder;
    std::fill(coder.states, coder.states + LANES, LOWEST);
    is_bf16 ? coding.encode<5>(values, rest) : coding.encode<8>(values, rest);
    std::memcpy(states, coder.states, sizeof coder.states);
    escapes[0] = uint32_t(coder.num_escapes);
    return words_end - coder.next;
}
