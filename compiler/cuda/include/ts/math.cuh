// Scalar arithmetic that the language defines and CUDA's library has not under one name.
#pragma once
#include <ts/types.cuh>

namespace ts {

// Integer quotient and remainder that round down, as Python's.
template <typename T>
__device__ __forceinline__ T floordiv(T a, T b) {
  const T q = a / b, r = a % b;
  return r != 0 && (r < 0) != (b < 0) ? q - 1 : q;
}
template <typename T>
__device__ __forceinline__ T floormod(T a, T b) {
  const T r = a % b;
  return r != 0 && (r < 0) != (b < 0) ? r + b : r;
}

// A NaN on either side is the result.
__device__ __forceinline__ float max(float a, float b) {
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}
__device__ __forceinline__ float min(float a, float b) {
  float r;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}
__device__ __forceinline__ double max(double a, double b) { return a >= b || a != a ? a : b; }
__device__ __forceinline__ double min(double a, double b) { return a <= b || a != a ? a : b; }

// 1 / (1 + e^-x).
__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
__device__ __forceinline__ double sigmoid(double x) { return 1.0 / (1.0 + exp(-x)); }

// One instruction each, where T.__exp2 and T.__tanh are written.
__device__ __forceinline__ float fast_exp2(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
__device__ __forceinline__ float fast_tanh(float x) {
  float r;
  asm("tanh.approx.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

}  // namespace ts
