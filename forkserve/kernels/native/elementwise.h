// Row-wise operators: norm, rotation, activation, soft cap.
#pragma once

#include <cstdint>

namespace fs {

enum Act { SILU = 0, GELU_TANH = 1 };

// out[i] = x[i] / sqrt(mean(x^2) + eps) * weight[i], i < n; may be in place.
// The squares are summed in 16 lanes by i mod 16.
void rms_norm(const float* x, const float* weight, int n, float eps, float* out);

// Rotates `heads` vectors of `dim` (halves, as in Llama) in place; cos, sin [dim / 2].
void rope(float* x, int heads, int dim, const float* cos, const float* sin);

// gate[i] = act(gate[i]) * up[i], i < n.
void activate(int act, float* gate, const float* up, int n);

// x[i] = cap * tanh(x[i] / cap), i < n.
void soft_cap(float* x, int64_t n, float cap);

// x[i] += y[i], x[i] *= factor, i < n.
void accumulate(float* x, const float* y, int n);
void multiply(float* x, float factor, int n);

// Index of the largest of x, the first among equals; of a NaN if there is one.
int32_t largest(const float* x, int64_t n);

}  // namespace fs
