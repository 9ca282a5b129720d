// Segment attention over pages: one operator for prefill, chunk, decode and tree.
//
// Absolute positions are cut in splits of SPLIT.  A unit of work is (kv head, tile of query rows,
// one or all of the splits they see).  Within a split: scores of each run of pages for all rows of
// the tile that see it, stored by absolute position; softmax of each row; values in ascending
// position.  Splits are folded in ascending order.  So the result of a row depends on its own q, K
// and V alone: not on its mates, chunks, pages, tiles, threads or the instruction set.
#pragma once

#include <cstdint>
#include <vector>

#include "kv.h"
#include "threads.h"

namespace fs {

constexpr int SPLIT = 512;

// The works of a batch as flat arrays; mirrored by the ctypes structure in attention.py.
// A run is a row of pages of which spans are prefixes: run r starts at position run_start[r], its
// row i is slot (run_offset[r] + i) % page of page pages[run_page[r] + (run_offset[r] + i) / page].
struct Spans {
    int64_t works, uses, runs, n_pages;
    const int32_t* count;      // [works] tokens
    const int32_t* start;      // [works] position of the first one
    const int32_t* use_end;    // [works] context of work w: uses [use_end[w - 1], use_end[w])
    const int32_t* write;      // [works] run that takes the fresh rows, -1: scratch
    const int32_t* use_run;    // [uses]
    const int32_t* use_length; // [uses] rows, more than 0
    const int32_t* run_start;  // [runs]
    const int32_t* run_offset; // [runs]
    const int32_t* run_page;   // [runs + 1] first of `pages`
    const int32_t* pages;      // [n_pages]
};

// What a plan is for.  Mirrored in attention.py.
struct PlanShape {
    int32_t kv_heads, group, dim, page;  // group: query heads per kv head
    int32_t pages, scratch;              // scratch: first scratch page; pages: all, with scratch
    int32_t threads;
    int32_t window;  // a row sees itself and the window - 1 rows before it; 0: all before it
};

// Rows [row, row + rows) of a tile against positions [begin, end) of one run.
struct Item {
    int32_t row, rows, begin, end;
    int32_t shift, page;  // position p is slot p + shift of the pages from `page` on
};

struct Part {  // one split of a unit
    int32_t split, begin, end, item, items;  // [begin, end): positions that the items cover
};

struct Unit {
    int32_t row, rows;  // of `order`
    int32_t part, parts;
    int32_t cut;  // 1: its only part goes to `partial`; 0: it has all parts and writes the result
    int64_t cost;
};

struct Plan {
    PlanShape shape{};
    int32_t n = 0;                    // query rows of the batch
    std::vector<int32_t> position;    // [n]
    std::vector<int64_t> slot;        // [n] row of the pool that takes the fresh K and V
    std::vector<int32_t> order;       // [n] batch rows in the order of tiles
    std::vector<int32_t> pages;       // page tables that items name
    std::vector<Unit> units;          // heavy ones first
    std::vector<Part> parts;
    std::vector<Item> items;
    std::vector<int32_t> cut_rows;    // batch rows whose splits are folded in a second pass
    std::vector<int64_t> first_part;  // [n] place of a cut row's first split in `partial`
    std::vector<float> partial;       // per (cut row, split, kv head), see `partial_floats`
    std::vector<float> scratch;       // per thread
    int64_t vectors = 0;              // most query vectors of a unit
    int64_t rows_read = 0;            // KV rows read per kv head

    // First position that a row sees, and the split that has it.
    int low(int row) const {
        return shape.window && position[row] >= shape.window ? position[row] - shape.window + 1 : 0;
    }
    int first_split(int row) const { return low(row) / SPLIT; }

    // What one kv head of a cut row has of a split: group * dim values, maxima, sums.  Whole cache
    // lines, because two threads write two heads at the same time.
    int64_t partial_floats() const {
        return int64_t(shape.group) * shape.dim + 2 * partial_lanes();
    }
    int64_t partial_lanes() const { return (shape.group + LANES - 1) / LANES * LANES; }
};

// Floats that a thread needs for units of so many query vectors.
int64_t scratch_floats(int64_t vectors, int64_t dim);

// Softmax(scale * q K^T, capped by softcap * tanh(x / softcap) if softcap > 0) V of every row.
// q: n rows of kv_heads * group * dim floats, rotated, q_stride floats apart; out likewise.
// With kv.paired the operands of both products are bfloat16: scaled queries and exponentials are
// rounded, and sums have the order of bf16.h, over dimensions and over absolute positions.
// Called by every thread of a team of `shape.threads`, right after a barrier that follows the
// writing of K and V; ends with a barrier.
void attend(Plan& plan, Team& team, int tid, const KvLayer& kv, const float* q, int64_t q_stride,
            float* out, int64_t out_stride, float scale, float softcap);

}  // namespace fs

FS_API fs::Plan* fs_plan_new();
FS_API void fs_plan_free(fs::Plan* plan);
// 0, or what is wrong: see `_ERRORS` in attention.py; *where is the work or run concerned.
FS_API int fs_plan_build(fs::Plan* plan, const fs::PlanShape* shape, const fs::Spans* spans,
                         int64_t* where);
// Six numbers: rows, units, parts, items, cut rows, KV rows read per kv head.
FS_API void fs_plan_counts(const fs::Plan* plan, int64_t* out);
// For tests and benchmarks: attention of one layer by a team of its own, after writing k and v
// unless they are null.  Rows are dense.  Returns 1 where the system gives no threads, else 0.
FS_API int fs_attend(fs::Plan* plan, const fs::KvPool* pool, int64_t layer, const float* q,
                     const float* k, const float* v, float* out, float scale, float softcap);
