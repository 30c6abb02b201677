// What has to be known of a tensor before it is coded: how loud its rows and columns are, and how often each key stands
// in it. See format.h.

#include "format.h"

namespace {

// 1,152 keys a class: 1,024 of BF16, moved by at most 16 octaves either way; the last one counts zeros.
constexpr int KEYS = 1153, COUNT_OFFSET = 64, TABLES = 4, COLUMN_BLOCK = 64;
constexpr long FLUSH = 1 << 16;  // blocks after which 32 bits could be too few

template <int Low>
void count(const uint16_t* values, const int8_t* rows, const int8_t* columns, long num_rows, const Shape& shape, uint64_t* out) {
    // Several tables, since adding to one place twice in a row has to wait; small ones, so that they stay close.
    const int places = KEYS << shape.class_bits;
    std::vector<uint32_t> tables(size_t(TABLES) * places);
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
        if ((block / BLOCK + 1) % FLUSH && block + size < num_rows * shape.columns) continue;
        for (int i = 0; i < TABLES * places; i++) out[i % places] += tables[i];
        std::fill(tables.begin(), tables.end(), 0u);
    }
}

WEFT_INLINE float square(uint16_t value, bool is_bf16) {
    uint32_t word = is_bf16 ? uint32_t(value & 0x7FFF) << 16 : uint32_t(value & 0x7FFF) << 13;
    float wide;
    std::memcpy(&wide, &word, 4);
    wide = is_bf16 ? wide : wide * 0x1p112f;
    return wide < 1e15f ? wide * wide : 0.0f;  // infinities and NaN say nothing about a scale
}

}  // namespace

// sums[i] = sum over j of value[i, j]^2 * weights[j], over every so many blocks of columns.
WEFT_EXPORT void weft_rans_row_squares(const uint16_t* values, long rows, long columns, long every, int is_bf16,
                                       const float* weights, float* sums) {
    for (long i = 0; i < rows; i++) {
        const uint16_t* row = values + i * columns;
        float parts[COLUMN_BLOCK] = {};
        for (long block = 0; block < columns; block += every * COLUMN_BLOCK) {
            if (block + COLUMN_BLOCK <= columns) {
                for (long k = 0; k < COLUMN_BLOCK; k++) parts[k] += square(row[block + k], is_bf16) * weights[block + k];
            } else {
                for (long j = block; j < columns; j++) parts[j - block] += square(row[j], is_bf16) * weights[j];
            }
        }
        for (float part : parts) sums[i] += part;
    }
}

// sums[j] = sum over i of value[i, j]^2 * weights[i]
WEFT_EXPORT void weft_rans_column_squares(const uint16_t* values, long rows, long columns, int is_bf16, const float* weights,
                                          float* sums) {
    for (long i = 0; i < rows; i++) {
        for (long j = 0; j < columns; j++) sums[j] += square(values[i * columns + j], is_bf16) * weights[i];
    }
}

WEFT_EXPORT void weft_rans_count(const uint16_t* values, const int8_t* row_scales, const int8_t* column_scales, long rows,
                                 long columns, int class_bits, int is_bf16, uint64_t* counts) {
    Shape shape{0, 0, columns, 0, class_bits};
    (is_bf16 ? count<5> : count<8>)(values, row_scales, column_scales, rows, shape, counts);
}
