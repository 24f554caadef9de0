// Blocks of a cluster and executors of a block: meetings, each other's shared memory, counters in it.
#pragma once
#include <ts/types.cuh>

namespace ts {

// All threads of all blocks of the cluster meet; what each wrote before is there for all (PTX ISA, "barrier.cluster").
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}
// Its two halves.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
__device__ __forceinline__ void cluster_arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }
// The same behind `fence_mbarrier_init`, which has released what there is (PTX ISA, "fence.mbarrier_init").
__device__ __forceinline__ void cluster_begins() {
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

// The same place of another block's shared memory, as an address for plain accesses (PTX ISA, "mapa").
template <typename T>
__device__ __forceinline__ T* cluster_address(T* p, int block) {
  T* there;
  asm("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(p), "r"(block));
  return there;
}

// Counters in shared memory, of this block or (`cluster`) of any block of the cluster. Additions release, and go on with the release
// sequence of those before; a wait acquires what it sees. One thread does it for its executor, which meets before or behind.
#define TS_SHARED_SIGNAL(name, op)                                                                             \
  template <bool cluster>                                                                                      \
  __device__ __forceinline__ void shared_signal_##name(int64_t* at, int64_t value) {                           \
    if constexpr (cluster) asm volatile("red.release.cluster." op " [%0], %1;" ::"l"(at), "l"(value) : "memory"); \
    else asm volatile("red.release.cta." op " [%0], %1;" ::"l"(at), "l"(value) : "memory");                    \
  }
TS_SHARED_SIGNAL(add, "add.u64")
TS_SHARED_SIGNAL(max, "max.s64")
TS_SHARED_SIGNAL(min, "min.s64")
#undef TS_SHARED_SIGNAL
template <bool cluster>
__device__ __forceinline__ void shared_signal_set(int64_t* at, int64_t value) {
  if constexpr (cluster) asm volatile("st.release.cluster.b64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
  else asm volatile("st.release.cta.b64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}
// A look, as `shared_wait` makes many.
template <bool cluster>
__device__ __forceinline__ int shared_test(const int64_t* at, int64_t value, int compare) {
  int64_t seen;
  if constexpr (cluster) asm volatile("ld.acquire.cluster.b64 %0, [%1];" : "=l"(seen) : "l"(at) : "memory");
  else asm volatile("ld.acquire.cta.b64 %0, [%1];" : "=l"(seen) : "l"(at) : "memory");
  return compare == 0 ? seen >= value : compare == 1 ? seen == value : compare == 2 ? seen > value : compare == 3 ? seen != value
         : compare == 4 ? seen <= value : seen < value;
}
// Until the counter compares with `value`: 0 ge, 1 eq, 2 gt, 3 ne, 4 le, 5 lt. False: it did not within the limit, ns, which stands in the
// host's memory behind what `fail` writes and is read when a wait takes long.
template <bool cluster>
__device__ __forceinline__ bool shared_wait(const int64_t* at, int64_t value, int compare, const int64_t* record) {
  uint64_t start, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
  for (int round = 1;; ++round) {
    int64_t seen;
    if constexpr (cluster) asm volatile("ld.acquire.cluster.b64 %0, [%1];" : "=l"(seen) : "l"(at) : "memory");
    else asm volatile("ld.acquire.cta.b64 %0, [%1];" : "=l"(seen) : "l"(at) : "memory");
    if (compare == 0 ? seen >= value : compare == 1 ? seen == value : compare == 2 ? seen > value : compare == 3 ? seen != value
        : compare == 4 ? seen <= value : seen < value) return true;
    if (round % 4096 == 0) {
      asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
      if (now - start > uint64_t(record[2])) return false;
    }
  }
}

}  // namespace ts
