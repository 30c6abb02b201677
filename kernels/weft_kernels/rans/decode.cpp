// From words and packed bits back to 16-bit floats. See format.h for what a weight is made of.

#include "lanes.h"

namespace {

constexpr long TURNS = 1024;  // elements whose symbols are decoded before they are joined with the rest

// A chunk as the caller describes it; `table` as Coding.table() makes it.
struct Chunk {
    const uint32_t* table;
    const int8_t *rows, *columns;
    int64_t first, count, num_columns, base, class_bits, is_bf16;
    const uint32_t* states;
    const uint16_t* words;
    int64_t num_words;
    const uint8_t* rest;
    uint16_t* out;
    int64_t is_whole;  // the answer: words and states ended where coding began
};

struct Stream {
    alignas(LINE) int16_t contexts[TURNS];
    uint16_t tables[TURNS];  // where the table of each element's class begins
    uint8_t symbols[TURNS];
    uint32_t states[LANES];
    Chunk* chunk;
    Shape shape;
    const uint16_t *next, *end;
    long done;
    bool is_short;

    void begin(Chunk* of) {
        std::memcpy(states, of->states, sizeof states);
        chunk = of;
        shape = {of->first, of->count, of->num_columns, int(of->base), int(of->class_bits)};
        next = of->words, end = of->words + of->num_words;
        done = 0, is_short = false;
    }

    long size() const { return std::min(TURNS, shape.count - done); }

    // Works out the contexts of what is decoded next, and has the memory fetched that `join` reads and writes.
    void look_ahead() {
        const int spare = 4 - shape.class_bits;
        const uint8_t* rest = chunk->rest + done / GROUP * (chunk->is_bf16 ? Half<5>::GROUP_BYTES : Half<8>::GROUP_BYTES);
        for (long i = 0; i < size(); i += LINE / 2) {
            __builtin_prefetch(chunk->out + done + i, 1);
            __builtin_prefetch(rest + i);  // every line, as there is about a byte for an element
        }
        fill_contexts(contexts, shape.first + done, size(), chunk->rows, chunk->columns, shape);
        for (long i = 0; i < size(); i++) tables[i] = uint16_t(((contexts[i] & 15) >> spare) << PRECISION);
    }

    void decode_slowly(long from) {
        for (long i = from; i < size(); i++) {
            uint32_t& state = states[i % LANES];
            uint32_t entry = chunk->table[tables[i] | (state & (TOTAL - 1))];
            state = ((entry >> 8) & 0xFFF) * (state >> PRECISION) + (entry >> 20);
            if (state < LOWEST) {
                is_short |= next == end;
                state = state << 16 | (next < end ? *next++ : 0);
            }
            symbols[i] = uint8_t(entry);
        }
    }
};

// Whole turns of the streams' lanes, one stream's in the time that others' wait; returns how many elements of each.
template <int N>
long decode_turns(Stream* streams, long from, long count) {
    Words state[N][LANES / W];
    const uint16_t *next[N], *last[N];
    const uint32_t* table[N];
    for (int n = 0; n < N; n++) {
        std::memcpy(state[n], streams[n].states, sizeof state[n]);
        next[n] = streams[n].next, last[n] = streams[n].end - LANES - W;
        table[n] = streams[n].chunk->table;
    }
    for (; from + LANES <= count; from += LANES) {
        bool has_words = true;
        for (int n = 0; n < N; n++) has_words &= next[n] <= last[n];
        if (!has_words) break;
#pragma GCC unroll 4
        for (int part = 0; part < LANES / W; part++) {
#pragma GCC unroll 4
            for (int n = 0; n < N; n++) {
                Words old = state[n][part];
                alignas(64) uint16_t places[W];
                store(places, (Halves)(load<Halves>(streams[n].tables + from + part * W) | halves_of(old & (TOTAL - 1))));
                Words entry = look_up(table[n], places);
                store(streams[n].symbols + from + part * W, quarters_of(entry));
                Words moved = ((entry >> 8) & 0xFFFu) * (old >> PRECISION) + (entry >> 20);
                Mask is_low = below(moved, Words{} + LOWEST);
                state[n][part] = where(is_low, moved << 16 | spread(is_low, next[n]), moved);
                next[n] += __builtin_popcount(bits_of(is_low));
            }
        }
    }
    for (int n = 0; n < N; n++) {
        std::memcpy(streams[n].states, state[n], sizeof state[n]);
        streams[n].next = next[n];
    }
    return from;
}

// Sixteen of a group's values of six bits.
WEFT_INLINE __m128i six_bits(const uint8_t* group, int quarter) {
    auto bytes = [&](int third) { return _mm_loadu_si128((const __m128i*)(group + 16 * third)); };
    auto spare = [&](int third) { return _mm_and_si128(_mm_srli_epi16(bytes(third), 6), _mm_set1_epi8(3)); };
    if (quarter < 3) return _mm_and_si128(bytes(quarter), _mm_set1_epi8(63));
    return _mm_or_si128(spare(0), _mm_or_si128(_mm_slli_epi16(spare(1), 2), _mm_slli_epi16(spare(2), 4)));
}

template <int Low>
WEFT_INLINE Shorts rest_of(const uint8_t* group, int part) {
    if (Low == 8) {
        Shorts signs, bit;
        for (int i = 0; i < PART; i++) {
            signs[i] = load<uint16_t>(group + GROUP + PART / 8 * part + 2 * (i / 16));
            bit[i] = uint16_t(1u << (i % 16));
        }
        return widen(load<Bytes>(group + PART * part)) | ((Shorts)((signs & bit) != 0) & 256);
    }
    __m128i sixteens[PART / 16];
    for (int i = 0; i < PART / 16; i++) sixteens[i] = six_bits(group, part * (PART / 16) + i);
    return widen(in_one(sixteens));
}

template <int Low>
void join(Stream& stream, long size) {
    const uint8_t* rest = stream.chunk->rest + stream.done / GROUP * Half<Low>::GROUP_BYTES;
    uint16_t* out = stream.chunk->out + stream.done;
    const uint16_t base = uint16_t(stream.shape.base);
    long at = 0;
    for (; at + GROUP <= size; at += GROUP, rest += Half<Low>::GROUP_BYTES) {
#pragma GCC unroll 4
        for (int part = 0; part < GROUP / PART; part++) {
            long i = at + PART * part;
            Shorts octaves = (Shorts)(load<SignedShorts>(stream.contexts + i) >> 4) + base;
            Shorts symbol = widen(load<Bytes>(stream.symbols + i)), bits = rest_of<Low>(rest, part);
            Shorts key = ((symbol + octaves * 4) << Low | (bits & uint16_t((1 << Low) - 1))) & 0x7FFF;
            store(out + i, ((Shorts)(symbol >= FIRST) & key) | (bits >> Low) << 15);
        }
    }
    for (long i = at; i < size; i++) {
        out[i] = Half<Low>::join(stream.symbols[i], stream.contexts[i], Half<Low>::rest(rest, int(i - at)), stream.shape);
    }
}

// One stretch of each chunk.
template <int N>
void advance(Stream* streams) {
    long common = N > 1 ? TURNS : 0;
    for (int n = 0; n < N; n++) streams[n].look_ahead();
    for (int n = 0; n < N; n++) common = std::min(common, streams[n].size());
    if (N > 1) common = decode_turns<N>(streams, 0, common);
    for (int n = 0; n < N; n++) {
        Stream& stream = streams[n];
        stream.decode_slowly(decode_turns<1>(&stream, common, stream.size()));
        (stream.chunk->is_bf16 ? join<5> : join<8>)(stream, stream.size());
        stream.done += stream.size();
    }
}

void finish(Stream& stream) {
    bool is_whole = !stream.is_short && stream.next == stream.end;
    for (uint32_t state : stream.states) is_whole &= state == LOWEST;
    stream.chunk->is_whole = is_whole;
}

}  // namespace

// Fills every chunk's `out` and says of each whether it was whole.
WEFT_EXPORT void weft_rans_decode(void* first_of_chunks, long num_chunks) {
    constexpr int MOST = 4;
    constexpr void (*ADVANCE[])(Stream*) = {advance<1>, advance<2>, advance<3>, advance<MOST>};
    Stream streams[MOST];
    int num_streams = 0;
    for (long begun = 0; begun < num_chunks || num_streams;) {
        while (begun < num_chunks && num_streams < MOST) streams[num_streams++].begin((Chunk*)first_of_chunks + begun++);
        ADVANCE[num_streams - 1](streams);
        for (int n = num_streams; n-- > 0;) {
            if (streams[n].done < streams[n].shape.count) continue;
            finish(streams[n]);
            streams[n] = streams[--num_streams];
        }
    }
}
