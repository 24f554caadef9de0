// sm_80: copies from global to shared memory that run beside the threads.
#pragma once
#include <ts/types.cuh>

namespace ts {

// PTX ISA, "cp.async": `bytes` from global to shared memory, both aligned to them. 16 pass by the L1 cache.
template <int bytes>
__device__ __forceinline__ void cp_async(void* to, const void* from) {
  const uint32_t at = uint32_t(__cvta_generic_to_shared(to));
  if constexpr (bytes == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at), "l"(from) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(at), "l"(from), "n"(bytes) : "memory");
}
// Only the first `size` of them are read, the others arrive as zeros.
template <int bytes>
__device__ __forceinline__ void cp_async(void* to, const void* from, int size) {
  const uint32_t at = uint32_t(__cvta_generic_to_shared(to));
  if constexpr (bytes == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(from), "r"(size) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(at), "l"(from), "n"(bytes), "r"(size) : "memory");
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// All but the last `pending` groups of this thread have arrived.
template <int pending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

// This thread arrives at the barrier, which counts it, when its copies have arrived (PTX ISA, "cp.async.mbarrier.arrive").
__device__ __forceinline__ void cp_async_arrive(uint64_t* barrier) {
  const uint32_t at = uint32_t(__cvta_generic_to_shared(barrier));
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(at) : "memory");
}

}  // namespace ts
