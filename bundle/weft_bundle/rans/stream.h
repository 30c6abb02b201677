// A chunk on its way from words and packed bits back to 16-bit floats, and how to go on with it one element at a time.

#pragma once

#include "format.h"

namespace {

constexpr long TURNS = 1024;  // elements whose contexts are worked out at a time

// What turns look up at once where they load: the shares of a bucket's two owners and how the other one's slots are moved.
struct Bucket {
    uint16_t own_share, other_share, moved, cut_and_other;  // cut | other's symbol << 8
};

// As the caller describes it. Its body is what is stored of it: the states, where elements escaped, words, the elements
// that escaped, and what is not coded.
struct Chunk {
    const Tables* tables;
    const int8_t *rows, *columns;
    int64_t num_columns, base, class_bits, is_bf16;
    int64_t first, count;
    const uint8_t* body;
    int64_t body_bytes, num_words, num_escapes;
    uint16_t* out;
    int64_t is_whole;  // the answer: its body has all parts, words and states ended where coding began, escapes lie within

    const uint32_t* states() const { return (const uint32_t*)body; }
    const uint32_t* places() const { return states() + LANES; }
    const uint16_t* words() const { return (const uint16_t*)(places() + num_escapes); }
    const uint16_t* values() const { return words() + num_words; }
    const uint8_t* rest() const { return (const uint8_t*)(values() + num_escapes); }

    long group_bytes() const { return is_bf16 ? Half<5>::GROUP_BYTES : Half<8>::GROUP_BYTES; }

    bool has_all() const {
        int64_t rest_bytes = (count + GROUP - 1) / GROUP * group_bytes();
        return 4 * LANES + 6 * num_escapes + 2 * num_words + rest_bytes <= body_bytes;
    }

    bool put_escapes() const {
        for (int64_t i = 0; i < num_escapes; i++) {
            if (places()[i] >= count) return false;
            out[places()[i]] = values()[i];
        }
        return true;
    }
};

// Has the memory fetched that a turn reads and writes some turns after the one that is at these places: what processors
// fetch by themselves comes too late, as each chunk is four runs of memory of its own. Asked for once a turn, as a burst of
// such requests is waited for. A word stands for some three elements and a half.
template <int Low>
WEFT_INLINE void fetch_ahead(const uint16_t* out, const uint8_t* group, const uint16_t* words) {
    constexpr long AHEAD = 512, REST = AHEAD / GROUP * Half<Low>::GROUP_BYTES;
    for (long line = 0; line < 2 * GROUP; line += LINE) __builtin_prefetch((const char*)(out + AHEAD) + line, 1);
    for (long line = 0; line < Half<Low>::GROUP_BYTES; line += LINE) __builtin_prefetch(group + REST + line);
    __builtin_prefetch(words + AHEAD * 2 / 7);
}

struct Stream {
    alignas(LINE) uint8_t classes[TURNS + LANES];    // where the tables of each element's class begin; turns look one ahead
    alignas(LINE) int16_t before[TURNS];             // what each element's context and the base add to its key
    alignas(LINE) uint8_t symbols[TURNS];
    alignas(LINE) uint16_t low[LANES], high[LANES];  // the lanes' states
    alignas(LINE) Bucket buckets[SYMBOLS];
    Chunk* chunk;
    Shape shape;
    const uint16_t *next, *end;
    long done;
    bool is_short;

    void begin(Chunk* of) {
        const uint32_t* states = of->states();
        for (int i = 0; i < LANES; i++) low[i] = uint16_t(states[i]), high[i] = uint16_t(states[i] >> 16);
        chunk = of;
        shape = {of->first, of->count, of->num_columns, int(of->base), int(of->class_bits)};
        next = of->words(), end = next + of->num_words;
        done = 0, is_short = false;
        if (shape.class_bits) return;
        std::fill(classes, classes + TURNS + LANES, uint8_t(0));
        std::fill(before, before + TURNS, int16_t(4 * shape.base));
    }

    // For turns that load; begin() comes first.
    void fill_buckets() {
        const Tables& tables = *chunk->tables;
        auto share = [&](int place) { return uint16_t(tables.share_low[place] | tables.share_high[place] << 8); };
        for (int i = 0; i < SYMBOLS; i++) {
            int other = tables.other[i];
            uint16_t moved = uint16_t(tables.moved_low[i] | tables.moved_high[i] << 8);
            buckets[i] = {share(i), share(other), moved, uint16_t(tables.cut[i] | (other & (shape.symbols() - 1)) << 8)};
        }
    }

    long size() const { return std::min(TURNS, shape.count - done); }
    long num_words() const { return end - next; }

    const uint8_t* rest(long from) const {
        return chunk->rest() + (done + from) / GROUP * chunk->group_bytes();
    }

    // Works out the contexts of what is decoded next.
    void look_ahead() {
        if (!shape.class_bits) return;
        const int base = 4 * shape.base, mask = 0xFF & -shape.symbols();
        for (long at = 0; at < size();) {
            long row = (shape.first + done + at) / shape.columns, column = (shape.first + done + at) % shape.columns;
            long run = std::min(size() - at, shape.columns - column);
            const int8_t row_scale = chunk->rows[row], *scales = chunk->columns + column;
            for (long i = 0; i < run; i++) {
                int16_t context = int16_t(row_scale + scales[i]);
                classes[at + i] = uint8_t((uint16_t(context) << 4) & mask);
                before[at + i] = int16_t((context >> 4) * 4 + base);
            }
            at += run;
        }
    }

    void decode_slowly(long from) {
        const Tables& tables = *chunk->tables;
        const int mask = shape.symbols() - 1;
        for (long i = from; i < size(); i++) {
            uint16_t &lower = low[i % LANES], &upper = high[i % LANES], within = uint16_t(lower >> shape.symbol_bits());
            uint8_t place = uint8_t(classes[i] | (lower & mask));
            if (lower >> 8 >= tables.cut[place]) {
                within = uint16_t(within + (tables.moved_low[place] | tables.moved_high[place] << 8));
                place = tables.other[place];
            }
            symbols[i] = uint8_t(place & mask);
            uint32_t state = uint32_t(tables.share_low[place] | tables.share_high[place] << 8) * upper + within;
            if (state < LOWEST) {
                is_short |= next == end;
                state = state << 16 | (next < end ? *next++ : 0);
            }
            lower = uint16_t(state), upper = uint16_t(state >> 16);
        }
    }

    // From the element on, which begins a group.
    void join(long from) { chunk->is_bf16 ? join_halves<5>(from) : join_halves<8>(from); }

    template <int Low>
    void join_halves(long from) {
        const uint8_t* group = rest(from);
        for (long at = from; at < size(); at += GROUP, group += Half<Low>::GROUP_BYTES) {
            alignas(LINE) uint16_t bits[GROUP], halves[GROUP];
            Half<Low>::unpack(group, bits);
            for (int i = 0; i < GROUP; i++) halves[i] = Half<Low>::join(symbols[at + i], before[at + i], bits[i]);
            std::memcpy(chunk->out + done + at, halves, 2 * size_t(std::min(long(GROUP), size() - at)));
        }
    }
};

}  // namespace
