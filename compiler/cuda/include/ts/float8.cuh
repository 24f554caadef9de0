// Four float8_e4m3fn at once, to and from float: what the constructor and the cast of ts::e4m3 make of each, to the bit.
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

__device__ __forceinline__ void narrow4_e4m3(e4m3* to, const float* from) {
#if __CUDA_ARCH__ >= 890
  uint16_t low, high;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(from[1]), "f"(from[0]));
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(from[3]), "f"(from[2]));
  uint32_t four = low | uint32_t(high) << 16;
#pragma unroll
  for (int k = 0; k < 4; ++k) four = fabsf(from[k]) > 464.0f ? four | 0x7fu << (8 * k) : four;
  memcpy(to, &four, 4);
#else
#pragma unroll
  for (int k = 0; k < 4; ++k) to[k] = e4m3(from[k]);
#endif
}

}  // namespace ts
