// sm_90: boxes of shared memory combined with what lies in a tensor (PTX ISA, "cp.reduce.async.bulk.tensor"). Element by element atomic,
// relaxed at the scope of the GPU.
#pragma once
#include <ts/hopper.cuh>

namespace ts {

#define TS_TMA_REDUCE(kind)                                                                                                      \
  __device__ __forceinline__ void tma_reduce_##kind(const TensorMap& map, const void* from, int x) {                             \
    asm volatile("cp.reduce.async.bulk.tensor.1d.global.shared::cta." #kind ".bulk_group [%0, {%2}], [%1];"                      \
                 ::"l"(&map), "r"(shared_address(from)), "r"(x) : "memory");                                                     \
  }                                                                                                                              \
  __device__ __forceinline__ void tma_reduce_##kind(const TensorMap& map, const void* from, int x, int y) {                      \
    asm volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta." #kind ".bulk_group [%0, {%2, %3}], [%1];"                  \
                 ::"l"(&map), "r"(shared_address(from)), "r"(x), "r"(y) : "memory");                                             \
  }                                                                                                                              \
  __device__ __forceinline__ void tma_reduce_##kind(const TensorMap& map, const void* from, int x, int y, int z) {               \
    asm volatile("cp.reduce.async.bulk.tensor.3d.global.shared::cta." #kind ".bulk_group [%0, {%2, %3, %4}], [%1];"              \
                 ::"l"(&map), "r"(shared_address(from)), "r"(x), "r"(y), "r"(z) : "memory");                                     \
  }                                                                                                                              \
  __device__ __forceinline__ void tma_reduce_##kind(const TensorMap& map, const void* from, int x, int y, int z, int w) {        \
    asm volatile("cp.reduce.async.bulk.tensor.4d.global.shared::cta." #kind ".bulk_group [%0, {%2, %3, %4, %5}], [%1];"          \
                 ::"l"(&map), "r"(shared_address(from)), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");                             \
  }                                                                                                                              \
  __device__ __forceinline__ void tma_reduce_##kind(const TensorMap& map, const void* from, int x, int y, int z, int w, int v) { \
    asm volatile("cp.reduce.async.bulk.tensor.5d.global.shared::cta." #kind ".bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];"      \
                 ::"l"(&map), "r"(shared_address(from)), "r"(x), "r"(y), "r"(z), "r"(w), "r"(v) : "memory");                     \
  }
TS_TMA_REDUCE(add)
TS_TMA_REDUCE(min)
TS_TMA_REDUCE(max)
#undef TS_TMA_REDUCE

}  // namespace ts
