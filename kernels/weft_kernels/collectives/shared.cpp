#include "shared.h"

#include <algorithm>
#include <ctime>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

using namespace weft;

namespace {

// Polls before a thread sleeps: about 20 microseconds. Two ranks may share a core.
constexpr int POLLS = 400;
constexpr long SLEEP_NANOSECONDS = 100'000'000;

double now() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
}

bool has_come(const Flag& flag, uint32_t number) {
    return int32_t(flag.number.load(std::memory_order_acquire) - number) >= 0;
}

void sleep_until_changed(Flag& flag, uint32_t number) {
    timespec timeout{0, SLEEP_NANOSECONDS};
    flag.sleepers.fetch_add(1, std::memory_order_seq_cst);
    uint32_t seen = flag.number.load(std::memory_order_seq_cst);
    if (int32_t(seen - number) < 0)
        syscall(SYS_futex, (uint32_t*)&flag.number, FUTEX_WAIT, seen, &timeout, nullptr, 0);
    flag.sleepers.fetch_sub(1, std::memory_order_seq_cst);
}

bool await_one(const SharedGroup& g, long rank, long thread, uint32_t number) {
    Flag& flag = flag_of(g, rank, thread);
    for (int i = 0; i < POLLS; i++) {
        if (has_come(flag, number)) return true;
        _mm_pause();
    }
    for (double start = now(); !has_come(flag, number);) {
        if (lost(g).load(std::memory_order_relaxed)) return false;
        if (now() - start > g.deadline_seconds) {
            lost(g).store(uint32_t(rank + 1), std::memory_order_relaxed);
            return false;
        }
        sleep_until_changed(flag, number);
    }
    return true;
}

// out = the sum of all ranks' x, of `items` numbers at offset `first` of the slots.
template <typename Item>
void add_parts(const SharedGroup& g, uint32_t number, long first, long items, Item* out) {
    long i = 0;
    for (; i + W <= items; i += W) {
        Floats total = load_wide((const Item*)slot_of(g, number, 0) + first + i);
        for (long r = 1; r < g.size; r++) total += load_wide((const Item*)slot_of(g, number, r) + first + i);
        store_narrow(out + i, total);
    }
    for (; i < items; i++) {
        float total = widen(((const Item*)slot_of(g, number, 0))[first + i]);
        for (long r = 1; r < g.size; r++) total += widen(((const Item*)slot_of(g, number, r))[first + i]);
        Item narrow[W];
        store_narrow(narrow, splat(total));
        out[i] = narrow[0];
    }
}

}  // namespace

namespace weft {

void deposit(const SharedGroup& g, long thread, uint32_t number) {
    Flag& flag = flag_of(g, g.rank, thread);
    flag.number.store(number, std::memory_order_seq_cst);
    if (flag.sleepers.load(std::memory_order_seq_cst))
        syscall(SYS_futex, (uint32_t*)&flag.number, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
}

bool await_all(const SharedGroup& g, long thread, uint32_t number) {
    bool is_whole = true;
    for (long r = 0; r < g.size; r++) is_whole = is_whole && (r == g.rank || await_one(g, r, thread, number));
    return is_whole;
}

template <typename Item>
bool sum_over_ranks(const SharedGroup& g, Item* x, long items, long thread, long threads) {
    long room = g.slot_bytes / long(sizeof(Item));
    for (long start = 0; start < items; start += room) {
        long count = std::min(room, items - start);
        // Whole lines, so that no two threads write to one.
        long line = 64 / long(sizeof(Item)), lines = (count + line - 1) / line;
        long first = std::min(count, lines * thread / threads * line);
        long end = std::min(count, lines * (thread + 1) / threads * line);
        uint32_t number = flag_of(g, g.rank, thread).number.load(std::memory_order_relaxed) + 1;
        std::copy_n(x + start + first, end - first, (Item*)slot_of(g, number, g.rank) + first);
        deposit(g, thread, number);
        if (!await_all(g, thread, number)) return false;
        add_parts(g, number, first, end - first, x + start + first);
    }
    return true;
}

template bool sum_over_ranks(const SharedGroup&, float*, long, long, long);
template bool sum_over_ranks(const SharedGroup&, uint16_t*, long, long, long);

}  // namespace weft

// Sums x [items] in place; returns 0 if a rank is lost.
WEFT_EXPORT long weft_shared_sum_f32(const SharedGroup* g, float* x, long items) {
    return sum_over_ranks(*g, x, items, 0, 1);
}

WEFT_EXPORT long weft_shared_sum_bf16(const SharedGroup* g, uint16_t* x, long items) {
    return sum_over_ranks(*g, x, items, 0, 1);
}

// Puts the columns of all ranks side by side in `out`, on rank 0; the others only deposit theirs. widths [size]: bytes of
// each rank's rows. Also meets with no rows. Returns 0 if a rank is lost.
WEFT_EXPORT long weft_shared_gather(const SharedGroup* g, const char* x, long rows, const long* widths, char* out) {
    long widest = *std::max_element(widths, widths + g->size), whole = 0, step = std::max(1L, g->slot_bytes / widest);
    for (long r = 0; r < g->size; r++) whole += widths[r];
    long start = 0;
    do {
        long count = std::min(step, rows - start), own = widths[g->rank], place = 0;
        uint32_t number = flag_of(*g, g->rank, 0).number.load(std::memory_order_relaxed) + 1;
        std::memcpy(slot_of(*g, number, g->rank), x + start * own, size_t(count * own));
        deposit(*g, 0, number);
        if (!await_all(*g, 0, number)) return 0;
        for (long r = 0; r < g->size && g->rank == 0; place += widths[r++])
            for (long i = 0; i < count; i++)
                std::memcpy(out + (start + i) * whole + place, slot_of(*g, number, r) + i * widths[r], size_t(widths[r]));
        start += step;
    } while (start < rows);
    return 1;
}
