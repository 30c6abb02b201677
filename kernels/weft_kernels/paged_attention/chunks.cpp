// Attention of many query rows of one sequence over keys and values in the pool.

#include "chunks.h"
#ifdef __AMX_BF16__
#include "amx_chunks.h"
#endif

using namespace weft;

namespace {

// `count` lines in one block: floats as they lie, others widened.
const float* widened(const HeadLines<float>& lines, long at, long, float*) { return lines.at(at); }
const float* widened(const HeadLines<uint16_t>& lines, long at, long count, float* wide) {
    const uint16_t* from = lines.at(at);
    for (long t = 0; t < count; t++, from += lines.stride)
        for (long d = 0; d < lines.dim; d++) wide[t * lines.dim + d] = widen(from[d]);
    return wide;
}

// Numbers from line to line of the runs below.
long run_stride(const HeadLines<float>& lines, const Work<float>&) { return lines.stride; }
long run_stride(const HeadLines<uint16_t>& lines, const Work<float>&) { return lines.dim; }

// The runs of `count` keys from position `at` on; returns how many.
template <typename Item>
long runs_of_keys(const HeadLines<Item>& keys, Work<float>& work, long at, long count) {
    long num_runs = 0;
    for (long done = 0, size; done < count; done += size) {
        size = keys.together(at + done, count - done);
        work.runs[num_runs++] = {widened(keys, at + done, size, work.made.data() + done * keys.dim), size};
    }
    return num_runs;
}

template <typename Item>
long runs_of_values(const HeadLines<Item>& values, Work<float>& work, long at, long count) {
    return runs_of_keys(values, work, at, count);
}

#ifdef WEFT_PAIRS
long run_stride(const HeadLines<uint16_t>& lines, const Work<Pair>&) { return lines.stride / 2; }

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
        for (long t = 0; t < size; t++) rows[done + t] = from + t * values.stride;
    }
    rows[count] = work.zeros.data();
    Pair* to = work.made.data();
    for (long t = 0; t < count; t += 2) {
        long d = 0, size = values.dim;
        for (; d + W <= size; d += W) store(to + d, pairs_of(rows[t] + d, rows[t + 1] + d));
        for (; d < size; d++) to[d] = rows[t][d] | Pair(rows[t + 1][d]) << 16;
        to += size;
    }
    work.runs[0] = {work.made.data(), (count + 1) / 2};
    return 1;
}
#endif

template <typename Item, typename Number>
void attend(const Chunk& c, Work<Number>& work, const Item* q, const int* blocks, long head, long start, float scale,
            Item* out) {
    constexpr bool ARE_PAIRS = !std::is_same<Number, float>::value;
    take_queries(c, work, q, head, start, scale);
    HeadLines<Item> keys = keys_of<Item>(c, blocks, head), values = values_of<Item>(c, blocks, head);
    long dim = ARE_PAIRS ? c.dim / 2 : c.dim, key_stride = run_stride(keys, work);
    long value_stride = ARE_PAIRS ? c.value_dim : run_stride(values, work);
    for (long at = long(work.least_first), count; at < long(work.most_end); at += count) {
        count = std::min(KEYS_AT_ONCE, long(work.most_end) - at);
        long num_runs = runs_of_keys(keys, work, at, count), done = 0;
        for (long r = 0; r < num_runs; done += work.runs[r++].count) {
            Run<Number> run{work.runs[r].data, dim};
            ask_for(values.at(at + done), work.runs[r].count * c.value_stride * sizeof(Item));
            float* scores = &work.scores[done * LANES];
            products<false>(&run, 1, work.runs[r].count, key_stride, work.queries.data(), scores, nullptr);
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
void attend_chunk(const Chunk& c, const Item* q, const int* blocks, Item* out, float scale, int num_threads) {
    long pieces = (c.rows * c.ratio() + LANES - 1) / LANES;
#pragma omp parallel num_threads(num_threads) if (num_threads > 1 && c.rows * c.heads * c.context > SERIAL_ITEMS)
    {
        Work<Number> work(c);
        // The last rows see the most keys, so they run first and the end of the loop is short work. Heads run one after
        // the other, because the keys and values of a head may still be cached.
#pragma omp for schedule(dynamic) nowait
        for (long i = 0; i < pieces * c.kv_heads; i++) {
            long piece = pieces - 1 - i % pieces;
            attend(c, work, q, blocks, i / pieces, piece * LANES, scale, out);
        }
    }
}

Chunk chunk_of(const Pool* cache, const long* sizes, const float* sinks) {
    Chunk c{*cache, sizes[0], sizes[1], sizes[3], sizes[4], sizes[5], sizes[6], sinks};
    c.value_dim = sizes[2];
    return c;
}

}  // namespace

// sizes: rows, heads, value_dim, context, window, chunk, first slot to be seen. sinks: one for each head, or null.
WEFT_EXPORT void weft_attend_chunk_f32(const float* q, const Pool* cache, const int* blocks, float* out,
                                       const long* sizes, float scale, const float* sinks, int num_threads) {
    attend_chunk<float>(chunk_of(cache, sizes, sinks), q, blocks, out, scale, num_threads);
}

WEFT_EXPORT void weft_attend_chunk_bf16(const uint16_t* q, const Pool* cache, const int* blocks, uint16_t* out,
                                        const long* sizes, float scale, const float* sinks, int num_threads) {
    Chunk c = chunk_of(cache, sizes, sinks);
#ifdef __AMX_BF16__
    if (c.dim % 32 == 0 && c.value_dim % 16 == 0)
        return attend_chunk_by_matrices(c, q, blocks, out, scale, num_threads);
#endif
#ifdef WEFT_PAIRS
    if ((c.dim | c.key_stride) % 2 == 0) return attend_chunk<Pair>(c, q, blocks, out, scale, num_threads);
#endif
    attend_chunk<float>(c, q, blocks, out, scale, num_threads);
}
