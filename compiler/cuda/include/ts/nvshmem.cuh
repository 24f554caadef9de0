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
__device__ void ts_nvshmem_put_one(void* to, const void* from, uint64_t bytes, int pe);  // by a thread, non-blocking
__device__ void ts_nvshmem_get_one(void* to, const void* from, uint64_t bytes, int pe);  // by a thread, blocking
__device__ void ts_nvshmem_quiet();                                                  // by a thread
__device__ void ts_nvshmem_set(uint64_t* at, uint64_t value, int pe);                // by a thread, atomic among signals
__device__ void ts_nvshmem_add(uint64_t* at, uint64_t value, int pe);
__device__ void ts_nvshmem_seen(uint64_t* at);                                       // what the own word has told is there
__device__ uint32_t ts_nvshmem_swap32(uint32_t* at, uint32_t seen, uint32_t next, int pe);  // atomics, by a thread
__device__ uint64_t ts_nvshmem_swap64(uint64_t* at, uint64_t seen, uint64_t next, int pe);
__device__ uint32_t ts_nvshmem_load32(const uint32_t* at, int pe);
__device__ uint64_t ts_nvshmem_load64(const uint64_t* at, int pe);
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

// Words of such ranks are compared and swapped by the library, of 16 bits within the 32 around them. The fences make that a release and an
// acquire at the scope of the system: the library orders an atomic update against nothing, but it is issued behind the first fence and has
// returned in front of the second, and a block has no put under way then.
template <typename Word>
__device__ __forceinline__ Word far_look(const Word* at) {
  const int pe = pe_of(at);
  if constexpr (sizeof(Word) == 8) {
    return Word(ts_nvshmem_load64((const uint64_t*)near_of(at), pe));
  } else {
    const uint64_t place = uint64_t(near_of(at));
    return Word(ts_nvshmem_load32((const uint32_t*)(place & ~3ull), pe) >> (sizeof(Word) == 2 ? (place & 2) * 8 : 0));
  }
}
template <typename Word>
__device__ __forceinline__ Word far_swap(Word* at, Word seen, Word next) {
  const int pe = pe_of(at);
  const uint64_t place = uint64_t(near_of(at));
  __threadfence_system();
  Word found;
  if constexpr (sizeof(Word) == 8) {
    found = Word(ts_nvshmem_swap64((uint64_t*)place, seen, next, pe));
  } else if constexpr (sizeof(Word) == 4) {
    found = Word(ts_nvshmem_swap32((uint32_t*)place, seen, next, pe));
  } else {
    uint32_t* word = (uint32_t*)(place & ~3ull);
    const int shift = int(place & 2) * 8;
    uint32_t whole = ts_nvshmem_load32(word, pe);
    while (true) {
      found = Word(whole >> shift);
      if (found != seen) break;
      const uint32_t now = ts_nvshmem_swap32(word, whole, (whole & ~(0xffffu << shift)) | uint32_t(next) << shift, pe);
      if (now == whole) break;
      whole = now;
    }
  }
  __threadfence_system();
  return found;
}
__device__ __forceinline__ void far_max(int64_t* at, int64_t value) {
  for (int64_t seen = far_look(at), found; seen < value && (found = far_swap(at, seen, value)) != seen; seen = found);
}
__device__ __forceinline__ void far_min(int64_t* at, int64_t value) {
  for (int64_t seen = far_look(at), found; seen > value && (found = far_swap(at, seen, value)) != seen; seen = found);
}

// What a thread stored into scratch is there for the network behind this and a barrier.
__device__ __forceinline__ void nvshmem_staged() { __threadfence_system(); }
__device__ __forceinline__ void nvshmem_quiet() { ts_nvshmem_quiet(); }

// Row `row` of a tile, by one warp of those of `threads` threads, or by the only thread; the own rank's by plain stores.
template <typename T>
__device__ __forceinline__ void nvshmem_put(T* to, const T* from, int64_t bytes, int row, int thread, int threads) {
  if (threads == 1) {
    if (bytes > 0 && pe_of(to) >= 0) ts_nvshmem_put_one(near_of(to), from, uint64_t(bytes), pe_of(to));
    else
      for (int64_t i = 0; i < bytes; ++i) ((uint8_t*)to)[i] = ((const uint8_t*)from)[i];
    return;
  }
  if (bytes <= 0 || row % (threads / 32) != thread / 32) return;
  if (pe_of(to) >= 0) ts_nvshmem_put(near_of(to), from, uint64_t(bytes), pe_of(to));
  else
    for (int64_t i = thread % 32; i < bytes; i += 32) ((uint8_t*)to)[i] = ((const uint8_t*)from)[i];
}
template <typename T>
__device__ __forceinline__ void nvshmem_get(T* to, const T* from, int64_t bytes, int row, int thread, int threads) {
  if (threads == 1) {
    if (bytes > 0 && pe_of(from) >= 0) ts_nvshmem_get_one(to, near_of(from), uint64_t(bytes), pe_of(from));
    else
      for (int64_t i = 0; i < bytes; ++i) ((uint8_t*)to)[i] = ((const uint8_t*)from)[i];
    return;
  }
  if (bytes <= 0 || row % (threads / 32) != thread / 32) return;
  if (pe_of(from) >= 0) ts_nvshmem_get(to, near_of(from), uint64_t(bytes), pe_of(from));
  else
    for (int64_t i = thread % 32; i < bytes; i += 32) ((uint8_t*)to)[i] = ((const uint8_t*)from)[i];
}

}  // namespace ts
