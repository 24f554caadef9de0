// sm_90a: barriers with transactions, tensor copies, products of a warpgroup.
#pragma once
#include <ts/types.cuh>

namespace ts {

__device__ __forceinline__ uint32_t shared_address(const void* p) { return uint32_t(__cvta_generic_to_shared(p)); }

// PTX ISA, "mbarrier.init": the phase ends with the `count`th arrival.
__device__ __forceinline__ void mbarrier_init(uint64_t* barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count) : "memory");
}
// What was initialised is visible to the asynchronous proxy and to the cluster.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// Arrives; the phase also waits for `bytes` that copies will bring.
__device__ __forceinline__ void mbarrier_expect(uint64_t* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}
// One arrival of this thread (release).
__device__ __forceinline__ void mbarrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
// The same at this barrier of another block of the cluster, for threads of which it releases (PTX ISA, "mbarrier.arrive", "mapa").
__device__ __forceinline__ void mbarrier_arrive_at(uint64_t* barrier, int block) {
  asm volatile("{ .reg .b32 a; mapa.shared::cluster.u32 a, %0, %1; mbarrier.arrive.release.cluster.shared::cluster.b64 _, [a]; }" ::"r"(
                   shared_address(barrier)),
               "r"(block)
               : "memory");
}
// The phase also waits for `bytes`; this thread arrives behind it.
__device__ __forceinline__ void mbarrier_expect_tx(uint64_t* barrier, int bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}
// Waits until the phase of this parity is over (acquire). The loop is PTX's own: one that the compiler sees, between products that are
// under way, makes ptxas await each of them (warning C7514).
__device__ __forceinline__ void mbarrier_wait(uint64_t* barrier, int parity) {
  asm volatile("{ .reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @p bra done; bra again; done: }" ::"r"(
                   shared_address(barrier)),
               "r"(parity)
               : "memory");
}
// The same where threads of other blocks of the cluster have arrived: acquires what they released.
__device__ __forceinline__ void mbarrier_wait_cluster(uint64_t* barrier, int parity) {
  asm volatile("{ .reg .pred p; again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], %1; @p bra done; bra again; done: }" ::"r"(
                   shared_address(barrier)),
               "r"(parity)
               : "memory");
}
// One arrival for the warp (release), behind what all of its lanes did, where `when` holds: a predicate and no branch, as above.
__device__ __forceinline__ void mbarrier_arrive_warp(uint64_t* barrier, int when) {
  __syncwarp();
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %1, 0; @p mbarrier.arrive.shared::cta.b64 _, [%0]; }" ::"r"(shared_address(barrier)),
               "r"(threadIdx.x % 32 == 0 ? when : 0)
               : "memory");
}
// One arrival for the warp at this barrier of each of `blocks` blocks of the cluster, whose ranks are the first lanes' `block`. The
// arrival releases at the scope of the block alone: no MEMBAR (compiler/cuda/rings.py says why that is enough).
template <int blocks>
__device__ __forceinline__ void mbarrier_arrive_blocks(uint64_t* barrier, int block, int when) {
  __syncwarp();
  asm volatile("{ .reg .pred p; .reg .b32 a; setp.ne.b32 p, %2, 0; @p mapa.shared::cluster.u32 a, %0, %1; "
               "@p mbarrier.arrive.shared::cluster.b64 _, [a]; }" ::"r"(shared_address(barrier)),
               "r"(block), "r"(threadIdx.x % 32 < blocks ? when : 0)
               : "memory");
}
// PTX ISA, "prefetch.tensormap": the copies that name the map later find it in the cache.
__device__ __forceinline__ void prefetch_map(const TensorMap& map) { asm volatile("prefetch.tensormap [%0];" ::"l"(&map)); }
// PTX ISA, "cp.async.bulk.tensor": the box whose first element has these coordinates, the innermost first.
__device__ __forceinline__ void tma_load(void* to, const TensorMap& map, uint64_t* barrier, int x) {
  asm volatile("cp.async.bulk.tensor.1d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3}], [%2];" ::"r"(
                   shared_address(to)),
               "l"(&map), "r"(shared_address(barrier)), "r"(x)
               : "memory");
}
__device__ __forceinline__ void tma_load(void* to, const TensorMap& map, uint64_t* barrier, int x, int y) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
                   shared_address(to)),
               "l"(&map), "r"(shared_address(barrier)), "r"(x), "r"(y)
               : "memory");
}
__device__ __forceinline__ void tma_load(void* to, const TensorMap& map, uint64_t* barrier, int x, int y, int z) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(
                   shared_address(to)),
               "l"(&map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z)
               : "memory");
}
__device__ __forceinline__ void tma_load(void* to, const TensorMap& map, uint64_t* barrier, int x, int y, int z, int w) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(
                   shared_address(to)),
               "l"(&map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z), "r"(w)
               : "memory");
}
__device__ __forceinline__ void tma_load(void* to, const TensorMap& map, uint64_t* barrier, int x, int y, int z, int w, int v) {
  asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(
                   shared_address(to)),
               "l"(&map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z), "r"(w), "r"(v)
               : "memory");
}
// The same box into each block of the cluster that `blocks` has a bit for, at the same place; each one's `barrier` counts the bytes.
__device__ __forceinline__ void tma_load_multicast(void* to, const TensorMap& map, uint64_t* barrier, int blocks, int x) {
  asm volatile("cp.async.bulk.tensor.1d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%4}], [%2], %3;" ::"r"(
                   shared_address(to)),
               "l"(&map), "r"(shared_address(barrier)), "h"(uint16_t(blocks)), "r"(x)
               : "memory");
}
__device__ __forceinline__ void tma_load_multicast(void* to, const TensorMap& map, uint64_t* barrier, int blocks, int x, int y) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%4, %5}], [%2], %3;" ::"r"(
                   shared_address(to)),
               "l"(&map), "r"(shared_address(barrier)), "h"(uint16_t(blocks)), "r"(x), "r"(y)
               : "memory");
}
__device__ __forceinline__ void tma_load_multicast(void* to, const TensorMap& map, uint64_t* barrier, int blocks, int x, int y, int z) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%4, %5, %6}], [%2], %3;" ::"r"(
                   shared_address(to)),
               "l"(&map), "r"(shared_address(barrier)), "h"(uint16_t(blocks)), "r"(x), "r"(y), "r"(z)
               : "memory");
}
__device__ __forceinline__ void tma_load_multicast(void* to, const TensorMap& map, uint64_t* barrier, int blocks, int x, int y, int z, int w) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%4, %5, %6, %7}], [%2], %3;" ::"r"(
                   shared_address(to)),
               "l"(&map), "r"(shared_address(barrier)), "h"(uint16_t(blocks)), "r"(x), "r"(y), "r"(z), "r"(w)
               : "memory");
}
__device__ __forceinline__ void tma_load_multicast(void* to, const TensorMap& map, uint64_t* barrier, int blocks, int x, int y, int z, int w, int v) {
  asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%4, %5, %6, %7, %8}], [%2], %3;" ::"r"(
                   shared_address(to)),
               "l"(&map), "r"(shared_address(barrier)), "h"(uint16_t(blocks)), "r"(x), "r"(y), "r"(z), "r"(w), "r"(v)
               : "memory");
}

// PTX ISA, "cp.async.bulk.tensor": the box whose first element has these coordinates, from shared memory to the tensor; what lies outside it
// is dropped.
__device__ __forceinline__ void tma_store(const TensorMap& map, const void* from, int x) {
  asm volatile("cp.async.bulk.tensor.1d.global.shared::cta.bulk_group [%0, {%2}], [%1];" ::"l"(&map), "r"(shared_address(from)), "r"(x)
               : "memory");
}
__device__ __forceinline__ void tma_store(const TensorMap& map, const void* from, int x, int y) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(&map), "r"(shared_address(from)), "r"(x),
               "r"(y)
               : "memory");
}
__device__ __forceinline__ void tma_store(const TensorMap& map, const void* from, int x, int y, int z) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(&map), "r"(shared_address(from)),
               "r"(x), "r"(y), "r"(z)
               : "memory");
}
__device__ __forceinline__ void tma_store(const TensorMap& map, const void* from, int x, int y, int z, int w) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map),
               "r"(shared_address(from)), "r"(x), "r"(y), "r"(z), "r"(w)
               : "memory");
}
__device__ __forceinline__ void tma_store(const TensorMap& map, const void* from, int x, int y, int z, int w, int v) {
  asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(&map),
               "r"(shared_address(from)), "r"(x), "r"(y), "r"(z), "r"(w), "r"(v)
               : "memory");
}
// The stores that this thread started are one group.
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// All but the last `pending` groups of this thread have read what they store; the memory may be written again.
template <int pending>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(pending) : "memory");
}
// All but the last `pending` are complete.
template <int pending>
__device__ __forceinline__ void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(pending) : "memory");
}
// What this thread wrote to shared memory is there for TMA and wgmma (PTX ISA, "Async proxy").
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// What this thread wrote to global memory comes before what TMA stores there later.
__device__ __forceinline__ void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// PTX ISA, "setmaxnreg": registers of each thread of the warpgroup from here on.
template <int count>
__device__ __forceinline__ void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count));
}
template <int count>
__device__ __forceinline__ void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count));
}

// PTX ISA, "Matrix Descriptor Format" of wgmma: rows of `swizzle` bytes in groups of eight; `leading` bytes between boxes.
// In a cluster addresses carry the block's rank above their low 24 bits, which are not the descriptor's.
template <int swizzle>
__device__ __forceinline__ uint64_t matrix_descriptor(const void* start, int leading) {
  constexpr uint64_t mode = swizzle == 128 ? 1 : swizzle == 64 ? 2 : 3;
  return uint64_t((shared_address(start) & 0x3ffff) >> 4) | uint64_t(leading >> 4) << 16 | uint64_t(8 * swizzle >> 4) << 32 | mode << 62;
}
// The same, computed where it stands: tiles at fixed places have descriptors that no round of a loop changes, which the
// compiler would compute in front of it for all products, and keep in more registers than there are.
template <int swizzle>
__device__ __forceinline__ uint64_t descriptor_here(const void* start, int leading) {
  uint64_t made = matrix_descriptor<swizzle>(start, leading);
  asm volatile("" : "+l"(made));
  return made;
}
// What the threads wrote to registers is there for the products behind this.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Ends a basic block, across which ptxas moves no arithmetic: the loop ends at once unless the clock shows one value of 2^32.
__device__ __forceinline__ void block_ends() {
  asm volatile("{ .reg .pred p; .reg .b32 t; again: mov.u32 t, %%clock; setp.eq.u32 p, t, 0xffffffff; @p bra again; }" ::"n"(0) : "memory");
}
// All but the last `pending` groups of products are complete. A block ends there: ptxas 13.0 moves reads of accumulators out of branches (of guarded stores, say) in front of the wait when they
// all stand in one. Not where what follows reads them in no branch.
template <int pending, bool apart = pending == 0>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
  if (apart) block_ends();
}
// Keeps the wait that follows behind the computation of `value`: ptxas moves it up across arithmetic, which should run beside the products.
// It does not move it across a load of shared memory, even one that is made only where `value` is a certain NaN, and then changes nothing.
__device__ __forceinline__ void wgmma_behind(const float* value, const void* shared) {
  asm volatile("{ .reg .pred p; .reg .b32 t; setp.eq.b32 p, %0, 0x7fd15ea5; @p ld.volatile.shared.b32 t, [%1]; }" ::"r"(__float_as_int(*value)),
               "r"(shared_address(shared))
               : "memory");
}
// Behind a wait: the compiler may not have read these accumulators before, nor have put anything else into a left operand's registers.
template <int count>
__device__ __forceinline__ void wgmma_arrived(float* d) {
#pragma unroll
  for (int i = 0; i < count; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
template <int count>
__device__ __forceinline__ void wgmma_arrived(int* d) {
#pragma unroll
  for (int i = 0; i < count; ++i) asm volatile("" : "+r"(d[i])::"memory");
}
template <int count, typename T>
__device__ __forceinline__ void wgmma_arrived(T* a) {
#pragma unroll
  for (int i = 0; i < count; i += 4 / int(sizeof(T))) {
    uint32_t r;
    memcpy(&r, a + i, sizeof(r));
    asm volatile("" ::"r"(r) : "memory");
  }
}
// Behind a wait: products have read these registers until here. ptxas must see an instruction that has them, or it puts something else
// there; this one loads nothing, since no places have all bits.
template <int count>
__device__ __forceinline__ void wgmma_read(const uint32_t* places, const void* shared) {
  uint32_t all = places[0];
#pragma unroll
  for (int i = 1; i < count; ++i) asm volatile("and.b32 %0, %0, %1;" : "+r"(all) : "r"(places[i]) : "memory");
  asm volatile("{ .reg .pred p; .reg .b32 t; setp.eq.b32 p, %0, 0xffffffff; @p ld.volatile.shared.b32 t, [%1]; }" ::"r"(all),
               "r"(shared_address(shared))
               : "memory");
}
// Arrives at a named barrier of `threads` threads without waiting for them.
__device__ __forceinline__ void barrier_arrive(int number, int threads) {
  asm volatile("barrier.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

}  // namespace ts
