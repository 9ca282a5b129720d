#include "attention.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <system_error>

#include "attention_amx.h"
#include "attention_softmax.h"
#include "attention_tiles.h"

namespace fs {
namespace {

// Blocks of 16 keys that stay in L1 for all rows of a unit.  The next ones are fetched meanwhile:
// the processor's own read-ahead stops where a page ends.
constexpr int CHUNK = 4;
constexpr int BLOCKS = SPLIT / LANES + 2;

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
        take(m, rows);
        take(l, rows);
        take(total_m, rows);
        take(total_l, rows);
        take(scores, rows * SCORES);
#if defined(__AMX_BF16__)
        take(coarse, (rows + LINE) * padded(dim));
        take(weights, (rows + LINE) * WEIGHTS);
        take(keys, 2 * padded(dim) * LANES);
        take(values, dim * PAIRED * VALUE_BLOCKS);
#else
        (void)dim;
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
    int done = 0;
    const int front = (item.begin + item.shift) % LANES;  // keys that are not the item's
    if (front) {
        alignas(64) float some[ROWS * SCORES];
        int keep = std::min(LANES - front, item.end - item.begin);
        grouped<rows_of(P)>(n, [&](int r, auto rb) {
            qk_rows<P, rb(), 1>(q + r * WIDE, block, 1, head.page, dim, some);
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
        grouped<rows_of(P)>(n, [&](int r, auto rb) {
            for (int b = done + CHUNK; b < done + CHUNK + soon; b++)
                for (int64_t d = dim * r / n; d < dim * (r + rb()) / n; d++)
                    __builtin_prefetch(block[b] + d * head.page);
            qk_rows<P, rb(), widest(P, rb())>(q + r * WIDE, block + done, blocks, head.page, dim,
                                              to + r * SCORES);
        });
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
        grouped<rows_of(P)>(n, [&](int r, auto rb) {
            for (int i = 0; i < soon; i++) {
                const int64_t line = 64 / sizeof(T), lines = next[i].rows * dim / line;
                for (int64_t j = lines * r / n; j < lines * (r + rb()) / n; j++)
                    __builtin_prefetch(next[i].v + j * line);
            }
            pv_rows<P, rb(), widest(P, rb())>(p + r * SCORES + begin, here, count, begin, 0, dim,
                                              o + r * WIDE, scratch.plane);
        });
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
            auto row = [&](int i) -> const uint16_t* {
                if (begin + i < item.begin || begin + i >= item.end) return nullptr;
                int64_t slot = begin + i + item.shift;
                return head.v + (pages[slot / head.page] * head.page + slot % head.page) * head.dim;
            };
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

struct Request {
    const float* q;
    int64_t q_stride;
    float* out;
    int64_t out_stride;
    float scale, softcap;
};

// Values, maxima and sums of a cut row in one split.
struct Partial {
    float *o, *m, *l;
    Partial(Plan& plan, int32_t row, int split) {
        const int64_t heads = int64_t(plan.shape.kv_heads) * plan.shape.group;
        int64_t index = plan.first_part[row] + split - plan.first_split(row);
        o = plan.partial.data() + index * heads * (plan.shape.dim + 2);
        m = o + heads * plan.shape.dim;
        l = m + heads;
    }
};

// One part of a unit: values, maxima and sums of its vectors to scratch.
template <bool P, class T>
void attend_part(const Plan& plan, const Unit& unit, const Part& part, const Head<T>& head,
                 float softcap, const Scratch& scratch) {
    const int group = plan.shape.group, origin = part.split * SPLIT;
    const Item* items = plan.items.data() + part.item;
    for (int i = 0; i < part.items; i++)
        item_scores<P>(head, items[i], items[i].row * group, items[i].rows * group, origin,
                       scratch);
    for (int i = 0; i < unit.rows; i++) {
        int32_t row = plan.order[unit.row + i];
        int low = std::max(plan.low(row) - origin, 0);
        int high = std::min(plan.position[row] + 1 - origin, SPLIT);
        for (int vec = i * group; vec < (i + 1) * group; vec++) {
            float* s = scratch.scores + vec * SCORES;
            uint16_t* coarse = nullptr;
#if defined(__AMX_BF16__)
            if (unit.rows * group >= TILED_VECTORS) coarse = scratch.weights + vec * WEIGHTS;
#endif
            if (low < high)  // else it sees nothing of this split, and what comes out is not used
                softmax<P>(s, part.begin - origin, part.end - origin, low, high, softcap,
                           scratch.m + vec, scratch.l + vec, coarse);
            for (int i = 0; i < (P ? 3 : 1); i++)
                std::fill_n(scratch.o + vec * WIDE + i * scratch.plane, head.dim, 0.0f);
        }
    }
    for (int i = 0; i < part.items; i++)
        item_values<P>(head, items[i], part, items[i].row * group, items[i].rows * group, origin,
                       scratch);
    if (P) settle(scratch.o, unit.rows * group, head.dim, scratch.plane);
}

// Scaled query vectors to scratch; paired, rounded.
template <bool P>
void take_query(const float* q, vf scale, int vec, int64_t dim, const Scratch& scratch) {
    for (int64_t d = 0; d < dim; d += LANES) {
        vf x = load(q + d) * scale;
        store(scratch.q + vec * WIDE + d, P ? rounded(x) : x);
    }
#if defined(__AMX_BF16__)
    if (!P) return;
    uint16_t* to = scratch.coarse + vec * padded(dim);
    for (int64_t d = 0; d < padded(dim); d += LANES)
        store_bf16(to + d, d < dim ? load(scratch.q + vec * WIDE + d) : zero());
#endif
}

template <bool P, class T>
void attend_unit(Plan& plan, const Unit& unit, int h, const KvLayer& kv, const Request& ask,
                 const Scratch& scratch) {
    const int64_t dim = plan.shape.dim;
    const int group = plan.shape.group;
    const Head<T> head{static_cast<T*>(kv.k) + h * kv.head, static_cast<T*>(kv.v) + h * kv.head,
                       plan.pages.data(), plan.shape.page, dim};
    const int32_t* rows = plan.order.data() + unit.row;
    for (int vec = 0; vec < unit.rows * group; vec++) {
        const float* q = ask.q + rows[vec / group] * ask.q_stride;
        take_query<P>(q + (h * group + vec % group) * dim, set1(ask.scale), vec, dim, scratch);
    }
    for (int n = unit.part; n < unit.part + unit.parts; n++) {
        const int split = plan.parts[n].split;
        attend_part<P>(plan, unit, plan.parts[n], head, ask.softcap, scratch);
        for (int vec = 0; vec < unit.rows * group; vec++) {
            int32_t row = rows[vec / group];
            int first = plan.first_split(row), last = plan.position[row] / SPLIT;
            if (split < first || split > last) continue;
            const int query_head = h * group + vec % group;
            const float *o = scratch.o + vec * WIDE, m = scratch.m[vec], l = scratch.l[vec];
            if (unit.cut) {
                Partial partial(plan, row, split);
                std::copy_n(o, dim, partial.o + query_head * dim);
                partial.m[query_head] = m;
                partial.l[query_head] = l;
                continue;
            }
            float* out = ask.out + row * ask.out_stride + query_head * dim;
            float* total = scratch.total + vec * WIDE;
            if (first == last) {
                finish(out, o, l, dim);
            } else if (split == first) {
                std::copy_n(o, dim, total);
                scratch.total_m[vec] = m;
                scratch.total_l[vec] = l;
            } else {
                fold(total, scratch.total_m + vec, scratch.total_l + vec, o, m, l, dim);
                if (split == last) finish(out, total, scratch.total_l[vec], dim);
            }
        }
    }
}

// The splits of a cut row, folded in the order in which an uncut unit does it.
void merge(Plan& plan, int32_t row, int head, const Request& ask) {
    const int64_t dim = plan.shape.dim;
    const int first = plan.first_split(row), last = plan.position[row] / SPLIT;
    Partial total(plan, row, first);
    float* o = total.o + head * dim;
    for (int split = first + 1; split <= last; split++) {
        Partial next(plan, row, split);
        fold(o, total.m + head, total.l + head, next.o + head * dim, next.m[head], next.l[head],
             dim);
    }
    finish(ask.out + row * ask.out_stride + head * dim, o, total.l[head], dim);
}

template <bool P, class T>
FS_NOINLINE void attend_all(Plan& plan, Team& team, int tid, const KvLayer& kv,
                            const Request& ask) {
    const int heads = plan.shape.kv_heads, group = plan.shape.group;
    const int64_t dim = plan.shape.dim;
    const Scratch scratch(plan.scratch.data() + tid * scratch_floats(plan.vectors, dim),
                          plan.vectors, dim);
    for (int task; (task = team.take()) < int(plan.units.size()) * heads;)
        attend_unit<P, T>(plan, plan.units[task / heads], task % heads, kv, ask, scratch);
    team.barrier();
    if (plan.cut_rows.empty()) return;
    const int merges = int(plan.cut_rows.size()) * heads;
    for (int task; (task = team.take()) < merges;)
        for (int g = 0; g < group; g++)
            merge(plan, plan.cut_rows[task / heads], task % heads * group + g, ask);
    team.barrier();
}

}  // namespace

int64_t scratch_floats(int64_t vectors, int64_t dim) {
    return Scratch(nullptr, vectors, dim).floats;
}

void attend(Plan& plan, Team& team, int tid, const KvLayer& kv, const float* q, int64_t q_stride,
            float* out, int64_t out_stride, float scale, float softcap) {
    const Request ask{q, q_stride, out, out_stride, scale, softcap};
    if (kv.paired) {
        FlushDenormals flush;
#if defined(__AMX_BF16__)
        Tiles tiles;
#endif
        attend_all<true, uint16_t>(plan, team, tid, kv, ask);
    } else if (kv.bf16) {
        attend_all<false, uint16_t>(plan, team, tid, kv, ask);
    } else {
        attend_all<false, float>(plan, team, tid, kv, ask);
    }
}

}  // namespace fs

int fs_attend(fs::Plan* plan, const fs::KvPool* pool, int64_t layer, const float* q,
              const float* k, const float* v, float* out, float scale, float softcap) {
    using namespace fs;
    static std::mutex one_at_a_time;
    static std::unique_ptr<Team> team;
    std::lock_guard<std::mutex> lock(one_at_a_time);
    if (!team || team->size() != plan->shape.threads)
        team = std::make_unique<Team>(plan->shape.threads);
    const KvLayer kv = pool->layer(layer);
    const int64_t kv_row = int64_t(plan->shape.kv_heads) * plan->shape.dim;
    const int64_t row = kv_row * plan->shape.group;
    try {
        team->run([&](int tid) {
            if (k != nullptr) write_kv(*plan, kv, k, v, kv_row, tid, team->size());
            team->barrier();
            attend(*plan, *team, tid, kv, q, row, out, row, scale, softcap);
        });
    } catch (const std::system_error&) {
        return 1;
    }
    return 0;
}
