// What becomes of scores: exponentials, and the folding of one split after another.
#pragma once

#include <algorithm>
#include <cmath>

#include "bf16.h"

namespace fs {
namespace {

constexpr float LOWEST = -INFINITY;

// e^x for x <= 0, within 6e-5 of itself (Taylor's polynomial of degree 4, |r| <= ln(2)/2): what is
// rounded to bfloat16 next needs no more.  0 below -87.3.
FS_INLINE vf coarse_exp(vf x) {
    vf n = round(x * set1(1.44269504088896341f));
    vf r = fma(n, set1(-0.69314718056f), x);
    vf p = fma(set1(1.0f / 24), r, set1(1.0f / 6));
    p = fma(p, r, set1(0.5f));
    p = fma(p, r, set1(1.0f));
    p = fma(p, r, set1(1.0f));
    return where_less(x, set1(-87.3f), zero(), p * exp2_whole(n));
}

// Scores of one row to exponentials; those outside [low, high) become 0 within [begin, end).
// The sum runs over lanes of the absolute position, since `s` starts at a multiple of 16.
// Paired, exponentials are rounded before they are summed, and go to `coarse` too if not null, with
// zeros to the ends of the first and last block of positions.
// meanwhile(): called before each block of exponentials.
template <bool P, class Meanwhile>
void softmax(float* s, int begin, int end, int low, int high, float softcap, float* top,
             float* sum, uint16_t* coarse, Meanwhile meanwhile) {
    const int first = low / LANES * LANES, last = (high + LANES - 1) / LANES * LANES;
    if (softcap > 0) {
        vf up = set1(softcap), down = set1(1.0f / softcap);
        for (int i = first; i < last; i += LANES) store(s + i, up * tanh(load(s + i) * down));
    }
    std::fill(s + first, s + low, LOWEST);
    std::fill(s + high, s + last, LOWEST);
    // The largest of them is the same in any order: four chains, of which none waits for another.
    vf peak[4];
    for (vf& x : peak) x = load(s + first);
    int at = first + LANES;
    for (; at + 4 * LANES <= last; at += 4 * LANES)
        for (int i = 0; i < 4; i++) peak[i] = max(peak[i], load(s + at + i * LANES));
    for (; at < last; at += LANES) peak[0] = max(peak[0], load(s + at));
    *top = reduce_max(max(max(peak[0], peak[1]), max(peak[2], peak[3])));
    vf shift = set1(*top), total = zero();
    for (int i = first; i < last; i += LANES) {
        meanwhile();
        vf e = load(s + i) - shift;
        if constexpr (!P) {
            e = where_less(e, set1(-87.3f), zero(), exp_within(e));  // none is above 0
        } else {
            e = coarse_exp(e);
            e = coarse ? store_rounded(coarse + i, e) : rounded(e);
        }
        total = total + e;
        store(s + i, e);
    }
    if (P && coarse) {
        const int from = begin / PAIRED * PAIRED, to = (end + PAIRED - 1) / PAIRED * PAIRED;
        std::fill(coarse + from, coarse + std::max(first, from), 0);
        std::fill(coarse + last, coarse + std::max(last, to), 0);
    }
    *sum = reduce_add(total);
    if (begin < first) std::fill(s + begin, s + first, 0.0f);
    if (end > last) std::fill(s + last, s + end, 0.0f);
}

// Fold the next split of 16 vectors, (m, l), into the scores that scale values and into the sums of
// exponentials: what there is of values counts `mine` times, what comes `other` times.
FS_INLINE void fold_sums(vf& top, vf& sum, const float* m, const float* l, float* mine,
                         float* other) {
    const vf was = top, now = load(m);
    top = max(was, now);
    const vf x = exp(was - top), y = exp(now - top);
    sum = fma(load(l), y, sum * x);
    store(mine, x);
    store(other, y);
}

FS_INLINE void fold_values(float* into, float mine, const float* o, float other, int64_t dim) {
    vf x = set1(mine), y = set1(other);
    for (int64_t d = 0; d < dim; d += LANES)
        store(into + d, fma(load(o + d), y, load(into + d) * x));
}

// The same of n vectors, values included, which are `stride` floats apart.  Maxima and sums can be
// read to the next multiple of 16.
inline void fold(float* into, float* into_m, float* into_l, const float* o, const float* m,
                 const float* l, int n, int64_t stride, int64_t dim) {
    for (int first = 0; first < n; first += LANES) {
        const int count = std::min(n - first, LANES);
        float mine[LANES], other[LANES];
        vf top = load(into_m + first), sum = load(into_l + first);
        fold_sums(top, sum, m + first, l + first, mine, other);
        store_part(into_m + first, top, count);
        store_part(into_l + first, sum, count);
        for (int i = 0; i < count; i++, into += stride, o += stride)
            fold_values(into, mine[i], o, other[i], dim);
    }
}

// Adding 0 makes -0 the same as 0, which is all that masked keys of mates could change.
void finish(float* out, const float* o, float l, int64_t dim) {
    vf scale = set1(1.0f / l);
    for (int64_t d = 0; d < dim; d += LANES) store(out + d, load(o + d) * scale + zero());
}

}  // namespace
}  // namespace fs
