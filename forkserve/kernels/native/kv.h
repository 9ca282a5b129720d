// Paged KV: the layout, and the operations that move rows.
//
// Memory of a pool, in elements: [layers][2 * kv_heads][rows * dim], K heads first, as of the torch
// engine.  Inside the block of a head, page p begins at element p * page * dim.  V is [page][dim];
// K is transposed inside its page, [dim][page], so that 16 keys are one vector.  `page` is a
// multiple of 16.  The last pages are scratch: fresh rows of works that may not write go there.
#pragma once

#include <cstdint>

#include "simd.h"

namespace fs {

// KV of one layer: element 0 of the first K head and of the first V head.
struct KvLayer {
    void* k;
    void* v;
    int64_t head;  // elements from one head to the next
    bool bf16;     // elements are bfloat16, rounded to nearest even when written; else float32
    bool paired;   // operands of attention's products are bfloat16 too, as of bf16.h
};

// Mirrored by the ctypes structure in attention.py.
struct KvPool {
    void* base;
    int64_t layers, kv_heads, dim, page, rows;  // rows: all of a head, with the scratch rows
    int64_t bf16, paired;                       // 1 or 0; paired only with bf16

    int64_t element() const { return bf16 ? 2 : 4; }
    KvLayer layer(int64_t i) const {
        int64_t head = rows * dim;
        char* k = static_cast<char*>(base) + i * 2 * kv_heads * head * element();
        return {k, k + kv_heads * head * element(), head, bf16 != 0, paired != 0};
    }
};

struct Plan;

// Write the fresh rows of a batch to the slots of its plan.  k (rotated), v: n rows of
// kv_heads * dim floats, `stride` floats apart.  Called by every thread of a team; no barrier
// inside.
void write_kv(const Plan& plan, const KvLayer& kv, const float* k, const float* v, int64_t stride,
              int tid, int threads);

}  // namespace fs

// All of these work on every layer, in the calling thread, and may run beside a batch that writes
// none of the rows concerned.  Row r of a head is slot r % page of page r / page.

// copies: n times (first source row, first target row, count), in order; pages do not overlap.
FS_API void fs_copy_rows(const fs::KvPool* pool, const int64_t* copies, int64_t n);
// runs: n times (first row, count).  out: [layers][2 * kv_heads][sum of counts][dim].
FS_API void fs_read_rows(const fs::KvPool* pool, const int64_t* runs, int64_t n, void* out);
// The reverse, from row `at` on of an array [layers][2 * kv_heads][in_rows][dim].
FS_API void fs_write_rows(const fs::KvPool* pool, const int64_t* runs, int64_t n, const void* in,
                          int64_t in_rows, int64_t at);
