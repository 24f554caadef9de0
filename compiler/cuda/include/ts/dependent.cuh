// sm_90: launches that begin before the one in front of them on their stream has ended (PTX ISA, "griddepcontrol").
#pragma once

namespace ts {

// Until the launches in front are complete and all that they wrote is visible; global memory is touched behind this alone.
__device__ __forceinline__ void await_launches() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// The launch behind may begin when all blocks of this one have said so, or have ended.
__device__ __forceinline__ void admit_launches() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
// Into the L2 cache, where all accesses meet: it may be asked for what the launches in front still write.
template <int how = 1>
__device__ __forceinline__ void ask(const void* from) {
  const uint64_t at = uint64_t(from);
  if constexpr (how == 0) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
  } else if constexpr (how == 1) {
    if (!(at & 31)) asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
  } else if constexpr (how == 2) {
    if (!(at & 127)) asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
  } else if constexpr (how == 3) {
    if (!(at & 127)) asm volatile("cp.async.bulk.prefetch.L2.global [%0], 128;" ::"l"(from));
  } else {
    const uint64_t first = __shfl_sync(0xffffffff, at, 0);
    const int lane = threadIdx.x & 31;
    if (__all_sync(0xffffffff, at == first + 16 * lane)) {
      if (!lane) asm volatile("cp.async.bulk.prefetch.L2.global [%0], 512;" ::"l"(from));
    } else if (!(at & 31)) {
      asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
    }
  }
}

}  // namespace ts
