// sm_90: fragments to shared memory, a warp at a time.
#pragma once
#include <ts/types.cuh>

namespace ts {

// 8 × 8 matrices of 16-bit elements (PTX ISA, "stmatrix"): lane l names row l % 8 of matrix l / 8, `from` has a register for each, with two
// neighbours of row l / 4. `trans`: the neighbours lie in different rows of memory.
#define TS_STMATRIX(name, kind)                                                                                                      \
  __device__ __forceinline__ void name##_x1(void* row, const void* from) {                                                           \
    uint32_t r;                                                                                                                      \
    memcpy(&r, from, 4);                                                                                                             \
    asm volatile("stmatrix.sync.aligned.m8n8.x1" kind ".shared.b16 [%0], {%1};" ::"r"(uint32_t(__cvta_generic_to_shared(row))), "r"(r) \
                 : "memory");                                                                                                        \
  }                                                                                                                                  \
  __device__ __forceinline__ void name##_x2(void* row, const void* from) {                                                           \
    uint32_t r[2];                                                                                                                   \
    memcpy(r, from, 8);                                                                                                              \
    asm volatile("stmatrix.sync.aligned.m8n8.x2" kind ".shared.b16 [%0], {%1, %2};" ::"r"(uint32_t(__cvta_generic_to_shared(row))),    \
                 "r"(r[0]), "r"(r[1])                                                                                                \
                 : "memory");                                                                                                        \
  }                                                                                                                                  \
  __device__ __forceinline__ void name##_x4(void* row, const void* from) {                                                           \
    uint32_t r[4];                                                                                                                   \
    memcpy(r, from, 16);                                                                                                             \
    asm volatile("stmatrix.sync.aligned.m8n8.x4" kind ".shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(                                     \
                     uint32_t(__cvta_generic_to_shared(row))),                                                                       \
                 "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])                                                                          \
                 : "memory");                                                                                                        \
  }
TS_STMATRIX(stmatrix, "")
TS_STMATRIX(stmatrix_trans, ".trans")
#undef TS_STMATRIX

}  // namespace ts
