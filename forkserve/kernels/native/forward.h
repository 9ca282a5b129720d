// The forward pass of a decoder: all layers of a batch in one call.
//
// Structures are mirrored by model.py.  Memory belongs to the caller.
#pragma once

#include "attention.h"
#include "gemm.h"

namespace fs {

struct Layer {
    const float* attn_norm;
    const float* q_norm;          // [dim], or null
    const float* k_norm;          // [dim], or null
    const float* post_attn_norm;  // of what attention adds, or null
    const float* ffn_norm;
    const float* post_ffn_norm;  // of what the MLP adds, or null
    const float* cos;            // [context][dim / 2]
    const float* sin;            // likewise
    Packed qkv, out, gate, up, down;
};

struct Model {
    int64_t layers, hidden, ffn, heads, kv_heads, dim, vocab, act;
    float eps, embed_scale, attn_scale, attn_softcap, final_softcap;  // a cap of 0: none
    int32_t tied;  // 1: embeddings are the rows of `head`
    const Layer* layer;
    const float* final_norm;
    const void* embed;   // [vocab][hidden], unless tied
    int64_t embed_bf16;  // 1: embed is bfloat16, 0: float32
    Packed head;
};

// One batch.
struct Call {
    int64_t n;
    const int32_t* ids;  // [n]
    Plan* const* plans;  // [layers]; layers of one window share a plan
    const KvPool* pool;
    int64_t wanted;
    const int32_t* rows;  // [wanted] rows whose logits are given
    float* logits;        // [wanted][vocab]
    int32_t* top;         // [wanted] id of the largest logit, the lowest among equals
    double* seconds;      // [threads][Phase::COUNT] where the time goes is added to, or null
};

class Forward;

}  // namespace fs

FS_API fs::Forward* fs_forward_new(const fs::Model* model, int threads);
FS_API void fs_forward_free(fs::Forward* forward);
// 0; 1: no memory; 2: no threads.
FS_API int fs_forward_run(fs::Forward* forward, const fs::Call* call);
