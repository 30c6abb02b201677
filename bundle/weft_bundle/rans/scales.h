// Scales (root mean squares) of the rows and columns of a tensor. codec_choice.py defines the sample.

#pragma once

#include "format.h"

#include <cmath>

namespace {

constexpr long COLUMN_BLOCK = 64, SAMPLE_ROWS = 256, SAMPLE_COLUMNS = 256;
constexpr long MIN_COUNTED = 1 << 15, COUNTED_SHARE = 32;  // elements
constexpr int SCALE_STEPS = 16, MAX_SCALE = 127;

// A tensor, and which part of it stands for all: every so many rows, every so many blocks of columns.
struct Sample {
    const uint16_t* values;
    long rows, columns, step, every;

    Sample(const uint16_t* of, long num_rows, long num_columns, long sample_columns = SAMPLE_COLUMNS)
        : values(of), rows(num_rows), columns(num_columns), step(std::max(1l, num_rows / SAMPLE_ROWS)),
          every(std::max(1l, num_columns / sample_columns)) {}

    long lines() const { return (rows + step - 1) / step; }

    // Of the rows whose keys are counted: fewer, but enough elements.
    long counted_step() const {
        long of_line = (columns + every - 1) / every, enough = std::max(MIN_COUNTED, rows * columns / COUNTED_SHARE);
        return step * std::max(1l, lines() * of_line / enough);
    }

    // do_block(first column, columns) for each block of columns.
    template <typename Do>
    WEFT_INLINE void blocks(Do do_block) const {
        for (long first = 0; first < columns; first += every * COLUMN_BLOCK) do_block(first, std::min(COLUMN_BLOCK, columns - first));
    }
};

template <int Low>
WEFT_INLINE float square(uint16_t value) {
    uint32_t word = uint32_t(value & 0x7FFF) << (Low == 5 ? 16 : 13);
    float wide;
    std::memcpy(&wide, &word, 4);
    if (Low == 8) wide *= 0x1p112f;
    return wide < 1e15f ? wide * wide : 0.0f;  // infinities and NaN do not count
}

// Of W values.
template <int Low>
WEFT_INLINE Floats squares(const uint16_t* values) {
    Floats wide = (Floats)((__builtin_convertvector(load<Halves>(values), Words) & 0x7FFFu) << (Low == 5 ? 16 : 13));
    if (Low == 8) wide *= 0x1p112f;
    wide = wide < 1e15f ? wide : Floats{};
    return wide * wide;
}

// sums[i] = sum over the sample's columns of value[i * step, j]^2 * weights[j]
template <int Low>
void row_squares(const Sample& sample, long step, const float* weights, std::vector<float>& sums) {
    for (size_t i = 0; i < sums.size(); i++) {
        const uint16_t* row = sample.values + long(i) * step * sample.columns;
        Floats parts[COLUMN_BLOCK / W] = {};
        float sum = 0;
        sample.blocks([&](long first, long count) {
            if (count < COLUMN_BLOCK) {
                for (long k = first; k < first + count; k++) sum += square<Low>(row[k]) * weights[k];
                return;
            }
#pragma GCC unroll 8
            for (long k = 0; k < COLUMN_BLOCK / W; k++) parts[k] += squares<Low>(row + first + k * W) * load<Floats>(weights + first + k * W);
        });
        for (Floats part : parts) sum += weft::sum(part);
        sums[i] = std::min(sum, 3e38f);
    }
}

// sums[j] = sum over the sample's rows of value[i, j]^2 * weights[i]
template <int Low>
void column_squares(const Sample& sample, const float* weights, std::vector<float>& sums) {
    for (long line = 0; line < sample.lines(); line++) {
        const uint16_t* row = sample.values + line * sample.step * sample.columns;
        for (long j = 0; j < sample.columns; j++) sums[size_t(j)] += square<Low>(row[j]) * weights[line];
    }
    for (float& sum : sums) sum = std::min(sum, 3e38f);
}

inline float median(std::vector<float> sums) {
    auto middle = sums.begin() + long(sums.size() / 2);
    std::nth_element(sums.begin(), middle, sums.end());
    return sums.size() % 2 ? *middle : *middle / 2 + *std::max_element(sums.begin(), middle) / 2;
}

// Weights are capped at 2^30 times the median, so that no sum overflows on rows of zeros.
inline std::vector<float> inverse(const std::vector<float>& sums) {
    double middle = std::max(double(median(sums)), 1e-30);
    std::vector<float> weights;
    weights.reserve(sums.size());
    for (float sum : sums) weights.push_back(float(1 / std::clamp(double(sum) / middle, 0x1p-30, 0x1p60)));
    return weights;
}

// Half the logarithm of sums relative to the median, in sixteenths of octaves.
inline void scales_from(const std::vector<float>& sums, int8_t* scales) {
    const float usual = std::log2(std::max(median(sums), 1e-37f));
    for (size_t i = 0; i < sums.size(); i++) {
        float octaves = 0.5f * (std::log2(std::max(sums[i], 1e-37f)) - usual);
        scales[i] = int8_t(std::clamp(std::nearbyint(octaves * SCALE_STEPS), float(-MAX_SCALE), float(MAX_SCALE)));
    }
}

// Scales of each row after dividing by the columns' scales, and the reverse.
template <int Low>
void find_scales(const Sample& sample, int8_t* row_scales, int8_t* column_scales) {
    std::vector<float> line_sums(size_t(sample.lines())), column_sums(size_t(sample.columns)), row_sums(size_t(sample.rows));
    const Sample rough(sample.values, sample.rows, sample.columns, COLUMN_BLOCK);
    row_squares<Low>(rough, sample.step, std::vector<float>(size_t(sample.columns), 1.0f).data(), line_sums);
    column_squares<Low>(sample, inverse(line_sums).data(), column_sums);
    row_squares<Low>(sample, 1, inverse(column_sums).data(), row_sums);
    scales_from(row_sums, row_scales);
    scales_from(column_sums, column_scales);
}

}  // namespace
