// Chooses the coding of a tensor from a sample: with scales of rows and columns if they pay, else with one table.
// codec_choice.py and coding.py define the meaning.

#include "scales.h"

#include <numeric>

namespace {

// 1,152 keys a class: 1,024 of BF16, moved by at most 16 octaves either way; the last one counts zeros.
constexpr int KEYS = 1153, COUNT_OFFSET = 64, COPIES = 4, CLASS_BITS = 2, ESCAPE_BITS = 48;
constexpr double SHARE_BITS = 14;  // what a symbol's share takes in a file, about

// One of the two ways to code.
struct Candidate {
    int class_bits, base = 0;
    std::vector<uint32_t> counted;  // COPIES of what adds up to `keys`
    std::vector<uint64_t> keys;
    uint16_t shares[SYMBOLS] = {};
    double bits = 0;

    explicit Candidate(int bits_of_class) : class_bits(bits_of_class), counted(size_t(COPIES) * (KEYS << bits_of_class)) {}

    int classes() const { return 1 << class_bits; }
    int symbols() const { return SYMBOLS >> class_bits; }

    void add_up() {
        const size_t size = size_t(KEYS) << class_bits;
        keys.assign(size, 0);
        for (auto copy = counted.cbegin(); copy != counted.cend(); copy += long(size)) {
            for (size_t i = 0; i < size; i++) keys[i] += copy[long(i)];
        }
    }

    // The base under which the fewest elements have to escape.
    void choose_base() {
        constexpr int OCTAVES = (KEYS - 1) / 4;
        uint64_t of_keys[KEYS] = {}, octaves[OCTAVES];
        for (int of_class = 0; of_class < classes(); of_class++)
            for (int key = 0; key < KEYS; key++) of_keys[key] += keys[size_t(of_class * KEYS + key)];
        for (int i = 0; i < OCTAVES; i++) octaves[i] = std::accumulate(of_keys + 4 * i, of_keys + 4 * i + 4, uint64_t(0));
        const int reach = (symbols() - FIRST) / 4;
        int lowest = 0;
        uint64_t inside = std::accumulate(octaves, octaves + reach, uint64_t(0)), most = inside;
        for (int first = 1; first < OCTAVES; first++) {
            inside += (first + reach <= OCTAVES ? octaves[first + reach - 1] : 0) - octaves[first - 1];
            if (inside > most) most = inside, lowest = first;
        }
        base = lowest - COUNT_OFFSET / 4 - 1;
    }

    // How often the sample has each symbol of a class.
    void count_symbols(int of_class, uint64_t* counts) const {
        const uint64_t* of_keys = keys.data() + of_class * KEYS;
        const int first = COUNT_OFFSET + 4 * base, begin = std::max(0, first + FIRST), end = std::min(KEYS - 1, first + symbols());
        std::fill(counts, counts + symbols(), uint64_t(0));
        std::copy(of_keys + begin, of_keys + end, counts + begin - first);
        counts[ESCAPE] = std::accumulate(of_keys, of_keys + begin, uint64_t(0)) + std::accumulate(of_keys + end, of_keys + KEYS - 1, uint64_t(0));
        counts[ZERO] = of_keys[KEYS - 1];
    }

    // Whole grains that add up to all of a class; whatever occurs has one, escapes too, and no symbol has all.
    void share(const uint64_t* counts, uint16_t* out) const {
        const int num = symbols(), total = UNITS / GRAIN * num;
        const double sum = double(std::max(std::accumulate(counts, counts + num, uint64_t(0)), uint64_t(1)));
        int grains[SYMBOLS], order[SYMBOLS];
        bool is_alone = std::none_of(counts, counts + num, [=](const uint64_t& count) { return &count != counts + ESCAPE && count; });
        for (int i = 0; i < num; i++) {
            bool has_some = counts[i] || i == ESCAPE || (i == ZERO && is_alone);
            grains[i] = std::max(int(std::nearbyint(double(counts[i]) / sum * total)), int(has_some));
        }
        int excess = std::accumulate(grains, grains + num, 0) - total;
        *std::max_element(grains, grains + num) += std::max(-excess, 0);
        while (excess > 0) {  // one of each of the largest that can give some
            std::iota(order, order + num, 0);
            std::stable_sort(order, order + num, [&](int a, int b) { return grains[a] > grains[b]; });
            for (int i = 0; i < num && excess > 0 && grains[order[i]] > 1; i++) grains[order[i]]--, excess--;
        }
        for (int i = 0; i < num; i++) out[i] = uint16_t(GRAIN * grains[i]);
    }

    // Shares that suit the sample, and the bits that all values take with them.
    void finish(double num_values, int low_bits) {
        uint64_t counts[SYMBOLS], num_counted = 0;
        add_up();
        choose_base();
        for (int first = 0; first < SYMBOLS; first += symbols()) {
            count_symbols(first / symbols(), counts);
            share(counts, shares + first);
            for (int i = 0; i < symbols(); i++) {
                num_counted += counts[i];
                if (counts[i]) bits -= double(counts[i]) * std::log2(double(shares[first + i]) / (UNITS * symbols()));
            }
            bits += ESCAPE_BITS * double(counts[ESCAPE]);
        }
        bits = bits * num_values / double(num_counted) + num_values * (low_bits + 1);
        bits += SHARE_BITS * double(SYMBOLS - std::count(shares, shares + SYMBOLS, uint16_t(0)));
    }
};

// Counts in several tables, because two additions to one counter in a row stall.
WEFT_INLINE void add_to(std::vector<uint32_t>& counted, const uint16_t* places, long count) {
    static_assert(COPIES == 4, "as many as are written here");
    const size_t size = counted.size() / COPIES;
    uint32_t *first = counted.data(), *second = first + size, *third = second + size, *fourth = third + size;
    long i = 0;
    for (; i + COPIES <= count; i += COPIES) first[places[i]]++, second[places[i + 1]]++, third[places[i + 2]]++, fourth[places[i + 3]]++;
    for (; i < count; i++) first[places[i]]++;
}

// Counts the keys of the sample both ways; `scaled` only if there are scales.
template <int Low>
void count(const Sample& sample, const int8_t* rows, const int8_t* columns, Candidate& plain, Candidate* scaled) {
    for (long row = 0; row < sample.rows; row += sample.counted_step()) {
        sample.blocks([&](long first, long size) {
            const uint16_t* values = sample.values + row * sample.columns + first;
            uint16_t of_plain[COLUMN_BLOCK], of_scaled[COLUMN_BLOCK];
            for (long i = 0; i < size; i++) {
                uint16_t bits = values[i] & 0x7FFF, key = uint16_t((bits >> Low) + COUNT_OFFSET);
                int16_t context = scaled ? int16_t(rows[row] + columns[first + i]) : int16_t(0);
                uint16_t moved = uint16_t(key - 4 * (context >> 4));
                of_plain[i] = bits ? key : uint16_t(KEYS - 1);
                of_scaled[i] = uint16_t(class_of(context, CLASS_BITS) * KEYS + (bits ? moved : uint16_t(KEYS - 1)));
            }
            add_to(plain.counted, of_plain, size);
            if (scaled) add_to(scaled->counted, of_scaled, size);
        });
    }
}

}  // namespace

// Returns about the bits that all values take, scales included, if they are coded as `base_and_class_bits` and `shares`
// say; scales are filled either way.
template <int Low>
double choose(const Sample& sample, int8_t* row_scales, int8_t* column_scales, uint16_t* shares, int64_t* base_and_class_bits) {
    const bool is_matrix = sample.rows > 1 && sample.columns > 1;
    const double num_values = double(sample.rows) * double(sample.columns);
    Candidate plain(0), scaled(CLASS_BITS), *best = &plain;
    if (is_matrix) find_scales<Low>(sample, row_scales, column_scales);
    count<Low>(sample, row_scales, column_scales, plain, is_matrix ? &scaled : nullptr);
    plain.finish(num_values, Low);
    if (is_matrix) {
        scaled.finish(num_values, Low);
        scaled.bits += 8.0 * double(sample.rows + sample.columns);
        if (scaled.bits < plain.bits) best = &scaled;
    }
    if (best == &plain) std::fill(row_scales, row_scales + sample.rows, int8_t(0)), std::fill(column_scales, column_scales + sample.columns, int8_t(0));
    std::copy(best->shares, best->shares + SYMBOLS, shares);
    base_and_class_bits[0] = best->base, base_and_class_bits[1] = best->class_bits;
    return best->bits;
}

WEFT_EXPORT double weft_rans_choose(const uint16_t* values, long rows, long columns, int is_bf16, int8_t* row_scales,
                                    int8_t* column_scales, uint16_t* shares, int64_t* base_and_class_bits) {
    const Sample sample(values, rows, columns);
    return (is_bf16 ? choose<5> : choose<8>)(sample, row_scales, column_scales, shares, base_and_class_bits);
}
