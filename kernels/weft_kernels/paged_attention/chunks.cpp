// Attention of many query rows of one sequence over keys and values in the pool.

#include "chunks.h"
#ifdef __AMX_BF16__
#include "amx_chunks.h"
#endif

using namespace weft;

namespace {

const float* widened(const float* from, long, float*) { return from; }
const float* widened(const uint16_t* from, long count, float* wide) {
    for (long i = 0; i < count; i++) wide[i] = widen(from[i]);
    return wide;
}

// The runs of `count` keys from position `at` on; returns how many.
template <typename Item>
long runs_of_keys(const HeadLines<Item>& keys, Work<float>& work, long at, long count) {
    long num_runs = 0;
    for (long done = 0, size; done < count; done += size) {
        size = keys.together(at + done, count - done);
        float* wide = work.made.data() + done * keys.c.dim;
        work.runs[num_runs++] = {widened(keys.at(at + done), size * keys.c.dim, wide), size};
    }
    return num_runs;
}

template <typename Item>
long runs_of_values(const HeadLines<Item>& values, Work<float>& work, long at, long count) {
    return runs_of_keys(values, work, at, count);
}

#ifdef WEFT_PAIRS
long runs_of_keys(const HeadLines<uint16_t>& keys, Work<Pair>& work, long at, long count) {
    long num_runs = 0;
    for (long done = 0, size; done < count; done += size) {
        size = keys.together(at + done, count - done);
        work.runs[num_runs++] = {(const Pair*)keys.at(at + done), size};
    }
    return num_runs;
}

// Behind an odd last value stands one of zeros.
long runs_of_values(const HeadLines<uint16_t>& values, Work<Pair>& work, long at, long count) {
    const uint16_t** rows = work.rows.data();
    for (long done = 0, size; done < count; done += size) {
        size = values.together(at + done, count - done);
        const uint16_t* from = values.at(at + done);
        for (long t = 0; t < size; t++) rows[done + t] = from + t * values.c.dim;
    }
    rows[count] = work.zeros.data();
    Pair* to = work.made.data();
    for (long t = 0; t < count; t += 2) {
        long d = 0, size = values.c.value_dim;
        for (; d + W <= size; d += W) store(to + d, pairs_of(rows[t] + d, rows[t + 1] + d));
        for (; d < size; d++) to[d] = rows[t][d] | Pair(rows[t + 1][d]) << 16;
        to += size;
    }
    work.runs[0] = {work.made.data(), (count + 1) / 2};
    return 1;
}
#endif

template <typename Item, typename Number>
void attend(const Chunk& c, Work<Number>& work, const Item* q, const Item* memory, const int* blocks, long head,
            long start, float scale, Item* out) {
    constexpr bool ARE_PAIRS = !std::is_same<Number, float>::value;
    long dim = ARE_PAIRS ? c.dim / 2 : c.dim, value_stride = ARE_PAIRS ? c.value_dim : c.dim;
    take_queries(c, work, q, head, start, scale);
    HeadLines<Item> keys{c, memory + c.keys(head), blocks}, values{c, memory + c.values(head), blocks};
    for (long at = long(work.least_first), count; at < long(work.most_end); at += count) {
        count = std::min(KEYS_AT_ONCE, long(work.most_end) - at);
        long num_runs = runs_of_keys(keys, work, at, count), done = 0;
        for (long r = 0; r < num_runs; done += work.runs[r++].count) {
            Run<Number> run{work.runs[r].data, dim};
            ask_for(values.at(at + done), work.runs[r].count * c.dim * sizeof(Item));
            float* scores = &work.scores[done * LANES];
            products<false>(&run, 1, work.runs[r].count, dim, work.queries.data(), scores, nullptr);
        }
        bool is_masked = float(at) < work.most_first || float(at + count) > work.least_end;
        float left = ARE_PAIRS ? scale : 1;  // floats have been taken times the scale already
        is_masked ? weigh<true>(work, at, count, left) : weigh<false>(work, at, count, left);
        num_runs = runs_of_values(values, work, at, count);
        const Run<Number>* runs = work.runs.data();
        products<true>(runs, num_runs, c.value_dim, value_stride, work.weights(), work.sums.data(), work.shrink);
    }
    give_results(c, work, head, start, out);
}

template <typename Number, typename Item>
void attend_chunk(const Chunk& c, const Item* q, const Item* memory, const int* blocks, Item* out, float scale,
                  int num_threads) {
    long pieces = (c.rows * c.ratio() + LANES - 1) / LANES;
#pragma omp parallel num_threads(num_threads) if (num_threads > 1 && c.rows * c.heads * c.context > SERIAL_ITEMS)
    {
        Work<Number> work(c);
        // The last rows see the most keys, so they run first and the end of the loop is short work. Heads run one after
        // the other, because the keys and values of a head may still be cached.
#pragma omp for schedule(dynamic) nowait
        for (long i = 0; i < pieces * c.kv_heads; i++) {
            long piece = pieces - 1 - i % pieces;
            attend(c, work, q, memory, blocks, i / pieces, piece * LANES, scale, out);
        }
    }
}

Chunk chunk_of(const long* sizes, const float* sinks) {
    return {sizes[0], sizes[1], sizes[2], sizes[3],  sizes[4],  sizes[5], sizes[6],
            sizes[7], sizes[8], sizes[9], sizes[10], sizes[11], sinks};
}

}  // namespace

// sizes: rows, heads, kv_heads, layers, parts, block_tokens, dim, value_dim, layer, context, window, chunk.
// sinks: one for each head, or null.
WEFT_EXPORT void weft_attend_chunk_f32(const float* q, const float* memory, const int* blocks, float* out,
                                       const long* sizes, float scale, const float* sinks, int num_threads) {
    attend_chunk<float>(chunk_of(sizes, sinks), q, memory, blocks, out, scale, num_threads);
}

WEFT_EXPORT void weft_attend_chunk_bf16(const uint16_t* q, const uint16_t* memory, const int* blocks, uint16_t* out,
                                        const long* sizes, float scale, const float* sinks, int num_threads) {
    Chunk c = chunk_of(sizes, sinks);
#ifdef __AMX_BF16__
    if (c.dim % 32 == 0 && c.value_dim % 16 == 0)
        return attend_chunk_by_matrices(c, q, memory, blocks, out, scale, num_threads);
#endif
#ifdef WEFT_PAIRS
    if (c.dim % 2 == 0) return attend_chunk<Pair>(c, q, memory, blocks, out, scale, num_threads);
#endif
    attend_chunk<float>(c, q, memory, blocks, out, scale, num_threads);
}
