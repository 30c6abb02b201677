// bfloat16 panels into 12 bits a weight, once, when a model is loaded. See twelve.h.

#include "twelve.h"

#include <algorithm>

using namespace weft;

namespace {

struct Panels {
    const uint16_t* items;
    long num_panels, units;  // 64 items each; `units` of one panel
    long num_slices_of_all() const { return num_panels * num_slices(units); }
    long items_in(long slice) const {
        return std::min(SLICE_ITEMS, units * UNIT - slice % num_slices(units) * SLICE_ITEMS);
    }
    const uint16_t* slice(long slice) const {
        return items + slice / num_slices(units) * units * UNIT + slice % num_slices(units) * SLICE_ITEMS;
    }
};

}  // namespace

// How often each upper byte is there: counts [256].
WEFT_EXPORT void weft_twelve_count(const uint16_t* items, long panels, long units, int64_t* counts, int threads) {
    Panels all{items, panels, units};
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        int64_t own[2][256] = {};
#pragma omp for schedule(static) nowait
        for (long s = 0; s < all.num_slices_of_all(); s++) {
            const uint16_t* from = all.slice(s);
            for (long i = 0; i < all.items_in(s); i++) own[i & 1][from[i] >> 8]++;
        }
#pragma omp critical
        for (int byte = 0; byte < 256; byte++) counts[byte] += own[0][byte] + own[1][byte];
    }
}

// The same weights to `units`; numbers: [256], that of each upper byte, 16 where it has none. With null for places only
// `starts` [slices + 1] is written: how many of each slice have none, at the slice's place and summed up by the caller.
WEFT_EXPORT void weft_twelve_pack(const uint16_t* items, long panels, long units, const uint8_t* numbers, int32_t* starts,
                                  uint8_t* to, uint16_t* places, uint16_t* values, int threads) {
    Panels all{items, panels, units};
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (long s = 0; s < all.num_slices_of_all(); s++) {
        const uint16_t* from = all.slice(s);
        long count = all.items_in(s), found = places ? starts[s] : 0;
        uint8_t* unit = to + (from - items) / UNIT * UNIT_BYTES;
        for (long i = 0; i < count; i++) {
            if (numbers[from[i] >> 8] < 16) continue;
            if (places) places[found] = uint16_t(i), values[found] = from[i];
            found++;
        }
        if (!places) {
            starts[s] = int32_t(found);
            continue;
        }
        for (; count > 0; count -= UNIT, from += UNIT, unit += UNIT_BYTES) {
            for (long b = 0; b < UNIT; b++) unit[b] = uint8_t(from[item_of(b)]);
            for (long b = 0; b < UNIT / 2; b++) {
                int low = numbers[from[item_of(b)] >> 8], high = numbers[from[item_of(b + UNIT / 2)] >> 8];
                unit[UNIT + b] = uint8_t((low & 15) | high << 4);
            }
        }
    }
}

// The panels again, as products meet them: what the tests hold against the weights.
WEFT_EXPORT void weft_twelve_unpack(const Twelve* packed, long panels, long units, uint16_t* items) {
    alignas(64) uint16_t slice[SLICE_ITEMS];
    for (long p = 0; p < panels; p++)
        for (long first = 0; first < units; first += SLICE_UNITS) {
            Units some(*packed, p, units, first);
            unpack(some, slice);
            std::copy(slice, slice + some.count * UNIT, items + (p * units + first) * UNIT);
        }
}
