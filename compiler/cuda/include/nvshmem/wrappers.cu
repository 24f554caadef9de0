// NVSHMEM's device calls under C names, compiled once and linked to kernels that declare them (include/ts/nvshmem.cuh): a kernel
// needs none of NVSHMEM's headers, which take seconds.
#include <nvshmem.h>
#include <nvshmemx.h>

extern "C" {
__device__ void ts_nvshmem_put(void* to, const void* from, uint64_t bytes, int pe) { nvshmemx_putmem_nbi_warp(to, from, bytes, pe); }
__device__ void ts_nvshmem_get(void* to, const void* from, uint64_t bytes, int pe) { nvshmemx_getmem_warp(to, from, bytes, pe); }
__device__ void ts_nvshmem_put_one(void* to, const void* from, uint64_t bytes, int pe) { nvshmem_putmem_nbi(to, from, bytes, pe); }
__device__ void ts_nvshmem_get_one(void* to, const void* from, uint64_t bytes, int pe) { nvshmem_getmem(to, from, bytes, pe); }
__device__ void ts_nvshmem_quiet() { nvshmem_quiet(); }
__device__ void ts_nvshmem_set(uint64_t* at, uint64_t value, int pe) { nvshmemx_signal_op(at, value, NVSHMEM_SIGNAL_SET, pe); }
__device__ void ts_nvshmem_add(uint64_t* at, uint64_t value, int pe) { nvshmemx_signal_op(at, value, NVSHMEM_SIGNAL_ADD, pe); }
__device__ uint32_t ts_nvshmem_swap32(uint32_t* at, uint32_t seen, uint32_t next, int pe) {
  return nvshmem_uint32_atomic_compare_swap(at, seen, next, pe);
}
__device__ uint64_t ts_nvshmem_swap64(uint64_t* at, uint64_t seen, uint64_t next, int pe) {
  return nvshmem_uint64_atomic_compare_swap(at, seen, next, pe);
}
__device__ uint32_t ts_nvshmem_load32(const uint32_t* at, int pe) { return nvshmem_uint32_atomic_fetch(at, pe); }
__device__ uint64_t ts_nvshmem_load64(const uint64_t* at, int pe) { return nvshmem_uint64_atomic_fetch(at, pe); }
// Holds at once: what a wait does behind its comparison is what is wanted. A counter does not reach the complement of itself.
__device__ void ts_nvshmem_seen(uint64_t* at) { nvshmem_signal_wait_until(at, NVSHMEM_CMP_NE, ~*(volatile uint64_t*)at); }
}
