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

// c + a0 b0 + … + a3 b3 (PTX ISA, dp4a). Bytes that lie together in a register are put together by nothing.
__device__ __forceinline__ int dp4a(
    int8_t a0, int8_t a1, int8_t a2, int8_t a3, int8_t b0, int8_t b1, int8_t b2, int8_t b3, int c) {
  const uint32_t a = uint8_t(a0) | uint8_t(a1) << 8 | uint8_t(a2) << 16 | uint32_t(uint8_t(a3)) << 24;
  const uint32_t b = uint8_t(b0) | uint8_t(b1) << 8 | uint8_t(b2) << 16 | uint32_t(uint8_t(b3)) << 24;
  return __dp4a(int(a), int(b), c);
}

// (x & mask) | set in one instruction, which ptxas makes two of where both are constants.
__device__ __forceinline__ uint32_t and_or(uint32_t x, uint32_t mask, uint32_t set) {
  uint32_t r;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(r) : "r"(x), "r"(mask), "r"(set));
  return r;
}

// A NaN on either side is the result.
__device__ __forceinline__ double max(double a, double b) { return a >= b || a != a ? a : b; }
__device__ __forceinline__ double min(double a, double b) { return a <= b || a != a ? a : b; }
#if __CUDA_ARCH__ >= 800
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
#else
__device__ __forceinline__ float max(float a, float b) { return a >= b || a != a ? a : b; }
__device__ __forceinline__ float min(float a, float b) { return a <= b || a != a ? a : b; }
#endif

// 1 / (1 + e^-x), for negative x as e^x / (1 + e^x): e^-x is infinite where the result still is a denormal.
__device__ __forceinline__ float sigmoid(float x) {
  const float e = expf(-fabsf(x));
  return (x < 0.0f ? e : 1.0f) / (1.0f + e);
}
__device__ __forceinline__ double sigmoid(double x) {
  const double e = exp(-fabs(x));
  return (x < 0.0 ? e : 1.0) / (1.0 + e);
}

// One instruction each, where T.__exp2, T.__tanh and T.fast_rcp are written.
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
__device__ __forceinline__ float fast_rcp(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

}  // namespace ts
