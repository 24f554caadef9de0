// Threads that meet, exchange values and multiply together.
#pragma once
#include <ts/types.cuh>

namespace ts {

// Meets `threads` threads of the block (PTX ISA, "barrier.sync"); number 0 is that of __syncthreads.
__device__ __forceinline__ void barrier_sync(int number, int threads) {
  asm volatile("barrier.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// The value of the lane whose number differs in the bits of `mask`. All lanes of the warp take part.
template <typename T>
__device__ __forceinline__ T shuffle_xor(T value, int mask) {
  return __shfl_xor_sync(0xffffffffu, value, mask);
}
template <>
__device__ __forceinline__ int8_t shuffle_xor(int8_t value, int mask) {
  return int8_t(__shfl_xor_sync(0xffffffffu, int(value), mask));
}
template <>
__device__ __forceinline__ uint8_t shuffle_xor(uint8_t value, int mask) {
  return uint8_t(__shfl_xor_sync(0xffffffffu, int(value), mask));
}
template <>
__device__ __forceinline__ int16_t shuffle_xor(int16_t value, int mask) {
  return int16_t(__shfl_xor_sync(0xffffffffu, int(value), mask));
}
template <>
__device__ __forceinline__ uint16_t shuffle_xor(uint16_t value, int mask) {
  return uint16_t(__shfl_xor_sync(0xffffffffu, int(value), mask));
}
template <>
__device__ __forceinline__ bool shuffle_xor(bool value, int mask) {
  return __shfl_xor_sync(0xffffffffu, int(value), mask) != 0;
}

// Ends the launch with an error: site `number` of the kernel's table says where.
__device__ __forceinline__ void fail(int number) { asm volatile("trap;"); }

// Four 8 × 8 matrices of 16-bit elements (PTX ISA, "ldmatrix"): lane l names row l % 8 of matrix l / 8; `to` gets four registers.
__device__ __forceinline__ void ldmatrix_x4(void* to, const void* row) {
  uint32_t r[4];
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(uint32_t(__cvta_generic_to_shared(row)))
               : "memory");
  memcpy(to, r, sizeof(r));
}
__device__ __forceinline__ void ldmatrix_x4_trans(void* to, const void* row) {
  uint32_t r[4];
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(uint32_t(__cvta_generic_to_shared(row)))
               : "memory");
  memcpy(to, r, sizeof(r));
}

// d += a · b of one warp (PTX ISA, "mma.sync"). Registers as the instruction has them: d four numbers, a four registers, b two.
#define TS_MMA_FLOAT(name, type)                                                                                              \
  __device__ __forceinline__ void name(float* d, const void* pa, const void* pb) {                                            \
    uint32_t a[4], b[2];                                                                                                      \
    memcpy(a, pa, sizeof(a));                                                                                       \
    memcpy(b, pb, sizeof(b));                                                                                       \
    asm("mma.sync.aligned.m16n8k16.row.col.f32." type "." type ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, " \
        "%2, %3};"                                                                                                            \
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                                      \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));                                                  \
  }
TS_MMA_FLOAT(mma_m16n8k16_f16, "f16")
TS_MMA_FLOAT(mma_m16n8k16_bf16, "bf16")
#undef TS_MMA_FLOAT

#define TS_MMA_INT(name, left, right)                                                                                           \
  __device__ __forceinline__ void name(int* d, const void* pa, const void* pb) {                                                \
    uint32_t a[4], b[2];                                                                                                        \
    memcpy(a, pa, sizeof(a));                                                                                         \
    memcpy(b, pb, sizeof(b));                                                                                         \
    asm("mma.sync.aligned.m16n8k32.row.col.s32." left "." right ".s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, " \
        "%2, %3};"                                                                                                              \
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])                                                                        \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));                                                    \
  }
TS_MMA_INT(mma_m16n8k32_s8, "s8", "s8")
TS_MMA_INT(mma_m16n8k32_u8, "u8", "u8")
TS_MMA_INT(mma_m16n8k32_s8_u8, "s8", "u8")
TS_MMA_INT(mma_m16n8k32_u8_s8, "u8", "s8")
#undef TS_MMA_INT

}  // namespace ts
