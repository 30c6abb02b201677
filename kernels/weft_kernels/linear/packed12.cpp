// Packs bfloat16 panels into 12 bits per weight, once, when a model is loaded. See packed12.h.

#include "packed12.h"

#include <algorithm>
#include <vector>

#ifdef _OPENMP
#include <omp.h>
#else
static int omp_get_thread_num() { return 0; }
#endif

using namespace weft;

namespace {

struct Panels {
    const uint16_t* items;
    long num_panels, units;  // of 64 items; `units` of one panel
    long num_slices_of_all() const { return num_panels * num_slices(units); }
    long items_in(long slice) const {
        return std::min(SLICE_ITEMS, units * UNIT - slice % num_slices(units) * SLICE_ITEMS);
    }
    const uint16_t* slice(long slice) const {
        return items + slice / num_slices(units) * units * UNIT + slice % num_slices(units) * SLICE_ITEMS;
    }
};

typedef uint8_t Bytes __attribute__((vector_size(4 * W)));
constexpr int BYTE_VECTORS = UNIT / (4 * W);

// Joins the bytes of two vectors in the order that `unpack_unit` expects.
WEFT_INLINE Bytes joined(Words first, Words second) {
#if WEFT_WIDTH == 16
    return (Bytes)_mm512_packus_epi16((__m512i)first, (__m512i)second);
#else
    return (Bytes)_mm256_packus_epi16((__m256i)first, (__m256i)second);
#endif
}

// Packs one unit; returns whether all of its upper bytes are numbered.
WEFT_INLINE bool pack_unit(const uint16_t* from, const uint8_t* upper, uint8_t* to) {
    typedef uint16_t Pairs __attribute__((vector_size(4 * W)));
    Bytes numbers[BYTE_VECTORS], is_known[BYTE_VECTORS], known;
    for (int v = 0; v < BYTE_VECTORS; v++) {
        Pairs first = load<Pairs>(from + v * 2 * W), second = load<Pairs>(from + UNIT / 2 + v * 2 * W);
        store(to + v * 4 * W, joined((Words)(first & 0xFF), (Words)(second & 0xFF)));
        Bytes high = joined((Words)(first >> 8), (Words)(second >> 8));
        numbers[v] = is_known[v] = Bytes{};
        for (int i = 0; i < 16; i++) {
            Bytes is_this = (Bytes)(high == upper[i]);
            numbers[v] |= is_this & uint8_t(i);
            is_known[v] |= is_this;
        }
    }
    uint8_t plain[UNIT];
    for (int v = 0; v < BYTE_VECTORS; v++) store(plain + v * 4 * W, numbers[v]);
    for (long b = 0; b < UNIT / 2; b++) to[UNIT + b] = uint8_t(plain[b] | plain[b + UNIT / 2] << 4);
    known = is_known[0];
    for (int v = 1; v < BYTE_VECTORS; v++) known &= is_known[v];
    uint64_t words[4 * W / 8], all = ~uint64_t(0);
    store(words, known);
    for (uint64_t word : words) all &= word;
    return all == ~uint64_t(0);
}

}  // namespace

// Counts each upper byte in every `step`-th slice: counts [256].
WEFT_EXPORT void weft_packed12_count(const uint16_t* items, long panels, long units, long step, int64_t* counts) {
    Panels all{items, panels, units};
    int64_t own[2][256] = {};
    for (long s = 0; s < all.num_slices_of_all(); s += step) {
        const uint16_t* from = all.slice(s);
        for (long i = 0; i < all.items_in(s); i++) own[i & 1][from[i] >> 8]++;
    }
    for (int byte = 0; byte < 256; byte++) counts[byte] += own[0][byte] + own[1][byte];
}

// Packs the weights into `to` with the upper bytes [16]; starts [slices + 1]. Returns the number of listed weights in places
// and values, which have room for `most`; -1, with unusable output, if there would be more.
WEFT_EXPORT long weft_packed12_pack(const uint16_t* items, long panels, long units, const uint8_t* upper, uint8_t* to,
                                  int32_t* starts, uint16_t* places, uint16_t* values, long most, int threads) {
    Panels all{items, panels, units};
    std::vector<std::vector<uint16_t>> found_places(threads), found_values(threads);
    std::vector<long> before(threads + 1), ends(threads);
    uint8_t is_listed[256];
    std::fill(is_listed, is_listed + 256, 1);
    for (int i = 0; i < 16; i++) is_listed[upper[i]] = 0;
    starts[0] = 0;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        int me = omp_get_thread_num();
        auto &my_places = found_places[me], &my_values = found_values[me];
#pragma omp for schedule(static) nowait
        for (long s = 0; s < all.num_slices_of_all(); s++) {
            const uint16_t* from = all.slice(s);
            uint8_t* unit = to + (from - items) / UNIT * UNIT_BYTES;
            for (long u = 0, count = all.items_in(s) / UNIT; u < count; u++, unit += UNIT_BYTES) {
                if (pack_unit(from + u * UNIT, upper, unit) || long(my_places.size()) > most) continue;
                for (long i = u * UNIT; i < (u + 1) * UNIT; i++)
                    if (is_listed[from[i] >> 8]) my_places.push_back(uint16_t(i)), my_values.push_back(from[i]);
            }
            starts[s + 1] = int32_t(my_places.size());
            ends[me] = s + 1;
        }
    }
    for (int t = 0; t < threads; t++) before[t + 1] = before[t] + long(found_places[t].size());
    if (before[threads] > most) return -1;
    // Static scheduling: the first thread has the first slices.
    for (long t = 0, slice = 0; t < threads; t++) {
        std::copy(found_places[t].begin(), found_places[t].end(), places + before[t]);
        std::copy(found_values[t].begin(), found_values[t].end(), values + before[t]);
        for (; slice < ends[t]; slice++) starts[slice + 1] += int32_t(before[t]);
    }
    return before[threads];
}
