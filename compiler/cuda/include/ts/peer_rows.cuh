// sm_90: rows of shared memory that TMA stores in another rank's memory (PTX ISA, "cp.async.bulk"), or adds to it ("cp.reduce.async.bulk":
// element by element atomic, relaxed at the scope of the GPU that adds).
//
// Who sees what: the threads that wrote the rows have fenced and met the threads that call this, and so has the thread that acquired what
// other ranks did there before; these fence global memory before TMA writes or adds. Each waits until its own rows are complete: that makes
// them visible to it ("cp.async.bulk.wait_group"), and the fence behind orders them before what it does next. So a signal that follows a
// barrier of these threads releases them, as it does what threads store. Of rows that go on meanwhile (ROWS_READ, ROWS_BEGUN) the same holds
// behind `rows_complete`, which each thread calls that started some.
#pragma once
#include <ts/hopper.cuh>

namespace ts {

// Where a call ends: rows are complete; TMA has read them; TMA has been told, and a group is closed elsewhere.
constexpr int ROWS_COMPLETE = 0, ROWS_READ = 1, ROWS_BEGUN = 2;

// All groups of rows of this thread are complete, and come before what it does next.
__device__ __forceinline__ void rows_complete() {
  bulk_wait<0>();
  fence_proxy_async_global();
}

// `rows` rows of `count` elements, each a multiple of 16 bytes, by `threads` threads of which this is number `thread`; `count` neighbours, by
// one of them. Pitches count elements.
#define TS_PEER_ROWS(rows_name, run_name, instruction)                                                                         \
  template <int threads, int ends = ROWS_COMPLETE, typename T>                                                                 \
  __device__ __forceinline__ void rows_name(T* to, const T* from, int rows, int count, int64_t to_pitch,                       \
                                                       int64_t from_pitch, int thread) {                                       \
    if (thread >= rows || count <= 0) return;                                                                                  \
    fence_proxy_async_global();                                                                                                \
    _Pragma("unroll 1") for (int row = thread; row < rows; row += threads) {                                                   \
      asm volatile(instruction " [%0], [%1], %2;"                                                                              \
                   ::"l"(__cvta_generic_to_global(to + row * to_pitch)), "r"(shared_address(from + row * from_pitch)),         \
                   "r"(count * int(sizeof(T))) : "memory");                                                                    \
    }                                                                                                                          \
    if constexpr (ends == ROWS_BEGUN) return;                                                                                  \
    bulk_commit();                                                                                                             \
    if constexpr (ends == ROWS_READ) bulk_wait_read<0>();                                                                      \
    else rows_complete();                                                                                                      \
  }                                                                                                                            \
  template <int threads, int ends = ROWS_COMPLETE, typename T>                                                                 \
  __device__ __forceinline__ void run_name(T* to, const T* from, int count, int thread) {                                      \
    rows_name<threads, ends>(to, from, 1, count, 0, 0, thread);                                                                \
  }
#define TS_ADD_ROWS(dtype, kind)                                                                                               \
  TS_PEER_ROWS(add_rows_##dtype, add_run_##dtype, "cp.reduce.async.bulk.global.shared::cta.bulk_group.add." kind)
TS_PEER_ROWS(store_rows, store_run, "cp.async.bulk.global.shared::cta.bulk_group")
TS_ADD_ROWS(float16, "noftz.f16")
TS_ADD_ROWS(bfloat16, "noftz.bf16")
TS_ADD_ROWS(float32, "f32")
TS_ADD_ROWS(float64, "f64")
TS_ADD_ROWS(int32, "s32")
TS_ADD_ROWS(uint32, "u32")
TS_ADD_ROWS(uint64, "u64")
#undef TS_ADD_ROWS
#undef TS_PEER_ROWS

}  // namespace ts
