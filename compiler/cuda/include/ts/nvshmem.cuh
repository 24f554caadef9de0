// Ranks whose memory this GPU cannot address: what reaches them are calls of NVSHMEM (include/nvshmem/wrappers.cu).
//
// A far address stands for such a rank's memory: the address of the own twin, and above bit 56 one more than the number of the
// rank's PE. The host puts them into Team::base (tilescale/native/gpu_team.c), so arithmetic on addresses is what it is for
// peers that are addressed. No GPU address has these bits: a far address that is dereferenced by mistake faults.
//
// Order. A put is complete at its rank behind nvshmem_quiet, which each thread that may have issued some calls in front of the barrier that
// ends a copy (compiler/gpu/unaddressed.py). So a block has no put under way when one of its threads releases: a signal by the library's atomic
// set or add follows it, and whoever acquires the signal's word, by ld.acquire.sys on memory of its own, sees the data: they came before the word
// did. What the block stored by itself, which a rank may get behind the signal, the signalling thread's fence makes visible to the system: it is
// cumulative over what the barrier in front has handed to it. NVSHMEM's own look at the word (nvshmem_signal_wait_until, behind ours, so
// that it returns at once) does what the network needs besides, for data that it wrote to be seen.
#pragma once
#include <ts/types.cuh>

extern "C" {
__device__ void ts_nvshmem_put(void* to, const void* from, uint64_t bytes, int pe);  // by a warp, non-blocking
__device__ void ts_nvshmem_get(void* to, const void* from, uint64_t bytes, int pe);  // by a warp, blocking
__device__ void ts_nvshmem_quiet();                                                  // by a thread
__device__ void ts_nvshmem_set(uint64_t* at, uint64_t value, int pe);                // by a thread, atomic among signals
__device__ void ts_nvshmem_add(uint64_t* at, uint64_t value, int pe);
__device__ void ts_nvshmem_seen(uint64_t* at);                                       // what the own word has told is there
}

namespace ts {

constexpr int FAR = 56;  // the lowest bit of a far address's number

__device__ __forceinline__ int pe_of(const void* p) { return int(uint64_t(p) >> FAR) - 1; }  // -1: an address of this GPU's
template <typename T>
__device__ __forceinline__ T* near_of(T* p) {
  return (T*)(uint64_t(p) & ((1ull << FAR) - 1));
}

__device__ __forceinline__ void far_set(int64_t* at, int64_t value) {
  __threadfence_system();
  ts_nvshmem_set((uint64_t*)near_of(at), uint64_t(value), pe_of(at));
}
__device__ __forceinline__ void far_add(int64_t* at, int64_t value) {
  __threadfence_system();
  ts_nvshmem_add((uint64_t*)near_of(at), uint64_t(value), pe_of(at));
}

// What a thread stored into scratch is there for the network behind this and a barrier.
__device__ __forceinline__ void nvshmem_staged() { __threadfence_system(); }
__device__ __forceinline__ void nvshmem_quiet() { ts_nvshmem_quiet(); }

// Row `row` of a tile, by one warp of those of `threads` threads; the own rank's by plain stores.
template <typename T>
__device__ __forceinline__ void nvshmem_put(T* to, const T* from, int64_t bytes, int row, int thread, int threads) {
  if (bytes <= 0 || row % (threads / 32) != thread / 32) return;
  if (pe_of(to) >= 0) ts_nvshmem_put(near_of(to), from, uint64_t(bytes), pe_of(to));
  else
    for (int64_t i = thread % 32; i < bytes; i += 32) ((uint8_t*)to)[i] = ((const uint8_t*)from)[i];
}
template <typename T>
__device__ __forceinline__ void nvshmem_get(T* to, const T* from, int64_t bytes, int row, int thread, int threads) {
  if (bytes <= 0 || row % (threads / 32) != thread / 32) return;
  if (pe_of(from) >= 0) ts_nvshmem_get(to, near_of(from), uint64_t(bytes), pe_of(from));
  else
    for (int64_t i = thread % 32; i < bytes; i += 32) ((uint8_t*)to)[i] = ((const uint8_t*)from)[i];
}

}  // namespace ts
