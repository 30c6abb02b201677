// x @ weight^T with float activations and sums, and weights in bfloat16 or float32 that are packed by panels.
//
// A panel holds 2 W outputs: for each input k one line of 2 W weights, so that memory is read in one straight run, a
// line is multiplied by the k-th activation of every row in registers, and no sum goes across a vector.
// In a bfloat16 line word j holds output j in its lower and output j + W in its upper half: a shift and a mask widen it.

#include "../native/vector.h"

#include <sys/mman.h>

#include <algorithm>
#include <vector>

using namespace weft;

namespace {

constexpr int PANEL = 2 * W;
constexpr int MAX_ROWS = REGISTERS == 32 ? 12 : 6;
// Inputs summed before the sums go to memory: a slice of a panel stays in the first-level cache for all rows.
constexpr long SLICE = 256;
// Tiles of rows whose activations of one slice stay in the second-level cache.
constexpr long TILES_AT_ONCE = 20;
// Activations of all inputs that stay there beside the weights that pass through it.
constexpr long CACHED_BYTES = 256 * 1024;
// Bytes of weights a thread takes at a time, so that a thread whose core is busy elsewhere holds up nobody.
constexpr long TAKE_BYTES = 128 * 1024;
constexpr long SERIAL_PRODUCTS = 1 << 17;
// One row is as fast as memory is: asking early gave 2%, pages of 2 MiB 6%. With more rows, asking for the panel's next
// slice and the next tile's activations while these are multiplied gave 20 to 40% (Zen 5, one thread, 8 to 2,048 rows).
constexpr long lines_ahead(int rows) { return rows <= 3 ? 32 : SLICE; }
constexpr size_t HUGE_PAGE = 2 << 20;

template <typename Weight>
struct Pair;

template <>
struct Pair<uint16_t> {
    Floats low, high;
    WEFT_INLINE explicit Pair(const uint16_t* line) {
        Words words = load<Words>(line);
        low = (Floats)(words << 16);
        high = (Floats)(words & 0xFFFF0000u);
    }
};

template <>
struct Pair<float> {
    Floats low, high;
    WEFT_INLINE explicit Pair(const float* line) : low(load<Floats>(line)), high(load<Floats>(line + W)) {}
};

// Where weight (output o of the panel, any input) lies in its line.
template <typename Weight>
constexpr int place(int o) {
    return sizeof(Weight) == 2 ? (o % W) * 2 + o / W : o;
}

// Panels multiplied at a time. With few rows one panel gives too few sums to hide the time that a product takes.
constexpr int panels_at_once(int rows) { return rows == 1 ? 4 : rows <= 3 ? 2 : 1; }

struct Span {
    long num_inputs, panel_stride, out_stride;
    bool is_first;
};

// out[r, p * PANEL ..] (+)= sum over k of x[k, r] * line k of panel p; x is packed by rows: [num_inputs, Rows].
// Every sum runs over k in order, so that a row comes out the same whatever rows stand beside it.
template <typename Weight, int Rows, int Panels>
WEFT_INLINE void tile(const float* x, const Weight* panel, float* out, const Span& span) {
    Floats low[Panels][Rows] = {}, high[Panels][Rows] = {};
    for (long k = 0; k < span.num_inputs; k++) {
#pragma GCC unroll 4
        for (int p = 0; p < Panels; p++) {
            const Weight* line = panel + p * span.panel_stride + k * PANEL;
            Pair<Weight> pair(line);
            const Weight* later = line + lines_ahead(Rows) * PANEL;
            __builtin_prefetch(later, 0, Rows <= 3 ? 3 : 2);
            if (sizeof(Weight) == sizeof(float)) __builtin_prefetch(later + W, 0, Rows <= 3 ? 3 : 2);
            if (Rows > 3) __builtin_prefetch(x + (k + SLICE) * Rows, 0, 2);
#pragma GCC unroll 12
            for (int r = 0; r < Rows; r++) {
                Floats value = splat(x[k * Rows + r]);
                low[p][r] += value * pair.low;
                high[p][r] += value * pair.high;
            }
        }
    }
#pragma GCC unroll 4
    for (int p = 0; p < Panels; p++)
#pragma GCC unroll 12
        for (int r = 0; r < Rows; r++) {
            float* to = out + r * span.out_stride + p * PANEL;
            if (!span.is_first) low[p][r] += load<Floats>(to), high[p][r] += load<Floats>(to + W);
            store(to, low[p][r]);
            store(to + W, high[p][r]);
        }
}

template <typename Weight, int Rows>
void tiles(const float* x, const Weight* panel, float* out, const Span& span, int num_panels) {
    constexpr int MANY = panels_at_once(Rows);
    if (MANY > 1 && num_panels == MANY) return tile<Weight, Rows, MANY>(x, panel, out, span);
    for (int p = 0; p < num_panels; p++)
        tile<Weight, Rows, 1>(x, panel + p * span.panel_stride, out + p * PANEL, span);
}

template <typename Weight>
using Tiles = void (*)(const float*, const Weight*, float*, const Span&, int);

template <typename Weight>
Tiles<Weight> tiles_of(long rows) {
    static constexpr Tiles<Weight> all[] = {tiles<Weight, 1>, tiles<Weight, 2>, tiles<Weight, 3>, tiles<Weight, 4>,
                                            tiles<Weight, 5>, tiles<Weight, 6>,
#if WEFT_WIDTH == 16
                                            tiles<Weight, 7>, tiles<Weight, 8>, tiles<Weight, 9>, tiles<Weight, 10>,
                                            tiles<Weight, 11>, tiles<Weight, 12>
#endif
    };
    return all[rows - 1];
}

struct Shape {
    long num_rows, num_inputs, num_outputs;
    long num_tiles() const { return (num_rows + MAX_ROWS - 1) / MAX_ROWS; }
    // Tiles as even as can be: 13 rows are 7 and 6.
    long first_row(long t) const { return t * num_rows / num_tiles(); }
    long num_panels() const { return (num_outputs + PANEL - 1) / PANEL; }
};

// Tile t of x, each slice of its inputs as [inputs, rows]; one slice of all tiles is one run.
void pack_rows(const Shape& shape, const float* x, long t, float* packed) {
    long first = shape.first_row(t), rows = shape.first_row(t + 1) - first;
    for (long slice = 0; slice < shape.num_inputs; slice += SLICE) {
        long count = std::min(SLICE, shape.num_inputs - slice);
        float* to = packed + slice * shape.num_rows + first * count;
        for (long start = 0; start < count; start += W)  // one cache line of each row at a time
            for (long r = 0; r < rows; r++) {
                const float* from = x + (first + r) * shape.num_inputs + slice;
                for (long k = start; k < std::min(start + W, count); k++) to[k * rows + r] = from[k];
            }
    }
}

// One slice of `count` panels from panel p on, times the rows of tiles [first_tile, end_tile).
template <typename Weight>
void slice_times_tiles(const Shape& shape, const float* x, const Weight* packed, long p, int count, long k,
                       long first_tile, long end_tile, float* out) {
    const Weight* panel = packed + (p * shape.num_inputs + k) * PANEL;
    long column = p * PANEL, columns = std::min<long>(count * PANEL, shape.num_outputs - column);
    Span span{std::min(SLICE, shape.num_inputs - k), shape.num_inputs * PANEL, shape.num_outputs, k == 0};
    for (long t = first_tile; t < end_tile; t++) {
        long first = shape.first_row(t), rows = shape.first_row(t + 1) - first;
        const float* from = x + k * shape.num_rows + first * span.num_inputs;
        float* to = out + first * shape.num_outputs + column;
        if (columns == count * PANEL) {
            tiles_of<Weight>(rows)(from, panel, to, span, count);
            continue;
        }
        float edge[MAX_ROWS * PANEL];  // the last panel is wider than what is left of the output; count is 1
        tiles_of<Weight>(rows)(from, panel, edge, Span{span.num_inputs, 0, PANEL, true}, 1);
        for (long r = 0; r < rows; r++)
            for (long c = 0; c < columns; c++) {
                float* cell = to + r * shape.num_outputs + c;
                *cell = (k == 0 ? 0.0f : *cell) + edge[r * PANEL + c];
            }
    }
}

// Where the activations are too many to be read again for every panel, all panels take one slice before the next one.
template <typename Weight>
void panels_times_rows(const Shape& shape, const float* x, const Weight* packed, long first_panel, long end_panel,
                       float* out) {
    long num_tiles = shape.num_tiles(), num_blocks = (num_tiles + TILES_AT_ONCE - 1) / TILES_AT_ONCE;
    long many = panels_at_once(shape.first_row(1)), whole_panels = shape.num_outputs / PANEL;
    bool is_cached = shape.num_rows * shape.num_inputs * long(sizeof(float)) <= CACHED_BYTES;
    for (long b = 0; b < num_blocks; b++) {
        long tile = b * num_tiles / num_blocks, end_tile = (b + 1) * num_tiles / num_blocks;
        for (long group = first_panel, end; group < end_panel; group = end) {
            end = is_cached ? std::min(group + many, end_panel) : end_panel;
            for (long k = 0; k < shape.num_inputs; k += SLICE)
                for (long p = group, count; p < end; p += count) {
                    count = p + many <= std::min(end, whole_panels) ? many : 1;
                    slice_times_tiles(shape, x, packed, p, count, k, tile, end_tile, out);
                }
        }
    }
}

template <typename Weight>
void linear(const Shape& shape, const float* x, const Weight* packed, float* out, int num_threads) {
    static thread_local std::vector<float> scratch;
    float* rows = const_cast<float*>(x);
    if (shape.num_rows > 1) {
        if (scratch.size() < size_t(shape.num_rows * shape.num_inputs))
            scratch.resize(shape.num_rows * shape.num_inputs);
        rows = scratch.data();
    }
    long take = std::max<long>(4, TAKE_BYTES / (shape.num_inputs * PANEL * long(sizeof(Weight))));
    if (shape.num_rows * shape.num_inputs * shape.num_outputs < SERIAL_PRODUCTS) num_threads = 1;
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
    {
        if (shape.num_rows > 1) {
#pragma omp for schedule(static)
            for (long t = 0; t < shape.num_tiles(); t++) pack_rows(shape, x, t, rows);
        }
#pragma omp for schedule(dynamic)
        for (long p = 0; p < shape.num_panels(); p += take)
            panels_times_rows(shape, rows, packed, p, std::min(p + take, shape.num_panels()), out);
    }
}

// Before the first write; where the system has none to give, nothing changes.
void ask_for_huge_pages(void* memory, size_t size) {
    size_t start = (size_t(memory) + HUGE_PAGE - 1) & ~(HUGE_PAGE - 1), end = (size_t(memory) + size) & ~(HUGE_PAGE - 1);
    if (start < end) madvise(reinterpret_cast<void*>(start), end - start, MADV_HUGEPAGE);
}

template <typename Weight>
void pack(const Weight* weight, long num_outputs, long num_inputs, Weight* packed, int num_threads) {
    constexpr long AT_ONCE = 64;
    long num_panels = (num_outputs + PANEL - 1) / PANEL;
    ask_for_huge_pages(packed, num_panels * PANEL * num_inputs * sizeof(Weight));
#pragma omp parallel for schedule(dynamic) num_threads(num_threads) if (num_threads > 1)
    for (long p = 0; p < num_panels; p++) {
        Weight* panel = packed + p * num_inputs * PANEL;
        for (long start = 0; start < num_inputs; start += AT_ONCE) {
            long end = std::min(start + AT_ONCE, num_inputs);
            for (int o = 0; o < PANEL; o++) {
                long row = p * PANEL + o;
                const Weight* from = weight + row * num_inputs;
                Weight* to = panel + place<Weight>(o);
                for (long k = start; k < end; k++) to[k * PANEL] = row < num_outputs ? from[k] : Weight(0);
            }
        }
    }
}

}  // namespace

WEFT_EXPORT long weft_panel() { return PANEL; }

WEFT_EXPORT void weft_pack_bf16(const uint16_t* weight, long outputs, long inputs, uint16_t* packed, int threads) {
    pack(weight, outputs, inputs, packed, threads);
}

WEFT_EXPORT void weft_pack_f32(const float* weight, long outputs, long inputs, float* packed, int threads) {
    pack(weight, outputs, inputs, packed, threads);
}

WEFT_EXPORT void weft_linear_bf16(const float* x, long rows, long inputs, long outputs, const uint16_t* packed,
                                  float* out, int threads) {
    linear(Shape{rows, inputs, outputs}, x, packed, out, threads);
}

WEFT_EXPORT void weft_linear_f32(const float* x, long rows, long inputs, long outputs, const float* packed, float* out,
                                 int threads) {
    linear(Shape{rows, inputs, outputs}, x, packed, out, threads);
}
