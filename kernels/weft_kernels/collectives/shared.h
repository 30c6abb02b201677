// Sums and gathers over the ranks of a group in memory that all of them map.
//
// A rank deposits its part, and raises a number that says so; then it waits for the others' numbers and reads their
// parts. There are two buffers: a rank that deposits part n + 2 knows that all have deposited n + 1, so they have read n.
#pragma once

#include "../native/vector.h"

#include <atomic>

namespace weft {

// Memory layout of `_Group` in shared.py. `memory` begins with the flags, one line for each thread of each rank, and
// `lost` in a line before them; the buffers follow at `data_offset`.
struct SharedGroup {
    char* memory;
    long rank, size, max_threads, slot_bytes, data_offset;
    double deadline_seconds;
};

constexpr long FLAG_BYTES = 64;

// Of one thread of one rank: how many parts it has deposited, and how many threads sleep until that changes.
struct Flag {
    std::atomic<uint32_t> number, sleepers;
};

inline std::atomic<uint32_t>& lost(const SharedGroup& g) { return *(std::atomic<uint32_t>*)g.memory; }

inline Flag& flag_of(const SharedGroup& g, long rank, long thread) {
    return *(Flag*)(g.memory + FLAG_BYTES * (1 + rank * g.max_threads + thread));
}

inline char* slot_of(const SharedGroup& g, uint32_t number, long rank) {
    return g.memory + g.data_offset + ((number & 1) * g.size + rank) * g.slot_bytes;
}

// Says that this thread's part `number` is complete.
void deposit(const SharedGroup& g, long thread, uint32_t number);

// Waits for that part of all ranks. Returns false, and marks the group as lost, if one does not come in time; a group
// that is lost stays so, and nothing waits for it any more.
bool await_all(const SharedGroup& g, long thread, uint32_t number);

// Adds x [items] of all ranks in their order, in float, and rounds once. Thread `thread` of `threads` adds its part of x
// in place, the same part as that thread of the other ranks. All of x is complete before, and must not be read before
// all threads are done.
template <typename Item>
bool sum_over_ranks(const SharedGroup& g, Item* x, long items, long thread, long threads);

}  // namespace weft
