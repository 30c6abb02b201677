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

// Keys of a row that one piece of work covers, at most.
constexpr long PIECE = 1024;

// `count` rows of one sequence from `row` of the batch on, their key head, and which of their pieces.
struct Work {
    long row, count, head, piece;
};

// The rows of a batch in pieces: one piece for every row and key head that sees few keys; several otherwise, neighbours,
// in order. blocks, spans: see `weft_kernels.paged_attention.cpu`.
struct Works {
    const int *blocks, *spans;
    long num_heads, ratio;
    std::vector<Work> all;
    std::vector<Work> split;        // rows and heads that have several pieces
    std::vector<long> first_parts;  // of each row, among results to be merged
    long num_parts = 0, longest = 0, total = 0, largest = 1;
    std::vector<float> parts;  // results to be merged
    std::vector<Scale> scales;

    Works(const int* blocks, const int* spans, long num_rows, long num_heads, const Pool& pool, int num_threads);
    long num_keys(long row) const { return spans[4 * row + 3] - spans[4 * row + 2]; }
    long num_pieces(long row) const { return (num_keys(row) + PIECE - 1) / PIECE; }
    long part(long row, long head, long piece) const {
        return first_parts[row] + (head * num_pieces(row) + piece) * ratio;
    }
};

// All threads of a team call it, without a barrier at the end. `sinks`: one logit for each head, or null.
template <typename Item>
void attend_rows(Works& works, const Pool& pool, const Item* q, Item* out, float scale, const float* sinks = nullptr);

}  // namespace weft
