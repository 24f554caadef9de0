// Threads that meet, exchange values and multiply together.
#pragma once
#include <ts/types.cuh>

namespace ts {

// Meets `threads` threads of the block (PTX ISA, "barrier.sync"); number 0 is that of __syncthreads.
__device__ __forceinline__ void barrier_sync(int number, int threads) {
  asm volatile("barrier.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// Whether one of the warp's lanes says so. All of them take part.
__device__ __forceinline__ bool any(bool test) { return __any_sync(0xffffffffu, test); }

// The value of the lane whose number differs in the bits of `mask`. All lanes of the warp take part.
// A value that all lanes of a warp have alike, so that the compiler knows it: ways that part by it do not part a warp.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(0xffffffffu, value, 0); }
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

// A value on its way between lanes, as a word that shuffles take.
template <typename T, typename Move>
__device__ __forceinline__ T moved(T value, Move move) {
  if constexpr (sizeof(T) < 4) {
    unsigned word = 0;
    memcpy(&word, &value, sizeof(T));
    word = move(word);
    memcpy(&value, &word, sizeof(T));
    return value;
  } else {
    return bits<T>(move(bits<typename WordOf<sizeof(T)>::type>(value)));
  }
}

// Shuffles as the author wrote them, in groups of `width` lanes. The lanes of `mask` take part.
#define TS_LANE(name, shuffle)                                                                            \
  template <typename T>                                                                                  \
  __device__ __forceinline__ T name(T value, int by, int width, uint32_t mask = 0xffffffffu) {            \
    return moved(value, [=](auto word) { return shuffle(mask, word, by, width); });                       \
  }
TS_LANE(lane_xor, __shfl_xor_sync)
TS_LANE(lane_up, __shfl_up_sync)
TS_LANE(lane_down, __shfl_down_sync)
TS_LANE(lane_from, __shfl_sync)
#undef TS_LANE

// Votes as the author wrote them. The lanes of `mask` take part; bit k is lane k.
__device__ __forceinline__ int vote_any(bool test, uint32_t mask = 0xffffffffu) { return __any_sync(mask, test) != 0; }
__device__ __forceinline__ int vote_all(bool test, uint32_t mask = 0xffffffffu) { return __all_sync(mask, test) != 0; }
__device__ __forceinline__ uint64_t vote_ballot(bool test, uint32_t mask = 0xffffffffu) { return __ballot_sync(mask, test); }
__device__ __forceinline__ uint64_t vote_active() { return __activemask(); }
template <typename T>
__device__ __forceinline__ uint32_t vote_match_any(T value, uint32_t mask = 0xffffffffu) {
  return __match_any_sync(mask, bits<typename WordOf<sizeof(T)>::type>(value));
}
template <typename T>
__device__ __forceinline__ uint32_t vote_match_all(T value, uint32_t mask = 0xffffffffu) {
  int all;
  return __match_all_sync(mask, bits<typename WordOf<sizeof(T)>::type>(value), &all);
}

// Barriers at which threads also tell one another on how many of them a test holds (PTX ISA, "barrier.red").
__device__ __forceinline__ int block_count(bool test, int number, int threads) {
  int count;
  asm volatile("{ .reg .pred p; setp.ne.s32 p, %1, 0; barrier.red.popc.u32 %0, %2, %3, p; }"
               : "=r"(count)
               : "r"(int(test)), "r"(number), "r"(threads)
               : "memory");
  return count;
}
__device__ __forceinline__ int block_and(bool test, int number, int threads) {
  return block_count(test, number, threads) == threads;
}
__device__ __forceinline__ int block_or(bool test, int number, int threads) {
  return block_count(test, number, threads) != 0;
}

// The same as barrier_sync, at a barrier that the author named; and without waiting for the others.
__device__ __forceinline__ void named_barrier(int number, int threads) {
  barrier_sync(number, threads);
}
__device__ __forceinline__ void named_barrier_arrive(int number, int threads) {
  asm volatile("barrier.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// Ends the launch with an error: site `number` of the kernel's table says where, and the record, in the host's memory, who. One word holds
// all that threads that fail together could mix (bit 63: failed; site: 11 bits; thread: 10; block: 42), so the last to write it is told; the
// other, the grid's extents, is the same for all. The fence completes the stores at the host (PTX ISA, "membar": .sys) before
// the trap, behind which the context is lost.
__device__ __forceinline__ void fail(int number, int64_t* record) {
  const uint64_t block = blockIdx.x + uint64_t(gridDim.x) * (blockIdx.y + uint64_t(gridDim.y) * blockIdx.z);
  volatile uint64_t* to = reinterpret_cast<volatile uint64_t*>(record);
  to[1] = gridDim.x | uint64_t(gridDim.y) << 32;
  __threadfence_system();
  to[0] = 1ull << 63 | uint64_t(number < 2047 ? number : 2047) << 52 | uint64_t(threadIdx.x) << 42 | (block & ((1ull << 42) - 1));
  __threadfence_system();
  asm volatile("trap; exit;");
  __builtin_unreachable();  // so that loads behind a check may be issued in front of it
}

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

// The same with sums of float16: d is two registers of two numbers.
__device__ __forceinline__ void mma_f16_m16n8k16_f16(void* pd, const void* pa, const void* pb) {
  uint32_t a[4], b[2], d[2];
  memcpy(a, pa, sizeof(a));
  memcpy(b, pb, sizeof(b));
  memcpy(d, pd, sizeof(d));
  asm("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0, %1}, {%2, %3, %4, %5}, {%6, %7}, {%0, %1};"
      : "+r"(d[0]), "+r"(d[1])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  memcpy(pd, d, sizeof(d));
}

// The same for a deeper product, of which a keeps two of each four neighbours along k, and `places` says where they were; b in halves.
#define TS_MMA_SPARSE(name, type)                                                                                               \
  __device__ __forceinline__ void name(float* d, const void* pa, const void* pb, const void* pb_next, uint32_t places) {        \
    uint32_t a[4], b[4];                                                                                                        \
    memcpy(a, pa, sizeof(a));                                                                                                   \
    memcpy(b, pb, 8);                                                                                                           \
    memcpy(b + 2, pb_next, 8);                                                                                                  \
    asm("mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32." type "." type ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, " \
        "{%8, %9, %10, %11}, {%0, %1, %2, %3}, %12, 0x0;"                                                                       \
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                                        \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]), "r"(places));                 \
  }
TS_MMA_SPARSE(mma_sp_m16n8k32_f16, "f16")
TS_MMA_SPARSE(mma_sp_m16n8k32_bf16, "bf16")
#undef TS_MMA_SPARSE

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

// float32 operands, of which the tensor cores take the upper 19 bits.
__device__ __forceinline__ void mma_m16n8k8_tf32(float* d, const void* pa, const void* pb) {
  uint32_t a[4], b[2];
  memcpy(a, pa, sizeof(a));
  memcpy(b, pb, sizeof(b));
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

#if __CUDA_ARCH__ >= 890
#define TS_MMA_FLOAT8(name, left, right)                                                                                          \
  __device__ __forceinline__ void name(float* d, const void* pa, const void* pb) {                                                \
    uint32_t a[4], b[2];                                                                                                          \
    memcpy(a, pa, sizeof(a));                                                                                                     \
    memcpy(b, pb, sizeof(b));                                                                                                     \
    asm("mma.sync.aligned.m16n8k32.row.col.f32." #left "." #right ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, " \
        "%2, %3};"                                                                                                                \
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                                          \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));                                                      \
  }
#else
// Two 8-bit floats, in the lower bytes of a word's halves, as two float16: exact. As float16 the fields of e4m3 mean 2^-8 of the value
// (convert.cuh), and its NaN would be 480; e5m2 is the upper byte of a float16.
__device__ __forceinline__ uint32_t halves_of_e4m3(uint32_t pair) {
  const uint32_t size = (pair & 0x007f007fu) << 7;
  uint32_t h;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(h) : "r"(size | (pair & 0x00800080u) << 8), "r"(0x5c005c00u));
  return h | (__vcmpeq2(size, 0x3f803f80u) & 0x7fff7fffu);
}
__device__ __forceinline__ uint32_t halves_of_e5m2(uint32_t pair) { return pair << 8; }
// Processors without 8-bit floats: two products of float16. Which 16 of the 32 places of k come first does not matter as long as it is
// the same in both operands: of each register the even bytes, then the odd ones.
#define TS_MMA_FLOAT8(name, left, right)                                                                             \
  __device__ __forceinline__ void name(float* d, const void* pa, const void* pb) {                                   \
    uint32_t a[4], b[2], x[4], y[2];                                                                                 \
    memcpy(a, pa, sizeof(a));                                                                                        \
    memcpy(b, pb, sizeof(b));                                                                                        \
    _Pragma("unroll") for (int odd = 0; odd < 2; ++odd) {                                                            \
      _Pragma("unroll") for (int i = 0; i < 4; ++i) x[i] = halves_of_##left(a[i] >> (8 * odd) & 0x00ff00ffu);        \
      _Pragma("unroll") for (int i = 0; i < 2; ++i) y[i] = halves_of_##right(b[i] >> (8 * odd) & 0x00ff00ffu);       \
      mma_m16n8k16_f16(d, x, y);                                                                                     \
    }                                                                                                                \
  }
#endif
TS_MMA_FLOAT8(mma_m16n8k32_e4m3, e4m3, e4m3)
TS_MMA_FLOAT8(mma_m16n8k32_e5m2, e5m2, e5m2)
TS_MMA_FLOAT8(mma_m16n8k32_e4m3_e5m2, e4m3, e5m2)
TS_MMA_FLOAT8(mma_m16n8k32_e5m2_e4m3, e5m2, e4m3)
#undef TS_MMA_FLOAT8

}  // namespace ts
