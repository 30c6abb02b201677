// From words and packed bits back to 16-bit floats, some chunks side by side. See format.h for what a weight is made of.

#include "lanes.h"
#include "permute.h"

namespace {

constexpr int MOST = 2;  // chunks at a time: enough for one's steps to fill the time that the other's wait

// What plain turns look up, for W lanes at a time.
struct Lookups {
    uint32_t buckets[SYMBOLS], shares[SYMBOLS];  // cut | other << 8 | moved << 16
    int symbol_bits;

    void begin(const Tables& tables, int bits) {
        symbol_bits = bits;
        for (int i = 0; i < SYMBOLS; i++) {
            buckets[i] = tables.cut[i] | tables.other[i] << 8 | tables.moved_low[i] << 16 | uint32_t(tables.moved_high[i]) << 24;
            shares[i] = tables.share_low[i] | tables.share_high[i] << 8;
        }
    }

    WEFT_INLINE Words step(Words state, const uint8_t* classes, uint8_t* symbols) const {
        const uint32_t mask = (1u << symbol_bits) - 1;
        Words place = (state & mask) | __builtin_convertvector(load<Quarters>(classes), Words);
        Words bucket = look_up(buckets, place), slot = state & 0xFFFFu;
        Mask is_other = at_least(slot >> 8, bucket & 0xFFu);
        Words within = ((slot >> symbol_bits) + where(is_other, bucket >> 16, Words{})) & 0xFFFFu;
        place = where(is_other, (bucket >> 8) & 0xFFu, place);
        store(symbols, quarters_of(place & mask));
        return look_up(shares, place) * (state >> 16) + within;
    }
};

// Whole turns of a stream's lanes, for processors that cannot permute bytes; returns where they ended.
long plain_turns(Stream& stream, long from, long count) {
    Words state[LANES / W];
    Lookups lookups;
    lookups.begin(*stream.chunk->tables, stream.shape.symbol_bits());
    for (int part = 0; part < LANES / W; part++) {
        state[part] = widen(load<Halves>(stream.low + part * W)) | widen(load<Halves>(stream.high + part * W)) << 16;
    }
    for (; from + LANES <= count && stream.num_words() >= LANES + W; from += LANES) {
#pragma GCC unroll 8
        for (int part = 0; part < LANES / W; part++) {
            long at = from + part * W;
            Words moved = lookups.step(state[part], stream.classes + at, stream.symbols + at);
            Mask is_low = below(moved, Words{} + LOWEST);
            state[part] = where(is_low, moved << 16 | spread(is_low, stream.next), moved);
            stream.next += __builtin_popcount(bits_of(is_low));
        }
    }
    for (int part = 0; part < LANES / W; part++) {
        store(stream.low + part * W, halves_of(state[part] & 0xFFFFu));
        store(stream.high + part * W, halves_of(state[part] >> 16));
    }
    return from;
}

template <int N>
long permuted(Stream* streams, long from, long count) {
    bool is_bf16 = streams->chunk->is_bf16;
    return is_bf16 ? permuted_turns<N, 5>(streams, from, count) : permuted_turns<N, 8>(streams, from, count);
}

// One stretch of each chunk, `num_streams` of them.
void advance(Stream* streams, int num_streams, bool is_plain) {
    long common = 0;
    for (int n = 0; n < num_streams; n++) streams[n].look_ahead();
    bool are_alike = num_streams == MOST && streams[0].chunk->is_bf16 == streams[1].chunk->is_bf16;
    if (!is_plain && are_alike) common = permuted<MOST>(streams, 0, std::min(streams[0].size(), streams[1].size()));
    for (int n = 0; n < num_streams; n++) {
        Stream& stream = streams[n];
        long turned = is_plain ? plain_turns(stream, 0, stream.size()) : permuted<1>(&stream, common, stream.size());
        stream.decode_slowly(turned);
        stream.join(is_plain ? 0 : turned);
        stream.done += stream.size();
    }
}

void finish(Stream& stream) {
    bool is_whole = !stream.is_short && stream.next == stream.end;
    for (int i = 0; i < LANES; i++) is_whole &= stream.low[i] == 0 && stream.high[i] == LOWEST >> 16;
    stream.chunk->is_whole = is_whole;
}

}  // namespace

// Fills every chunk's `out` and says of each whether it was whole. `is_plain`: as on a processor that cannot permute bytes.
WEFT_EXPORT void weft_rans_decode(void* first_of_chunks, long num_chunks, int is_plain) {
    is_plain |= !can_permute();
    Stream streams[MOST];
    int num_streams = 0;
    for (long begun = 0; begun < num_chunks || num_streams;) {
        while (begun < num_chunks && num_streams < MOST) streams[num_streams++].begin((Chunk*)first_of_chunks + begun++);
        advance(streams, num_streams, is_plain);
        for (int n = num_streams; n-- > 0;) {
            if (streams[n].done < streams[n].shape.count) continue;
            finish(streams[n]);
            streams[n] = streams[--num_streams];
        }
    }
}
