// All layers of a dense decoder for a few rows in one parallel region. The work between two products takes less time than
// waking threads or running the Python interpreter.
//
// It calls the kernels of the single steps in their order, so the results are equal to the last bit.

#include "../collectives/shared.h"
#include "../linear/linear.h"
#include "../paged_attention/rows.h"
#include "../rms_norm/rms_norm.h"
#include "../rope/rotate.h"
#include "../rope_kv/rope_kv.h"
#include "../silu_mul/silu_mul.h"

#include <algorithm>
#include <vector>

#ifdef _OPENMP
#include <omp.h>
#endif

using namespace weft;

// One layer: its weights (null if missing), the view of its attention, and the group of its slots.
struct Layer {
    const void *input_norm, *qkv, *bias, *q_norm, *k_norm;
    const float* query_weight;
    const void *output, *output_bias, *attended_norm, *mlp_norm;
    const void *gate_up, *gate_up_bias, *down, *down_bias, *output_norm;
    long view, group;
    long rotation;          // index among the step's angles, -1: none
    long q_parts, k_parts;  // of a row's queries and keys, each normed for itself
    long is_normed_last;    // queries and keys are normed behind the rotation
    long is_scaled;         // queries are multiplied by the row's factor
};

// Norms of a bfloat16 model may have float weights.
struct Model {
    long num_layers, hidden, num_heads, kv_heads, dim, size, is_gelu, has_float_norms;
    float eps, scale, residual_scale;
    const Layer* layers;
    const void* norm;
    const SharedGroup* group;  // of the ranks that share each layer, null for one rank
};

// Rows of a batch as in `weft_kernels.paged_attention.cpu`, for layers with the same span.
struct View {
    const int *blocks, *spans;
};

// Rotations [rows, dim] of some layers, floats or Items.
struct Angles {
    const void *cos, *sin;
};

// stream [rows, hidden] is overwritten, out is as large; pools [layers]; slots [groups, rows]; query_factors [rows];
// captured [rows, num_captured, hidden] gets copies of the stream at `boundaries`, where -1 stands for `out`.
struct Step {
    long num_rows, num_views, has_float_angles, num_captured;
    const View* views;
    const Angles* angles;
    void *stream, *out;
    const Pool* pools;
    const int64_t* slots;
    const float* query_factors;
    const long* boundaries;
    void* captured;
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

// See `weft::norm`.
template <typename Item>
void norm_rows(const Model& m, const Parts& parts, const Item* x, const Item* residual, const void* weight, Item* total,
               Item* out) {
    if (m.has_float_norms)
        norm(parts, x, residual, (const float*)weight, total, out);
    else
        norm(parts, x, residual, (const Item*)weight, total, out);
}

// Norms queries and keys in place.
template <typename Item>
void norm_heads(const Model& m, const Layer& layer, long rows, Item* qkv) {
    long row = (m.num_heads + 2 * m.kv_heads) * m.dim, queries = m.num_heads * m.dim, keys = m.kv_heads * m.dim;
    Parts parts{rows, layer.q_parts, queries / layer.q_parts, row, row, m.eps};
    norm_rows<Item>(m, parts, qkv, nullptr, layer.q_norm, nullptr, qkv);
    parts.heads = layer.k_parts, parts.size = keys / layer.k_parts;
    norm_rows<Item>(m, parts, qkv + queries, nullptr, layer.k_norm, nullptr, qkv + queries);
#pragma omp barrier
}

// Rotates queries and keys in place.
template <typename Item, typename Angle>
void rotate_heads(const Model& m, long rows, const Angle* cos, const Angle* sin, Item* qkv) {
    long all = m.num_heads + 2 * m.kv_heads, rotated = m.num_heads + m.kv_heads;
#pragma omp for schedule(static)
    for (long i = 0; i < rows * rotated; i++) {
        long r = i / rotated, at = r * m.dim;
        Item* head = qkv + (r * all + i % rotated) * m.dim;
        rotate(head, cos + at, sin + at, head, m.dim / 2);
    }
}

// Multiplies row r by factors[r * step]. The rows are dealt out to threads as in `norm` and `rope_kv`.
template <typename Item>
void scale_rows(const float* factors, long step, long rows, long size, Item* x) {
#pragma omp for schedule(static) nowait
    for (long r = 0; r < rows; r++)
        for (long i = r * size; i < (r + 1) * size; i += W) store_narrow(x + i, load_wide(x + i) * factors[r * step]);
}

// Multiplies each head of a row by `weight` [dim], with rows dealt out in the same way.
template <typename Item>
void weigh_heads(const float* weight, long rows, long heads, long dim, Item* x) {
#pragma omp for schedule(static) nowait
    for (long r = 0; r < rows; r++)
        for (Item* head = x + r * heads * dim; head < x + (r + 1) * heads * dim; head += dim)
            for (long d = 0; d < dim; d += W) store_narrow(head + d, load_wide(head + d) * load_wide(weight + d));
}

// to += x, with rows dealt out in the same way.
template <typename Item>
void add_rows(const Item* x, long rows, long size, Item* to) {
#pragma omp for schedule(static) nowait
    for (long r = 0; r < rows; r++)
        for (long i = r * size; i < (r + 1) * size; i += W) store_narrow(to + i, load_wide(to + i) + load_wide(x + i));
}

// Queries to b.q, keys and values into the pool.
template <typename Item, typename Angle>
void place_heads(const Model& m, const Layer& layer, const Pool& pool, const Step& step, const Between<Item>& b) {
    Angles angles = layer.rotation < 0 ? Angles{} : step.angles[layer.rotation];
    auto cos = (const Angle*)angles.cos, sin = (const Angle*)angles.sin;
    if (layer.q_norm && !layer.is_normed_last) norm_heads(m, layer, step.num_rows, b.qkv);
    if (layer.is_normed_last) {
        rotate_heads(m, step.num_rows, cos, sin, b.qkv);
        norm_heads(m, layer, step.num_rows, b.qkv);
        cos = nullptr;
    }
    rope_kv(step.num_rows, m.num_heads, b.qkv, cos, sin, pool, step.slots + layer.group * step.num_rows, b.q);
    if (layer.is_scaled) scale_rows(step.query_factors, 1, step.num_rows, m.num_heads * m.dim, b.q);
    if (layer.query_weight) weigh_heads(layer.query_weight, step.num_rows, m.num_heads, m.dim, b.q);
#pragma omp barrier
}

// Makes the ranks' parts of `pending` the sum of them. If a rank is lost, the group's memory says so.
template <typename Item>
void sum_pending(const Model& m, long rows, Item* pending) {
    if (!m.group) return;
    long thread = 0, threads = 1;
#ifdef _OPENMP
    thread = omp_get_thread_num(), threads = omp_get_num_threads();
#endif
    sum_over_ranks(*m.group, pending, rows * m.hidden, thread, threads);
#pragma omp barrier
}

// Attention of one layer: x -> pending.
template <typename Item, typename Weight>
void attend(const Model& m, const Layer& layer, const Step& step, Works& works, const Item* x, const Between<Item>& b) {
    long rows = step.num_rows, heads = m.num_heads + 2 * m.kv_heads;
    const Pool& pool = step.pools[&layer - m.layers];
    multiply(Shape{rows, m.hidden, heads * m.dim}, x, (const Weight*)layer.qkv, (const Item*)layer.bias, b.qkv,
             b.scratch);
#pragma omp barrier
    if (step.has_float_angles)
        place_heads<Item, float>(m, layer, pool, step, b);
    else
        place_heads<Item, Item>(m, layer, pool, step, b);
    attend_rows(works, pool, b.q, b.attended, m.scale);
#pragma omp barrier
    multiply(Shape{rows, m.num_heads * m.dim, m.hidden}, b.attended, (const Weight*)layer.output,
             (const Item*)layer.output_bias, b.pending, b.scratch);
#pragma omp barrier
    sum_pending(m, rows, b.pending);
}

// The MLP of one layer: x -> pending.
template <typename Item, typename Weight>
void feed(const Model& m, const Layer& layer, long rows, const Item* x, const Between<Item>& b) {
    multiply(Shape{rows, m.hidden, 2 * m.size}, x, (const Weight*)layer.gate_up, (const Item*)layer.gate_up_bias,
             b.gate_up, b.scratch);
#pragma omp barrier
    if (m.is_gelu)
        gelu_mul(b.gate_up, b.gated, rows, m.size);
    else
        silu_mul(b.gate_up, b.gated, rows, m.size);
#pragma omp barrier
    multiply(Shape{rows, m.size, m.hidden}, b.gated, (const Weight*)layer.down, (const Item*)layer.down_bias, b.pending,
             b.scratch);
#pragma omp barrier
    sum_pending(m, rows, b.pending);
}

// Adds `pending`, normed by `output_norm` and scaled, to the stream, except before the first layer, where it is null.
// Then norms the stream by `input_norm` into `normed`. Returns what is read next. Norms may be null. A row stays with one
// thread, so there is no barrier between the passes.
template <typename Item>
const Item* add_and_norm(const Model& m, long rows, Item* pending, const void* output_norm, Item* stream,
                         const void* input_norm, Item* normed) {
    Parts parts{rows, 1, m.hidden, m.hidden, m.hidden, m.eps};
    if (output_norm) norm_rows<Item>(m, parts, pending, nullptr, output_norm, nullptr, pending);
    if (pending && m.residual_scale != 1) scale_rows(&m.residual_scale, 0, rows, m.hidden, pending);
    if (input_norm && pending)
        norm_rows(m, parts, pending, stream, input_norm, stream, normed);
    else if (input_norm)
        norm_rows<Item>(m, parts, stream, nullptr, input_norm, nullptr, normed);
    else if (pending)
        add_rows(pending, rows, m.hidden, stream);
#pragma omp barrier
    return input_norm ? normed : stream;
}

// Copies x if this boundary is wanted. There is a barrier before it, and one between it and the next write to x.
template <typename Item>
void capture(const Model& m, const Step& step, long boundary, const Item* x) {
    for (long i = 0; i < step.num_captured; i++) {
        if (step.boundaries[i] != boundary) continue;
#pragma omp for schedule(static) nowait
        for (long r = 0; r < step.num_rows; r++)
            std::copy_n(x + r * m.hidden, m.hidden, (Item*)step.captured + (r * step.num_captured + i) * m.hidden);
    }
}

// All threads of a team call this.
template <typename Item, typename Weight>
void run_layers(const Model& m, const Step& step, std::vector<Works>& works, const Between<Item>& b) {
    Item *stream = (Item*)step.stream, *pending = nullptr;
    const void* output_norm = nullptr;  // of the layer before
    for (const Layer* layer = m.layers; layer < m.layers + m.num_layers; layer++) {
        const Item* x = add_and_norm(m, step.num_rows, pending, output_norm, stream, layer->input_norm, b.normed);
        capture(m, step, layer - m.layers, stream);
        attend<Item, Weight>(m, *layer, step, works[layer->view], x, b);
        x = add_and_norm(m, step.num_rows, b.pending, layer->attended_norm, stream, layer->mlp_norm, b.normed);
        feed<Item, Weight>(m, *layer, step.num_rows, x, b);
        pending = b.pending, output_norm = layer->output_norm;
    }
    add_and_norm(m, step.num_rows, pending, output_norm, stream, m.norm, (Item*)step.out);
    capture(m, step, m.num_layers, stream);
    capture(m, step, -1, (Item*)step.out);
}

template <typename Item, typename Weight>
void fused_decoder(const Model& m, const Step& step, int threads) {
    Between<Item> between(m, step.num_rows);
    std::vector<Works> works;
    for (const View* view = step.views; view < step.views + step.num_views; view++)
        works.emplace_back(view->blocks, view->spans, step.num_rows, m.num_heads, step.pools[0], threads);
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
