// Packs the weights of a linear layer into panels, once, when a model is loaded.

#include "panels.h"

#include <sys/mman.h>

#include <algorithm>

using namespace weft;

namespace {

constexpr size_t HUGE_PAGE = 2 << 20;

// Call before the first write; without huge pages nothing changes.
void ask_for_huge_pages(void* memory, size_t size) {
    size_t start = (size_t(memory) + HUGE_PAGE - 1) & ~(HUGE_PAGE - 1);
    size_t end = (size_t(memory) + size) & ~(HUGE_PAGE - 1);
    if (start < end) madvise(reinterpret_cast<void*>(start), end - start, MADV_HUGEPAGE);
}

template <typename Weight>
void pack(const Weight* weight, long num_outputs, long num_inputs, Weight* packed, int num_threads) {
    constexpr long AT_ONCE = 64;
    long num_panels = (num_outputs + PANEL - 1) / PANEL, panel_size = num_lines<Weight>(num_inputs) * PANEL;
    ask_for_huge_pages(packed, num_panels * panel_size * sizeof(Weight));
#pragma omp parallel for schedule(dynamic) num_threads(num_threads) if (num_threads > 1)
    for (long p = 0; p < num_panels; p++) {
        Weight* panel = packed + p * panel_size;
        std::fill(panel + num_inputs * PANEL, panel + panel_size, Weight(0));
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

#ifdef WEFT_PAIRS
// For products of pairs: for every STEP inputs (2, or 32 with AMX) one tile of the panel's first 16 outputs and one of the
// others. Rows of a tile are pairs of inputs. Padding is zero.
#ifdef __AMX_BF16__
constexpr long STEP = 32;
#else
constexpr long STEP = 2;
#endif

void pack_halves(const uint16_t* weight, long num_outputs, long num_inputs, uint16_t* packed, int num_threads) {
    long num_panels = (num_outputs + PANEL - 1) / PANEL, lines = (num_inputs + STEP - 1) / STEP * STEP;
    ask_for_huge_pages(packed, num_panels * lines * PANEL * sizeof *packed);
#pragma omp parallel for schedule(dynamic) num_threads(num_threads) if (num_threads > 1)
    for (long p = 0; p < num_panels; p++)
        for (long k = 0; k < lines; k += 2)
            for (long o = 0; o < PANEL; o++) {
                long row = p * PANEL + o, tile = k / STEP * 2 + o / 16, left = row < num_outputs ? num_inputs - k : 0;
                uint16_t pair[2] = {};
                if (left > 0) std::memcpy(pair, weight + row * num_inputs + k, left > 1 ? sizeof pair : sizeof *pair);
                std::memcpy(packed + p * lines * PANEL + tile * STEP * 16 + k % STEP * 16 + o % 16 * 2, pair, sizeof pair);
            }
}
#else
constexpr long STEP = 2;

void pack_halves(const uint16_t* weight, long num_outputs, long num_inputs, uint16_t* packed, int num_threads) {
    pack(weight, num_outputs, num_inputs, packed, num_threads);
}
#endif

}  // namespace

// Lines of a panel of bfloat16 weights for bfloat16 activations.
WEFT_EXPORT long weft_pair_lines(long inputs) { return (inputs + STEP - 1) / STEP * STEP; }

WEFT_EXPORT void weft_pack_bf16_bf16(const uint16_t* weight, long outputs, long inputs, uint16_t* packed, int threads) {
    pack_halves(weight, outputs, inputs, packed, threads);
}

WEFT_EXPORT long weft_panel() { return PANEL; }

WEFT_EXPORT void weft_pack_f32_bf16(const uint16_t* weight, long outputs, long inputs, uint16_t* packed, int threads) {
    pack(weight, outputs, inputs, packed, threads);
}

WEFT_EXPORT void weft_pack_f32_f32(const float* weight, long outputs, long inputs, float* packed, int threads) {
    pack(weight, outputs, inputs, packed, threads);
}
