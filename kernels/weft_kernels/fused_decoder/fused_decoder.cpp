// All layers of a dense decoder for a few rows in one parallel region. The work between two products takes less time than
// waking threads or running the Python interpreter.
//
// It calls the kernels of the single steps in their order, so the results are equal to the last bit.

#include "../linear/linear.h"
#include "../paged_attention/rows.h"
#include "../rms_norm/rms_norm.h"
#include "../rope_kv/rope_kv.h"
#include "../silu_mul/silu_mul.h"

#include <algorithm>
#include <vector>

using namespace weft;

// One layer: its weights (null if missing), the view of its attention, and the place of its keys.
struct Layer {
    const void *input_norm, *qkv, *bias, *q_norm, *k_norm, *output, *mlp_norm, *gate_up, *down;
    long view, group, place, is_rotated;
};

struct Model {
    long num_layers, hidden, num_heads, kv_heads, dim, size;
    float eps, scale;
    const Layer* layers;
    const void* norm;
};

// Rows of a batch as in `weft_kernels.paged_attention.cpu`, for layers with the same span.
struct View {
    const int *blocks, *spans;
};

// stream [rows, hidden] is overwritten, out is as large; cos, sin [rows, dim]; slots [groups, rows].
struct Step {
    long num_rows, num_views, pool_layers, block_tokens;
    const View* views;
    void *stream, *out, *pool;
    const void *cos, *sin;
    const int64_t* slots;
};

namespace {

// Buffers between the parts of a layer, shared by all threads; the calling thread reuses them for every step.
template <typename Item>
struct Between {
    Item *normed, *qkv, *q, *attended, *pending, *gate_up, *gated;
    float* scratch;

    Between(const Model& m, long rows) {
        static thread_local std::vector<char> memory;
        long queries = m.num_heads * m.dim, all = queries + 2 * m.kv_heads * m.dim;
        long sizes[] = {m.hidden, all, queries, queries, m.hidden, 2 * m.size, m.size};
        Item** places[] = {&normed, &qkv, &q, &attended, &pending, &gate_up, &gated};
        size_t inputs = Shape{rows, std::max({m.hidden, queries, m.size}), 0}.scratch_floats();
        size_t total = inputs * sizeof(float) + LINE;
        for (long size : sizes) total += whole_lines(rows * size);
        if (memory.size() < total) memory.resize(total);
        char* at = memory.data() + LINE - size_t(memory.data()) % LINE;
        for (int i = 0; i < 7; at += whole_lines(rows * sizes[i]), i++) *places[i] = (Item*)at;
        scratch = (float*)at;
    }

    static constexpr size_t LINE = 64;
    static size_t whole_lines(size_t items) { return (items * sizeof(Item) + LINE - 1) / LINE * LINE; }
};

// Attention of one layer: normed -> attended.
template <typename Item, typename Weight>
void attend(const Model& m, const Layer& layer, const Step& step, Works& works, const Between<Item>& b) {
    long rows = step.num_rows, heads = m.num_heads + 2 * m.kv_heads;
    multiply(Shape{rows, m.hidden, heads * m.dim}, b.normed, (const Weight*)layer.qkv, (const Item*)layer.bias, b.qkv,
             b.scratch);
#pragma omp barrier
    if (layer.q_norm) {
        Parts parts{rows, m.num_heads, m.dim, heads * m.dim, heads * m.dim, m.eps};
        norm<Item>(parts, b.qkv, nullptr, (const Item*)layer.q_norm, nullptr, b.qkv);
        Item* keys = b.qkv + m.num_heads * m.dim;
        parts.heads = m.kv_heads;
        norm<Item>(parts, keys, nullptr, (const Item*)layer.k_norm, nullptr, keys);
#pragma omp barrier
    }
    KvSizes sizes{rows, m.num_heads, m.kv_heads, m.dim, 2 * step.pool_layers, 2 * layer.place, step.block_tokens};
    const Item* cos = layer.is_rotated ? (const Item*)step.cos : nullptr;
    rope_kv(sizes, b.qkv, cos, (const Item*)step.sin, (Item*)step.pool, step.slots + layer.group * rows, b.q);
#pragma omp barrier
    Pool pool{m.kv_heads, step.pool_layers, 2, step.block_tokens, m.dim, m.dim, layer.place};
    attend_rows(works, pool, b.q, (const Item*)step.pool, b.attended, m.scale);
#pragma omp barrier
}

// The MLP of one layer: normed -> pending.
template <typename Item, typename Weight>
void feed(const Model& m, const Layer& layer, long rows, const Between<Item>& b) {
    const Item* no_bias = nullptr;
    multiply(Shape{rows, m.hidden, 2 * m.size}, b.normed, (const Weight*)layer.gate_up, no_bias, b.gate_up, b.scratch);
#pragma omp barrier
    silu_mul(b.gate_up, b.gated, rows, m.size);
#pragma omp barrier
    multiply(Shape{rows, m.size, m.hidden}, b.gated, (const Weight*)layer.down, no_bias, b.pending, b.scratch);
#pragma omp barrier
}

// All threads of a team call this.
template <typename Item, typename Weight>
void run_layers(const Model& m, const Step& step, std::vector<Works>& works, const Between<Item>& b) {
    Item *stream = (Item*)step.stream, *out = (Item*)step.out;
    Parts parts{step.num_rows, 1, m.hidden, m.hidden, m.hidden, m.eps};
    for (const Layer* layer = m.layers; layer < m.layers + m.num_layers; layer++) {
        bool is_first = layer == m.layers;
        norm<Item>(parts, is_first ? stream : b.pending, is_first ? nullptr : stream, (const Item*)layer->input_norm,
                   is_first ? nullptr : stream, b.normed);
#pragma omp barrier
        attend<Item, Weight>(m, *layer, step, works[layer->view], b);
        multiply(Shape{step.num_rows, m.num_heads * m.dim, m.hidden}, b.attended, (const Weight*)layer->output,
                 (const Item*)nullptr, b.pending, b.scratch);
#pragma omp barrier
        norm<Item>(parts, b.pending, stream, (const Item*)layer->mlp_norm, stream, b.normed);
#pragma omp barrier
        feed<Item, Weight>(m, *layer, step.num_rows, b);
    }
    norm<Item>(parts, b.pending, stream, (const Item*)m.norm, stream, out);
}

template <typename Item, typename Weight>
void fused_decoder(const Model& m, const Step& step, int threads) {
    Between<Item> between(m, step.num_rows);
    std::vector<Works> works;
    Pool pool{m.kv_heads, step.pool_layers, 2, step.block_tokens, m.dim, m.dim, 0};
    for (const View* view = step.views; view < step.views + step.num_views; view++)
        works.emplace_back(view->blocks, view->spans, step.num_rows, m.num_heads, pool);
#pragma omp parallel num_threads(threads) if (threads > 1)
    run_layers<Item, Weight>(m, step, works, between);
}

}  // namespace

// Suffixes: types of activations and of weights.
WEFT_EXPORT void weft_fused_decoder_f32_f32(const Model* model, const Step* step, int threads) {
    fused_decoder<float, float>(*model, *step, threads);
}

WEFT_EXPORT void weft_fused_decoder_f32_bf16(const Model* model, const Step* step, int threads) {
    fused_decoder<float, uint16_t>(*model, *step, threads);
}

WEFT_EXPORT void weft_fused_decoder_f32_packed12(const Model* model, const Step* step, int threads) {
    fused_decoder<float, Packed12>(*model, *step, threads);
}

#ifndef __AMX_BF16__
WEFT_EXPORT void weft_fused_decoder_bf16_packed12(const Model* model, const Step* step, int threads) {
    fused_decoder<uint16_t, Packed12>(*model, *step, threads);
}
#endif

WEFT_EXPORT void weft_fused_decoder_bf16_bf16(const Model* model, const Step* step, int threads) {
    fused_decoder<uint16_t, uint16_t>(*model, *step, threads);
}
