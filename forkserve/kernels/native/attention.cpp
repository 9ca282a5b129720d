#include "attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <mutex>
#include <system_error>

#include "attention_tiles.h"

namespace fs {
namespace {

// Blocks of 16 keys that stay in L1 for all rows of a unit.  The next ones are fetched meanwhile:
// the processor's own read-ahead stops where a page ends.
constexpr int CHUNK = 4;
constexpr int BLOCKS = SPLIT / LANES + 2;
constexpr float LOWEST = -INFINITY;

// K and V of one kv head.
template <class T>
struct Head {
    const T *k, *v;
    const int32_t* pages;
    int64_t page, dim;
};

// Scores of vectors [vec, vec + n) of an item.  q, scores: of vector 0 and position `origin`.
template <class T>
void item_scores(const Head<T>& head, const Item& item, int vec, int n, int origin, const float* q,
                 float* scores) {
    const T* block[BLOCKS];
    const int64_t dim = head.dim, each = head.page / LANES;
    const int first = (item.begin + item.shift) / LANES;
    const int count = (item.end + item.shift - 1) / LANES + 1 - first;
    const int32_t* pages = head.pages + item.page;
    for (int b = 0; b < count; b++) {
        int64_t at = first + b;
        block[b] = head.k + pages[at / each] * head.page * dim + at % each * LANES;
    }
    q += vec * WIDE;
    scores += vec * SCORES;
    int done = 0;
    const int front = (item.begin + item.shift) % LANES;  // keys that are not the item's
    if (front) {
        alignas(64) float some[ROWS * SCORES];
        int keep = std::min(LANES - front, item.end - item.begin);
        grouped(n, [&](int r, auto rb) {
            qk<rb(), 1>(q + r * WIDE, block, head.page, dim, some);
            for (int i = 0; i < rb(); i++)
                std::memcpy(scores + (r + i) * SCORES + item.begin - origin,
                            some + i * SCORES + front, sizeof(float) * keep);
        });
        done = 1;
    }
    // Keys behind the item's end are written too: the next item, or the mask, overwrites them.
    for (; done < count; done += CHUNK) {
        const int blocks = std::min(CHUNK, count - done);
        const int soon = std::min(CHUNK, count - done - blocks);
        float* to = scores + (first + done) * LANES - item.shift - origin;
        grouped(n, [&](int r, auto rb) {
            for (int b = done + CHUNK; b < done + CHUNK + soon; b++)
                for (int64_t d = dim * r / n; d < dim * (r + rb()) / n; d++)
                    __builtin_prefetch(block[b] + d * head.page);
            qk_rows<rb(), widest(rb())>(q + r * WIDE, block + done, blocks, head.page, dim,
                                        to + r * SCORES);
        });
    }
}

// o += p V for vectors [vec, vec + n) of an item.
template <class T>
void item_values(const Head<T>& head, const Item& item, int vec, int n, int origin, const float* p,
                 float* o) {
    const int64_t dim = head.dim, page = head.page;
    const int32_t* pages = head.pages + item.page;
    p += vec * SCORES - origin;
    o += vec * WIDE;
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
        grouped(n, [&](int r, auto rb) {
            for (int i = 0; i < soon; i++) {
                const int64_t line = 64 / sizeof(T), lines = next[i].rows * dim / line;
                for (int64_t j = lines * r / n; j < lines * (r + rb()) / n; j++)
                    __builtin_prefetch(next[i].v + j * line);
            }
            pv_rows<rb(), widest(rb())>(p + r * SCORES + begin, here, count, 0, dim, o + r * WIDE);
        });
        begin += CHUNK * LANES;
        count = soon;
    }
}

// Scores of one row to exponentials; those outside [low, high) become 0 within [begin, end).
// The sum runs over lanes of the absolute position, since `s` starts at a multiple of 16.
void softmax(float* s, int begin, int end, int low, int high, float softcap, float* top,
             float* sum) {
    const int first = low / LANES * LANES, last = (high + LANES - 1) / LANES * LANES;
    if (softcap > 0) {
        vf up = set1(softcap), down = set1(1.0f / softcap);
        for (int i = first; i < last; i += LANES) store(s + i, up * tanh(load(s + i) * down));
    }
    std::fill(s + first, s + low, LOWEST);
    std::fill(s + high, s + last, LOWEST);
    vf peak = load(s + first);
    for (int i = first + LANES; i < last; i += LANES) peak = max(peak, load(s + i));
    *top = reduce_max(peak);
    vf shift = set1(*top), total = zero();
    for (int i = first; i < last; i += LANES) {
        vf e = exp(load(s + i) - shift);
        total = total + e;
        store(s + i, e);
    }
    *sum = reduce_add(total);
    if (begin < first) std::fill(s + begin, s + first, 0.0f);
    if (end > last) std::fill(s + last, s + end, 0.0f);
}

FS_INLINE float exp1(float x) {
    float lane[LANES];
    store(lane, exp(set1(x)));
    return lane[0];
}

// Fold the next split of a vector, (o, m, l), into what there is: values not normalised, the score
// that scales them, the sum of exponentials.
void fold(float* into, float* into_m, float* into_l, const float* o, float m, float l,
          int64_t dim) {
    float top = *into_m > m ? *into_m : m;
    float mine = exp1(*into_m - top), other = exp1(m - top);
    vf x = set1(mine), y = set1(other);
    for (int64_t d = 0; d < dim; d += LANES)
        store(into + d, fma(load(o + d), y, load(into + d) * x));
    *into_l = std::fma(l, other, *into_l * mine);
    *into_m = top;
}

// Adding 0 makes -0 the same as 0, which is all that masked keys of mates could change.
void finish(float* out, const float* o, float l, int64_t dim) {
    vf scale = set1(1.0f / l);
    for (int64_t d = 0; d < dim; d += LANES) store(out + d, load(o + d) * scale + zero());
}

// What a thread needs for a unit; a vector is one query head of one row.
struct Scratch {
    float *q, *o, *total, *m, *l, *total_m, *total_l, *scores;
    Scratch(float* base, int64_t vectors) {
        q = base;
        o = q + vectors * WIDE;
        total = o + vectors * WIDE;
        m = total + vectors * WIDE;
        l = m + vectors;
        total_m = l + vectors;
        total_l = total_m + vectors;
        scores = total_l + vectors;
    }
    static int64_t size(int64_t vectors) { return vectors * (3 * WIDE + 4 + SCORES); }
};

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
template <class T>
void attend_part(const Plan& plan, const Unit& unit, const Part& part, const Head<T>& head,
                 float softcap, const Scratch& scratch) {
    const int group = plan.shape.group, origin = part.split * SPLIT;
    const Item* items = plan.items.data() + part.item;
    for (int i = 0; i < part.items; i++)
        item_scores(head, items[i], items[i].row * group, items[i].rows * group, origin,
                    scratch.q, scratch.scores);
    for (int i = 0; i < unit.rows; i++) {
        int32_t row = plan.order[unit.row + i];
        int low = std::max(plan.low(row) - origin, 0);
        int high = std::min(plan.position[row] + 1 - origin, SPLIT);
        for (int vec = i * group; vec < (i + 1) * group; vec++) {
            float* s = scratch.scores + vec * SCORES;
            if (low < high)  // else it sees nothing of this split, and what comes out is not used
                softmax(s, part.begin - origin, part.end - origin, low, high, softcap,
                        scratch.m + vec, scratch.l + vec);
            std::fill_n(scratch.o + vec * WIDE, head.dim, 0.0f);
        }
    }
    for (int i = 0; i < part.items; i++)
        item_values(head, items[i], items[i].row * group, items[i].rows * group, origin,
                    scratch.scores, scratch.o);
}

template <class T>
void attend_unit(Plan& plan, const Unit& unit, int h, const KvLayer& kv, const Request& ask,
                 const Scratch& scratch) {
    const int64_t dim = plan.shape.dim;
    const int group = plan.shape.group;
    const Head<T> head{static_cast<T*>(kv.k) + h * kv.head, static_cast<T*>(kv.v) + h * kv.head,
                       plan.pages.data(), plan.shape.page, dim};
    const int32_t* rows = plan.order.data() + unit.row;
    const vf scale = set1(ask.scale);
    for (int vec = 0; vec < unit.rows * group; vec++) {
        const float* q = ask.q + rows[vec / group] * ask.q_stride;
        q += (h * group + vec % group) * dim;
        for (int64_t d = 0; d < dim; d += LANES)
            store(scratch.q + vec * WIDE + d, load(q + d) * scale);
    }
    for (int n = unit.part; n < unit.part + unit.parts; n++) {
        const int split = plan.parts[n].split;
        attend_part(plan, unit, plan.parts[n], head, ask.softcap, scratch);
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

}  // namespace

int64_t scratch_floats(int64_t vectors) { return Scratch::size(vectors); }

void attend(Plan& plan, Team& team, int tid, const KvLayer& kv, const float* q, int64_t q_stride,
            float* out, int64_t out_stride, float scale, float softcap) {
    const Request ask{q, q_stride, out, out_stride, scale, softcap};
    const int heads = plan.shape.kv_heads, group = plan.shape.group;
    const Scratch scratch(plan.scratch.data() + tid * scratch_floats(plan.vectors), plan.vectors);
    for (int task; (task = team.take()) < int(plan.units.size()) * heads;) {
        const Unit& unit = plan.units[task / heads];
        if (kv.bf16)
            attend_unit<uint16_t>(plan, unit, task % heads, kv, ask, scratch);
        else
            attend_unit<float>(plan, unit, task % heads, kv, ask, scratch);
    }
    team.barrier();
    if (plan.cut_rows.empty()) return;
    const int merges = int(plan.cut_rows.size()) * heads;
    for (int task; (task = team.take()) < merges;)
        for (int g = 0; g < group; g++)
            merge(plan, plan.cut_rows[task / heads], task % heads * group + g, ask);
    team.barrier();
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
