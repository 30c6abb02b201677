// Chunks as the coder writes them, and the same with damage, through the entropy coder: built with sanitizers by
// test_rans_sanitized.py. All memory that the coder is given ends at a page that nobody may touch, since sanitizers do not
// see what masked instructions read and write. Knows how a chunk is described, and nothing of how it is decoded.

#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

// As in stream.h.
struct Chunk {
    const void* tables;
    const int8_t *rows, *columns;
    int64_t num_columns, base, class_bits, is_bf16, first, count;
    const uint8_t* body;
    int64_t body_bytes, num_words, num_escapes;
    uint16_t* out;
    int64_t is_whole;
};

extern "C" {
void weft_rans_decode(void* chunks, long num_chunks, int is_plain);
void weft_rans_tables(const uint16_t* shares, int class_bits, void* tables);
void weft_rans_slots(const uint16_t* shares, int class_bits, void* slots, uint16_t* grains);
double weft_rans_choose(const uint16_t* values, long rows, long columns, int is_bf16, int8_t* row_scales, int8_t* column_scales,
                        uint16_t* shares, int64_t* base_and_class_bits);
long weft_rans_encode(const uint16_t* values, const void* slots, const uint16_t* grains, const int8_t* rows, const int8_t* columns,
                      const long* shape, int is_bf16, int is_plain, uint32_t* states, uint16_t* words_end, uint8_t* rest,
                      uint32_t* escapes);
}

namespace {

constexpr long LANES = 64, SYMBOLS = 256, UNITS = 256, PAGE = 4096;
constexpr long STATE_BYTES = 4 * LANES, TABLE_BYTES = 6 * SYMBOLS, SLOT_BYTES = 4 * SYMBOLS, NUM_GRAINS = SYMBOLS * UNITS / 4 + 1;

std::mt19937_64 source;

long below(long end) { return long(source() % uint64_t(end)); }

template <typename Item>
class Fenced {
  public:
    explicit Fenced(long count) : size_((count * sizeof(Item) + PAGE - 1) / PAGE * PAGE + PAGE) {
        start_ = (char*)mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        char* fence = start_ + size_ - PAGE;
        if (start_ == MAP_FAILED || mprotect(fence, PAGE, PROT_NONE)) abort();
        data = (Item*)fence - count;
    }
    explicit Fenced(const std::vector<Item>& items) : Fenced(long(items.size())) { std::copy(items.begin(), items.end(), data); }
    ~Fenced() { munmap(start_, size_); }
    Fenced(const Fenced&) = delete;

    Item* data;

  private:
    size_t size_;
    char* start_;
};

struct Coded {
    bool is_bf16;
    long columns, first, count, num_words = 0, num_escapes = 0, base = 0, class_bits = 0;
    std::vector<int8_t> row_scales, column_scales;
    std::vector<uint16_t> shares, values;
    std::vector<uint8_t> body;

    long rest_bytes() const { return (count + LANES - 1) / LANES * (is_bf16 ? 48 : 72); }
};

// A tensor with loud rows and columns, some of it noise, zeros, or one number over and over.
std::vector<uint16_t> some_tensor(bool is_bf16, long rows, long columns) {
    std::normal_distribution<float> normal;
    std::vector<uint16_t> values(size_t(rows * columns));
    std::vector<float> loudness(size_t(rows + columns));
    float spread = float(below(3)) / 2;
    for (float& each : loudness) each = std::exp(spread * normal(source));
    long kind = below(6);
    for (long i = 0; i < rows * columns; i++) {
        float value = normal(source) * loudness[size_t(i / columns)] * loudness[size_t(rows + i % columns)] / 64;
        uint32_t bits;
        std::memcpy(&bits, &value, sizeof bits);
        uint16_t half = uint16_t(bits >> 16 & 0x8000) | uint16_t(is_bf16 ? bits >> 16 & 0x7FFF : (bits >> 13) % 0x7C00);
        bool is_noise = kind == 0 || (kind == 1 && i / LANES % 5 == 0) || below(500) == 0;
        values[size_t(i)] = is_noise ? uint16_t(source()) : kind == 2 ? uint16_t(0) : kind == 3 ? uint16_t(0x3F80) : half;
    }
    return values;
}

void append(std::vector<uint8_t>& body, const void* from, long size) {
    body.insert(body.end(), (const uint8_t*)from, (const uint8_t*)from + size);
}

// What the coder makes of a run of a tensor.
Coded coded(bool is_plain) {
    const bool is_bf16 = below(3);
    const long rows = 1 + below(60), columns = 1 + below(below(2) ? 400 : 40), all = rows * columns, first = below(all);
    Coded c{is_bf16, columns, first, 1 + below(all - first)};
    const std::vector<uint16_t> tensor = some_tensor(is_bf16, rows, columns);
    c.values.assign(tensor.begin() + first, tensor.begin() + first + c.count);
    Fenced<uint16_t> whole(tensor), values(c.values), shares(SYMBOLS), grains(NUM_GRAINS), words(LANES + c.count);
    Fenced<int8_t> row_scales(rows), column_scales(columns);
    Fenced<uint8_t> slots(SLOT_BYTES), rest(c.rest_bytes());
    Fenced<uint32_t> states(LANES), escapes(1 + c.count);
    int64_t found[2];
    weft_rans_choose(whole.data, rows, columns, is_bf16, row_scales.data, column_scales.data, shares.data, found);
    c.base = found[0], c.class_bits = found[1];
    c.row_scales.assign(row_scales.data, row_scales.data + rows);
    c.column_scales.assign(column_scales.data, column_scales.data + columns);
    c.shares.assign(shares.data, shares.data + SYMBOLS);
    weft_rans_slots(shares.data, int(c.class_bits), slots.data, grains.data);
    const long shape[] = {first, c.count, columns, c.base, c.class_bits};
    uint16_t* end = words.data + LANES + c.count;
    c.num_words = weft_rans_encode(values.data, slots.data, grains.data, row_scales.data, column_scales.data, shape, is_bf16,
                                   is_plain, states.data, end, rest.data, escapes.data);
    std::vector<uint32_t> places(escapes.data + 1, escapes.data + 1 + escapes.data[0]);
    c.num_escapes = long(places.size());
    append(c.body, states.data, STATE_BYTES);
    append(c.body, places.data(), 4 * c.num_escapes);
    append(c.body, end - c.num_words, 2 * c.num_words);
    for (uint32_t place : places) append(c.body, &c.values[place], 2);
    append(c.body, rest.data, c.rest_bytes());
    c.body.resize((c.body.size() + 7) / 8 * 8);
    return c;
}

// Shares that add up to what they have to, and else are as odd as can be.
void draw_shares(Coded& c) {
    const long symbols = SYMBOLS >> c.class_bits, total = UNITS * symbols;
    for (auto first = c.shares.begin(); first != c.shares.end(); first += symbols) {
        std::fill(first, first + symbols, uint16_t(0));
        *first = 1;  // no symbol has all
        long most = below(2) ? total : 300;
        for (long left = total - 1, some; left; left -= some) {
            some = 1 + below(std::min(left, most));
            first[1 + below(symbols - 1)] += uint16_t(some);
        }
    }
}

// What a file may say that was damaged, or made to do harm, and that its reader hands on.
void damage(Coded& c) {
    uint8_t* body = c.body.data();
    const long size = long(c.body.size());
    switch (below(10)) {
        case 0: return c.body.resize(size_t(below(size / 8 + 1) * 8));
        case 1: c.num_words = below(2) ? below(c.count + 9) : below(1l << 32); return;
        case 2: c.num_escapes = below(2) ? below(c.count + 9) : below(1l << 32); return;
        case 3: c.class_bits = below(5); return draw_shares(c);
        case 4: c.base = below(8193) - 4096; return;
        case 5:
            for (int8_t& scale : c.row_scales) scale = int8_t(source());
            for (int8_t& scale : c.column_scales) scale = int8_t(source());
            return;
        case 6: return std::generate(body, body + std::min(size, STATE_BYTES), [] { return uint8_t(source()); });
        case 7: return std::generate(body, body + size, [] { return uint8_t(source()); });
        case 8:
            if (c.num_escapes > 0 && size > STATE_BYTES + 4) {
                const uint32_t place = uint32_t(c.count - 1 + below(3));
                std::memcpy(body + STATE_BYTES, &place, sizeof place);
            }
            return;
        default:
            if (size) body[below(size)] ^= uint8_t(1 << below(8));
    }
}

void expect(bool is_so, const char* what, uint64_t round) {
    if (is_so) return;
    std::printf("round %lu: %s\n", (unsigned long)round, what);
    std::exit(1);
}

struct Place {
    Fenced<uint8_t> tables{TABLE_BYTES}, body;
    Fenced<int8_t> rows, columns;
    Fenced<uint16_t> out;

    explicit Place(const Coded& c) : body(c.body), rows(c.row_scales), columns(c.column_scales), out(c.count) {
        weft_rans_tables(c.shares.data(), int(c.class_bits), tables.data);
    }
};

// All at once; whether each was whole.
std::vector<bool> decode(const std::vector<Coded>& all, bool is_plain, bool is_right, uint64_t round) {
    std::vector<std::unique_ptr<Place>> places;
    Fenced<Chunk> chunks(long(all.size()));
    Chunk* chunk = chunks.data;
    for (const Coded& c : all) {
        places.push_back(std::make_unique<Place>(c));
        const Place& p = *places.back();
        *chunk++ = {p.tables.data, p.rows.data, p.columns.data, c.columns, c.base, c.class_bits, c.is_bf16, c.first, c.count,
                    p.body.data, int64_t(c.body.size()), c.num_words, c.num_escapes, p.out.data, 0};
    }
    weft_rans_decode(chunks.data, long(all.size()), is_plain);
    std::vector<bool> are_whole;
    for (size_t i = 0; i < all.size(); i++) {
        const bool is_same = std::equal(all[i].values.begin(), all[i].values.end(), places[i]->out.data);
        are_whole.push_back(chunks.data[i].is_whole);
        expect(!is_right || (are_whole[i] && is_same), "a chunk that is right does not come back", round);
    }
    return are_whole;
}

}  // namespace

int main(int, char** arguments) {
    const uint64_t rounds = std::strtoull(arguments[1], nullptr, 10);
    for (uint64_t round = 0; round < rounds; round++) {
        source.seed(round);
        std::vector<Coded> all;
        for (long left = 1 + below(6); left; left--) all.push_back(coded(below(2)));
        for (bool is_plain : {false, true}) decode(all, is_plain, true, round);
        for (int again = 0; again < 8; again++) {
            std::vector<Coded> damaged = all;
            for (Coded& each : damaged)
                for (long times = below(4); times; times--) damage(each);
            bool is_agreed = decode(damaged, false, false, round) == decode(damaged, true, false, round);
            expect(is_agreed, "the two ways to decode do not agree on what is whole", round);
        }
    }
    std::printf("%lu rounds\n", (unsigned long)rounds);
}
