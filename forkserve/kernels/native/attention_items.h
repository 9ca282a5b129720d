// The items of a unit: scores of their keys and values weighted by them, page by page.
#pragma once

#include <cstring>

#include "attention_amx.h"
#include "attention_softmax.h"
#include "attention_tiles.h"

namespace fs {
namespace {

// Blocks of 16 keys that stay in L1 for all rows of a unit.  The next ones are fetched meanwhile:
// the processor's own read-ahead stops where a page ends.
constexpr int CHUNK = 4;
constexpr int BLOCKS = SPLIT / LANES + 2;

// Whether K and V are widened to float32 once for all groups of n vectors.  Writing and reading the
// widened ones costs as much as a second group's own widening does.
template <bool P, class T>
constexpr bool widens(int n) {
    return sizeof(T) < sizeof(float) && n > std::max(rows_of(P), ROWS);
}

// K and V of one kv head.
template <class T>
struct Head {
    const T *k, *v;
    const int32_t* pages;
    int64_t page, dim;
};

// What a thread needs for a unit; a vector is one query head of one row.
struct Scratch {
    float *q, *o, *total, *m, *l, *total_m, *total_l, *scores;
    int64_t plane = 0;                // from the totals of o to the even and to the odd sums
    uint16_t *coarse, *weights;       // q and scores in bfloat16, for tiles
    uint16_t *keys, *values;          // in pairs
    float* wide;                      // K or V of a chunk, widened

    // Of `floats` that begin at `base`, if not null: sizes alone.
    Scratch(float* base, int64_t vectors, int64_t dim) {
        constexpr int64_t LINE = 16;  // floats; tiles read whole lines, and whole groups of rows
        char* next = (char*)((uintptr_t(base) + 63) / 64 * 64);
        auto take = [&](auto*& part, int64_t count) {
            part = reinterpret_cast<std::remove_reference_t<decltype(part)>>(next);
            next += (count * int64_t(sizeof(*part)) + 63) / 64 * 64;
        };
        const int64_t rows = (vectors + LINE - 1) / LINE * LINE;
        plane = rows * WIDE;
        take(q, rows * WIDE);
        take(o, 3 * plane);
        take(total, rows * WIDE);
        for (float** each : {&m, &l, &total_m, &total_l}) take(*each, rows + LINE);
        take(scores, rows * SCORES);
        take(wide, CHUNK * LANES * dim);
#if defined(__AMX_BF16__)
        take(coarse, (rows + LINE) * padded(dim));
        take(weights, (rows + LINE) * WEIGHTS);
        take(keys, 4 * padded(dim) * LANES);
        take(values, 4 * TILE_PAIRS);
#else
        coarse = weights = keys = values = nullptr;
#endif
        floats = (next - (char*)base + 63) / 4;
    }
    int64_t floats;
};

// Scores of vectors [vec, vec + n) of an item.  scratch: of vector 0 and position `origin`.
template <bool P, class T>
void item_scores(const Head<T>& head, const Item& item, int vec, int n, int origin,
                 const Scratch& scratch) {
    const T* block[BLOCKS];
    const int64_t dim = head.dim, each = head.page / LANES;
    const int first = (item.begin + item.shift) / LANES;
    const int count = (item.end + item.shift - 1) / LANES + 1 - first;
    const int32_t* pages = head.pages + item.page;
    for (int b = 0; b < count; b++) {
        int64_t at = first + b;
        block[b] = head.k + pages[at / each] * head.page * dim + at % each * LANES;
    }
    const float* q = scratch.q + vec * WIDE;
    float* scores = scratch.scores + vec * SCORES;
    const Soon none{reinterpret_cast<const char*>(q), 0};
    int done = 0;
    const int front = (item.begin + item.shift) % LANES;  // keys that are not the item's
    if (front) {
        alignas(64) float some[ROWS * SCORES];
        int keep = std::min(LANES - front, item.end - item.begin);
        grouped<rows_of(P)>(n, [&](int r, auto rb) {
            qk_rows<P, rb(), 1>(q + r * WIDE, block, 1, head.page, dim, some, none);
            for (int i = 0; i < rb(); i++)
                std::memcpy(scores + (r + i) * SCORES + item.begin - origin,
                            some + i * SCORES + front, sizeof(float) * keep);
        });
        done = 1;
    }
    // Keys behind the item's end are written too: the next item, or the mask, overwrites them.
#if defined(__AMX_BF16__)
    if constexpr (P)
        if (n >= TILED_VECTORS)
            return tile_scores(scratch.coarse + vec * padded(dim), n, block + done, count - done,
                               head.page, dim, scratch.keys,
                               scores + (first + done) * LANES - item.shift - origin);
#endif
    for (; done < count; done += CHUNK) {
        const int blocks = std::min(CHUNK, count - done);
        const int soon = std::min(CHUNK, count - done - blocks);
        float* to = scores + (first + done) * LANES - item.shift - origin;
        auto rows = [&](int r, auto rb, const auto* const* keys, int64_t step) {
            // Of the next blocks each group fetches its share, the last one while it multiplies.
            Soon last = none;
            for (int b = soon * r / n; b < soon * (r + rb()) / n; b++) {
                const bool now = !fetches(P) || b + 1 < soon * (r + rb()) / n;
                last = {reinterpret_cast<const char*>(block[done + CHUNK + b]),
                        head.page * int64_t(sizeof(T))};
                for (int64_t d = 0; now && d < dim; d++) last.fetch();
                if (now) last = none;
            }
            qk_rows<P, rb(), widest(P, rb())>(q + r * WIDE, keys, blocks, step, dim,
                                              to + r * SCORES, last);
        };
        if (widens<P, T>(n)) {
            const float* wide[CHUNK];
            for (int b = 0; b < blocks; b++) {
                float* at = scratch.wide + b * dim * LANES;
                wide[b] = at;
                for (int64_t d = 0; d < dim; d++)
                    store(at + d * LANES, load_kv(block[done + b] + d * head.page));
            }
            grouped<rows_of(P)>(n, [&](int r, auto rb) { rows(r, rb, wide, LANES); });
        } else {
            grouped<rows_of(P)>(n, [&](int r, auto rb) { rows(r, rb, block + done, head.page); });
        }
    }
}

// o += p V for vectors [vec, vec + n) of an item, on vectors.
template <bool P, class T>
void vector_values(const Head<T>& head, const Item& item, int vec, int n, int origin,
                   const Scratch& scratch) {
    const int64_t dim = head.dim, page = head.page;
    const int32_t* pages = head.pages + item.page;
    const float* p = scratch.scores + vec * SCORES - origin;
    float* o = scratch.o + vec * WIDE;
    Stretch<T> here[CHUNK + 1], next[CHUNK + 1];
    auto chunk = [&](int at, Stretch<T>* to) {
        int count = 0;
        for (const int end = std::min(at + CHUNK * LANES, item.end); at < end;) {
            int64_t slot = at + item.shift, within = slot % page;
            int rows = int(std::min<int64_t>(page - within, end - at));
            to[count++] = {head.v + (pages[slot / page] * page + within) * dim, rows};
            at += rows;
        }
        return count;
    };
    for (int begin = item.begin, count = chunk(begin, next); count;) {
        std::copy_n(next, count, here);
        const int soon = chunk(begin + CHUNK * LANES, next);
        const int multiplied = std::min(CHUNK * LANES, item.end - begin);
        const int ahead = std::clamp(item.end - begin - CHUNK * LANES, 0, CHUNK * LANES);
        auto rows = [&](int r, auto rb, const auto* stretch, int stretches) {
            Soon last{reinterpret_cast<const char*>(o), 0};
            // Of the next rows each group fetches its share, the last ones while it multiplies.
            int at = 0, from = ahead * r / n, to = ahead * (r + rb()) / n;
            for (int i = 0; i < soon; at += next[i++].rows) {
                const int first = std::max(from - at, 0), end = std::min(to - at, next[i].rows);
                if (first >= end) continue;
                const int64_t bytes = dim * int64_t(sizeof(T));
                last = {reinterpret_cast<const char*>(next[i].v + first * dim), 64};
                int64_t lines = ((end - first) * bytes + 63) / 64;
                const bool now = !fetches(P) || to - at > next[i].rows;
                for (; lines > (now ? 0 : multiplied); lines--) last.fetch();
                last.step = lines * 64 / multiplied;
            }
            pv_rows<P, rb(), widest(P, rb())>(p + r * SCORES + begin, stretch, stretches, begin, 0,
                                              dim, o + r * WIDE, scratch.plane, last);
        };
        if (widens<P, T>(n)) {
            Stretch<float> wide{scratch.wide, 0};
            for (int i = 0; i < count; i++) {
                float* at = scratch.wide + wide.rows * dim;
                for (int64_t d = 0; d < here[i].rows * dim; d += LANES)
                    store(at + d, load_kv(here[i].v + d));
                wide.rows += here[i].rows;
            }
            grouped<rows_of(P)>(n, [&](int r, auto rb) { rows(r, rb, &wide, 1); });
        } else {
            grouped<rows_of(P)>(n, [&](int r, auto rb) { rows(r, rb, here, count); });
        }
        begin += CHUNK * LANES;
        count = soon;
    }
}

// The same on tiles where an item has whole blocks of positions, or what its part has of them: a
// weight is 0 where the part has no position.
template <bool P, class T>
void item_values(const Head<T>& head, const Item& item, const Part& part, int vec, int n,
                 int origin, const Scratch& scratch) {
#if defined(__AMX_BF16__)
    if constexpr (P) {
        const int up = PAIRED - 1;
        const int begin = (item.begin + (item.begin == part.begin ? 0 : up)) / PAIRED * PAIRED;
        const int end = (item.end + (item.end == part.end ? up : 0)) / PAIRED * PAIRED;
        if (n >= TILED_VECTORS && begin < end) {
            Item rest = item;
            rest.end = begin;
            vector_values<P>(head, rest, vec, n, origin, scratch);
            float* o = scratch.o + vec * WIDE;
            settle(o, n, head.dim, scratch.plane);
            const int32_t* pages = head.pages + item.page;
            alignas(64) static constexpr uint16_t none[256] = {};
            const uint16_t* row[SPLIT + SOON];
            std::fill(row, row + end - begin + SOON, none);
            for (int at = std::max(begin, item.begin), last = std::min(end, item.end); at < last;) {
                const int64_t slot = at + item.shift, within = slot % head.page;
                const uint16_t* v =
                    head.v + (pages[slot / head.page] * head.page + within) * head.dim;
                const int rows = int(std::min<int64_t>(head.page - within, last - at));
                for (int i = 0; i < rows; i++) row[at + i - begin] = v + i * head.dim;
                at += rows;
            }
            tile_values(scratch.weights + vec * WEIGHTS + begin - origin, n, (end - begin) / PAIRED,
                        head.dim, row, scratch.values, o);
            rest.begin = end;
            rest.end = item.end;
            return vector_values<P>(head, rest, vec, n, origin, scratch);
        }
    }
#else
    (void)part;
#endif
    vector_values<P>(head, item, vec, n, origin, scratch);
}

// Fetches the values of items to L2, a cache line a call: their addresses are no sequence that the
// processor would see.
template <class T>
class Ahead {
   public:
    Ahead(const Head<T>& head, const Item* items, int count)
        : head_(head), item_(items), last_(items + count), position_(items->begin) {
        turn();
    }

    FS_INLINE void fetch() {
        if (at_ >= stop_) return;
        __builtin_prefetch(at_, 0, 2);
        at_ += 64;
        if (at_ >= stop_) turn();
    }

   private:
    // To the next page.
    void turn() {
        while (item_ < last_ && position_ == item_->end)
            if (++item_ < last_) position_ = item_->begin;
        if (item_ == last_) return;
        const int64_t slot = position_ + item_->shift, within = slot % head_.page;
        const int rows = int(std::min<int64_t>(head_.page - within, item_->end - position_));
        const int32_t page = head_.pages[item_->page + slot / head_.page];
        at_ = reinterpret_cast<const char*>(head_.v + (page * head_.page + within) * head_.dim);
        stop_ = at_ + rows * head_.dim * sizeof(T);
        position_ += rows;
    }

    const Head<T>& head_;
    const Item *item_, *const last_;
    int position_;
    const char *at_ = nullptr, *stop_ = nullptr;
};

}  // namespace
}  // namespace fs
