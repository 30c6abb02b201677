// Decodes words and packed bits to 16-bit floats, several chunks side by side. format.h defines the parts of a weight.

#include "decode_vbmi.h"
#include "decode_avx2.h"

namespace {

constexpr int MOST = 4;  // chunks at a time: enough for one's steps to fill the time that the others' wait

template <int N>
long permuted(Stream* streams, long from, long count) {
    bool is_bf16 = streams->chunk->is_bf16;
    return is_bf16 ? permuted_turns<N, 5>(streams, from, count) : permuted_turns<N, 8>(streams, from, count);
}

// Side by side as far as all of them go, where they are of one kind.
long permuted_together(Stream* streams, int num_streams) {
    long count = streams->size();
    for (int n = 1; n < num_streams; n++) {
        if (streams[n].chunk->is_bf16 != streams->chunk->is_bf16) return 0;
        count = std::min(count, streams[n].size());
    }
    switch (num_streams) {
        case 2: return permuted<2>(streams, 0, count);
        case 3: return permuted<3>(streams, 0, count);
        case 4: return permuted<4>(streams, 0, count);
        default: return 0;
    }
}

long shuffled(Stream& stream, long count) {
    return stream.chunk->is_bf16 ? shuffled_turns<5>(stream, 0, count) : shuffled_turns<8>(stream, 0, count);
}

static_assert(MOST == 4, "as many are decoded together as there are cases above");

// One stretch of each chunk, `num_streams` of them.
void advance(Stream* streams, int num_streams, bool is_plain) {
    for (int n = 0; n < num_streams; n++) streams[n].look_ahead();
    long common = is_plain ? 0 : permuted_together(streams, num_streams);
    for (int n = 0; n < num_streams; n++) {
        Stream& stream = streams[n];
        long turned = is_plain ? shuffled(stream, stream.size()) : permuted<1>(&stream, common, stream.size());
        stream.decode_slowly(turned);
        stream.join(turned);
        stream.done += stream.size();
    }
}

void finish(Stream& stream) {
    bool is_whole = !stream.is_short && stream.next == stream.end;
    for (int i = 0; i < LANES; i++) is_whole &= stream.low[i] == 0 && stream.high[i] == LOWEST >> 16;
    stream.chunk->is_whole = stream.chunk->put_escapes() && is_whole;
}

}  // namespace

// Fills every chunk's `out`, and sets `is_whole`, which the caller has set to 0, of those that were whole. `is_plain`: as on
// a processor that cannot permute bytes.
WEFT_EXPORT void weft_rans_decode(void* first_of_chunks, long num_chunks, int is_plain) {
    is_plain |= !can_permute();
    Stream streams[MOST] = {};  // steps read ahead into parts that may be unfilled
    int num_streams = 0;
    for (long begun = 0; begun < num_chunks || num_streams;) {
        for (; begun < num_chunks && num_streams < MOST; begun++) {
            Chunk* chunk = (Chunk*)first_of_chunks + begun;
            if (!chunk->has_all()) continue;
            streams[num_streams].begin(chunk);
            if (is_plain) streams[num_streams].fill_buckets();
            num_streams++;
        }
        if (!num_streams) break;
        advance(streams, num_streams, is_plain);
        for (int n = num_streams; n-- > 0;) {
            if (streams[n].done < streams[n].shape.count) continue;
            finish(streams[n]);
            streams[n] = streams[--num_streams];
        }
    }
}
