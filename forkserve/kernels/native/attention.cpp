#include "attention.h"

#include <algorithm>
#include <memory>
#include <mutex>
#include <system_error>

#include "attention_items.h"

namespace fs {
namespace {

struct Request {
    const float* q;
    int64_t q_stride;
    float* out;
    int64_t out_stride;
    float scale, softcap;
};

// Values of n vectors from query head `head` on, `stride` floats apart, to the result.
void finish(const Request& ask, int32_t row, int head, int n, const float* o, const float* l,
            int64_t stride, int64_t dim) {
    float* out = ask.out + row * ask.out_stride + head * dim;
    for (int i = 0; i < n; i++) finish(out + i * dim, o + i * stride, l[i], dim);
}

// Values, maxima and sums of a kv head of a cut row in one split.
struct Partial {
    float *o, *m, *l;
    Partial(Plan& plan, int32_t row, int split, int head) {
        const int64_t index = plan.first_part[row] + split - plan.first_split(row);
        float* base = (float*)((uintptr_t(plan.partial.data()) + 63) / 64 * 64);
        o = base + (index * plan.shape.kv_heads + head) * plan.partial_floats();
        m = o + int64_t(plan.shape.group) * plan.shape.dim;
        l = m + plan.partial_lanes();
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
    Ahead<T> ahead(head, items, part.items);
    // As fast as memory gives them: few vectors leave little time.
    const int rate = unit.rows * group > ROWS ? 1 : 2;
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
                           scratch.m + vec, scratch.l + vec, coarse, [&] {
                               for (int lines = 0; lines < rate; lines++) ahead.fetch();
                           });
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
        for (int i = 0; i < unit.rows; i++) {
            const int32_t row = rows[i];
            const int first = plan.first_split(row), last = plan.position[row] / SPLIT;
            if (split < first || split > last) continue;
            const int vec = i * group;
            const float *o = scratch.o + vec * WIDE, *m = scratch.m + vec, *l = scratch.l + vec;
            if (unit.cut) {
                Partial partial(plan, row, split, h);
                for (int g = 0; g < group; g++) std::copy_n(o + g * WIDE, dim, partial.o + g * dim);
                std::copy_n(m, group, partial.m);
                std::copy_n(l, group, partial.l);
                continue;
            }
            float *total = scratch.total + vec * WIDE, *sum = scratch.total_l + vec;
            if (first == last) {
                finish(ask, row, h * group, group, o, l, WIDE, dim);
            } else if (split == first) {
                for (int g = 0; g < group; g++) std::copy_n(o + g * WIDE, dim, total + g * WIDE);
                std::copy_n(m, group, scratch.total_m + vec);
                std::copy_n(l, group, sum);
            } else {
                fold(total, scratch.total_m + vec, sum, o, m, l, group, WIDE, dim);
                if (split == last) finish(ask, row, h * group, group, total, sum, WIDE, dim);
            }
        }
    }
}

// The splits of a cut row, folded in the order in which an uncut unit does it.
void merge(Plan& plan, int32_t row, int head, const Request& ask) {
    const int64_t dim = plan.shape.dim;
    const int group = plan.shape.group;
    const int first = plan.first_split(row), last = plan.position[row] / SPLIT;
    auto fetch = [&](int split) {  // another thread may have made it
        const char* from = reinterpret_cast<const char*>(Partial(plan, row, split, head).o);
        const int64_t bytes = plan.partial_floats() * int64_t(sizeof(float));
        for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(from + at);
    };
    for (int split = first; split <= std::min(first + 2, last); split++) fetch(split);
    const Partial into(plan, row, first, head);
    for (int lane = 0; lane < group; lane += LANES) {
        vf top = load(into.m + lane), sum = load(into.l + lane);
        for (int split = first + 1; split <= last; split++) {
            if (lane == 0 && split + 2 <= last) fetch(split + 2);
            const Partial next(plan, row, split, head);
            float mine[LANES], other[LANES];
            fold_sums(top, sum, next.m + lane, next.l + lane, mine, other);
            for (int g = lane; g < std::min(lane + LANES, group); g++)
                fold_values(into.o + g * dim, mine[g - lane], next.o + g * dim, other[g - lane],
                            dim);
        }
        store(into.l + lane, sum);
    }
    finish(ask, row, head * group, group, into.o, into.l, dim, dim);
}

template <bool P, class T>
FS_NOINLINE void attend_all(Plan& plan, Team& team, int tid, const KvLayer& kv,
                            const Request& ask) {
    const int heads = plan.shape.kv_heads;
    const int64_t dim = plan.shape.dim;
    const Scratch scratch(plan.scratch.data() + tid * scratch_floats(plan.vectors, dim),
                          plan.vectors, dim);
    for (int task; (task = team.take()) < int(plan.units.size()) * heads;)
        attend_unit<P, T>(plan, plan.units[task / heads], task % heads, kv, ask, scratch);
    team.barrier();
    if (plan.cut_rows.empty()) return;
    const int merges = int(plan.cut_rows.size()) * heads;
    for (int task; (task = team.take()) < merges;)
        merge(plan, plan.cut_rows[task / heads], task % heads, ask);
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
