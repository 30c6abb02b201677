// Products of queries that lie across two vectors with keys or values that lie in rows.
//
// Numbers are floats, or, where the CPU multiplies pairs of bfloat16 (see linear/tiles.h) and the cache holds those,
// pairs: of neighbouring dimensions for scores, of neighbouring keys for what is made of weights and values.
#pragma once

#include "../native/vector.h"

namespace weft {

constexpr int LANES = 2 * W;
constexpr int MAX_ITEMS = REGISTERS == 32 ? 12 : 6;

// Keys or values that lie one behind the other.
template <typename Number>
struct Run {
    const Number* data;
    long count;
};

// out[i, lane] = share[lane] * out[i, lane] + sum over k of x[i, k] * lines[k, lane]; without a share, nothing is in
// `out` yet. The k go on from run to run. Items that are together lie side by side, and each k `stride` numbers behind
// the last one; of others it is the other way round.
template <typename Number, int Items, bool AreTogether>
void product(const Run<Number>* runs, long num_runs, long first, long stride, const Number* lines, float* out,
             const float* share) {
    Floats low[Items], high[Items];
#pragma GCC unroll 12
    for (int i = 0; i < Items; i++) {
        low[i] = share ? load<Floats>(out + i * LANES) * load<Floats>(share) : Floats{};
        high[i] = share ? load<Floats>(out + i * LANES + W) * load<Floats>(share + W) : Floats{};
    }
    for (long r = 0; r < num_runs; r++) {
        const Number* x = runs[r].data + first * (AreTogether ? 1 : stride);
        for (long k = 0; k < runs[r].count; k++, lines += LANES) {
            Floats a = load<Floats>(lines), b = load<Floats>(lines + W);
#pragma GCC unroll 12
            for (int i = 0; i < Items; i++) {
                auto value = everywhere(AreTogether ? x[k * stride + i] : x[i * stride + k]);
                low[i] = plus_product(low[i], value, a);
                high[i] = plus_product(high[i], value, b);
            }
        }
    }
#pragma GCC unroll 12
    for (int i = 0; i < Items; i++) {
        store(out + i * LANES, low[i]);
        store(out + i * LANES + W, high[i]);
    }
}

template <typename Number>
using Product = void (*)(const Run<Number>*, long, long, long, const Number*, float*, const float*);

template <bool AreTogether, typename Number>
void products(const Run<Number>* runs, long num_runs, long items, long stride, const Number* lines, float* out,
              const float* share) {
    static constexpr Product<Number> all[] = {
        product<Number, 1, AreTogether>,  product<Number, 2, AreTogether>,  product<Number, 3, AreTogether>,
        product<Number, 4, AreTogether>,  product<Number, 5, AreTogether>,  product<Number, 6, AreTogether>,
#if WEFT_WIDTH == 16
        product<Number, 7, AreTogether>,  product<Number, 8, AreTogether>,  product<Number, 9, AreTogether>,
        product<Number, 10, AreTogether>, product<Number, 11, AreTogether>, product<Number, 12, AreTogether>,
#endif
    };
    long groups = (items + MAX_ITEMS - 1) / MAX_ITEMS;
    for (long g = 0; g < groups; g++) {
        long first = g * items / groups, size = (g + 1) * items / groups - first;
        all[size - 1](runs, num_runs, first, stride, lines, out + first * LANES, share);
    }
}

}  // namespace weft
