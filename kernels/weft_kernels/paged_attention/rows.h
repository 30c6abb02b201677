// Attention of single rows for use inside other kernels.
#pragma once

#include "../native/pool.h"
#include "../native/vector.h"

#include <vector>

namespace weft {

// Highest score of one head and piece, and the sum of all exponentials relative to it.
struct Scale {
    float highest, total;
};

// Row `row` of a batch, its key head, and which of its pieces; `part` is the first of the piece's places among results
// to be merged.
struct Work {
    long row, head, piece, part;
};

// The rows of a batch in pieces: one piece for every row and key head that sees few keys; several otherwise, neighbours,
// in order. blocks, spans: see `weft_kernels.paged_attention.cpu`.
struct Works {
    const int *blocks, *spans;
    long num_heads, ratio;
    std::vector<Work> all;
    std::vector<Work> split;  // the first piece of each that has several
    long num_parts = 0, longest = 0, total = 0;
    std::vector<float> parts;  // results to be merged
    std::vector<Scale> scales;

    Works(const int* blocks, const int* spans, long num_rows, long num_heads, const Pool& pool);
};

// All threads of a team call it, without a barrier at the end. `sinks`: one logit for each head, or null.
template <typename Item>
void attend_rows(Works& works, const Pool& pool, const Item* q, Item* out, float scale, const float* sinks = nullptr);

}  // namespace weft
