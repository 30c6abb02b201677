// What decoder and coder look up, made from the shares of a tensor's symbols. See reference.py for the meaning.

#include "format.h"

namespace {

// A bucket for each symbol, 256 units each. A symbol whose share is less leaves the upper part of its bucket to another
// that has more; which of them does so last keeps what is left in a bucket of its own.
template <typename Give>
void fill_buckets(const uint16_t* shares, int symbols, Give give) {
    int left[SYMBOLS], small[SYMBOLS], large[SYMBOLS], num_small = 0, num_large = 0;
    for (int symbol = 0; symbol < symbols; symbol++) {
        left[symbol] = shares[symbol];
        if (left[symbol] < UNITS) small[num_small++] = symbol;
        if (left[symbol] > UNITS) large[num_large++] = symbol;
    }
    while (num_small && num_large) {
        int bucket = small[--num_small], other = large[num_large - 1], cut = left[bucket];
        left[other] -= UNITS - cut, left[bucket] = UNITS;
        give(bucket, cut, other, left[other] - cut);
        if (left[other] <= UNITS) num_large--;
        if (left[other] < UNITS) small[num_small++] = other;
    }
}

}  // namespace

// `shares` [classes, symbols], each class adding up to 256 * symbols.
WEFT_EXPORT void weft_rans_tables(const uint16_t* shares, int class_bits, Tables* tables) {
    const int symbols = SYMBOLS >> class_bits;
    for (int first = 0; first < SYMBOLS; first += symbols) {
        for (int place = first; place < first + symbols; place++) {
            uint16_t share = uint16_t(shares[place] << class_bits);
            tables->cut[place] = tables->moved_low[place] = tables->moved_high[place] = 0;
            tables->other[place] = uint8_t(place);
            tables->share_low[place] = uint8_t(share), tables->share_high[place] = uint8_t(share >> 8);
        }
        fill_buckets(shares + first, symbols, [&](int bucket, int cut, int other, int moved) {
            uint16_t slots = uint16_t(unsigned(moved) << class_bits);
            tables->cut[first + bucket] = uint8_t(cut), tables->other[first + bucket] = uint8_t(first + other);
            tables->moved_low[first + bucket] = uint8_t(slots), tables->moved_high[first + bucket] = uint8_t(slots >> 8);
        });
    }
}

// For shares that are whole grains. Of a class the escapes' grains begin first. `grains` has the place of each: bucket |
// position << 8. What has no share is coded as an escape.
WEFT_EXPORT void weft_rans_slots(const uint16_t* shares, int class_bits, Slots* slots, uint16_t* grains) {
    const int symbols = SYMBOLS >> class_bits;
    for (int first = 0; first < SYMBOLS; first += symbols) {
        int begins[SYMBOLS], next = first * UNITS + shares[first + ESCAPE];
        begins[ESCAPE] = first * UNITS;
        for (int symbol = 0; symbol < symbols; symbol++) {
            if (symbol == ESCAPE) continue;
            begins[symbol] = next;
            next += shares[first + symbol];
        }
        for (int symbol = 0; symbol < symbols; symbol++) {
            int coded = shares[first + symbol] ? symbol : ESCAPE;
            slots->shares[first + symbol] = uint16_t(shares[first + coded] << class_bits);
            slots->begins[first + symbol] = uint16_t(begins[coded] / GRAIN);
            int own = std::min(int(shares[first + symbol]), UNITS);
            for (int i = 0; i < own; i += GRAIN) grains[(begins[symbol] + i) / GRAIN] = uint16_t(symbol | i << 8);
        }
        fill_buckets(shares + first, symbols, [&](int bucket, int cut, int other, int moved) {
            for (int i = cut; i < UNITS; i += GRAIN) grains[(begins[other] + i + moved) / GRAIN] = uint16_t(bucket | i << 8);
        });
    }
}
