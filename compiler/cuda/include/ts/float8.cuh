// Several float8_e4m3fn at once, to and from float: what the constructor and the cast of ts::e4m3 make of each, to the bit.
#pragma once
#include <ts/convert.cuh>

namespace ts {

__device__ __forceinline__ void widen4_e4m3(float* to, const e4m3* from) {
#if __CUDA_ARCH__ >= 890
  uint32_t four;
  memcpy(&four, from, 4);
#pragma unroll
  for (int k = 0; k < 4; k += 2) {
    uint32_t two;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(two) : "h"(uint16_t(four >> (8 * k))));
    to[k] = half_bits_to_float(uint16_t(two));
    to[k + 1] = half_bits_to_float(uint16_t(two >> 16));
  }
#else
#pragma unroll
  for (int k = 0; k < 4; ++k) to[k] = float(from[k]);
#endif
}

// Of N numbers. Those beyond 464 become NaN, of which the instruction makes 448. They are few: where none of the N is so great, which
// costs a maximum each, nothing is mended.
template <int N>
__device__ __forceinline__ void narrow_e4m3(e4m3* to, const float* from) {
#if __CUDA_ARCH__ >= 890
  float most[4];
  uint32_t fours[N / 4];
#pragma unroll
  for (int k = 0; k < N; ++k) most[k & 3] = k < 4 ? fabsf(from[k]) : fmaxf(most[k & 3], fabsf(from[k]));
#pragma unroll
  for (int k = 0; k < N; k += 4) {
    uint16_t low, high;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(from[k + 1]), "f"(from[k]));
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(from[k + 3]), "f"(from[k + 2]));
    fours[k / 4] = low | uint32_t(high) << 16;
  }
  if (fmaxf(fmaxf(most[0], most[1]), fmaxf(most[2], most[3])) > 464.0f) {
#pragma unroll
    for (int k = 0; k < N; ++k) fours[k / 4] |= fabsf(from[k]) > 464.0f ? 0x7fu << (8 * (k & 3)) : 0;
  }
#pragma unroll
  for (int k = 0; k < N; k += 4) memcpy(to + k, &fours[k / 4], 4);
#else
#pragma unroll
  for (int k = 0; k < N; ++k) to[k] = e4m3(from[k]);
#endif
}

}  // namespace ts
