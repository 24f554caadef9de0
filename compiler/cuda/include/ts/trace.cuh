// What an instrumented kernel logs: spans of waits, copies and products, for `tilescale trace --target cuda`.
//
// Times are %globaltimer's, in nanoseconds: one counter for all multiprocessors of a GPU, read by one instruction. How far it moves at once
// differs between GPUs (PTX ISA, "Special Registers: %globaltimer"), so the host finds that in the log.
// The log is the process's, in page-locked memory of the host (tilescale/native/gpu_log.c): it can be read behind a kernel that failed. A
// thread that logs takes CHUNK slots at once, and stores into them without waiting. A slot whose end is 0 was never used. Slots are counted in
// the GPU's own memory, which the host need not read: atomic updates of the host's go one after another over PCIe, a microsecond each, so that a
// kernel of 132 blocks took 140 us more (H200).
#pragma once
#include <ts/types.cuh>

namespace ts {

struct Event {
  // amount: bytes of a copy; of a loop the ns for which it waited for stages of rings; of a signal or wait its counter's place
  int64_t begin, end, amount;
  int32_t site, peer, block, thread, kernel, place;  // peer: a rank of the launch, or -1; place: team in the upper half, multiprocessor in the lower
};

// Where a launch logs (as ts_gpu_log in ts_gpu.h).
struct Log {
  Event* events;              // LOG_HEAD bytes in front of them stands how many found no slot
  unsigned long long* taken;  // slots that threads took
  int64_t capacity;
  int32_t kernel, team;
};

enum { CHUNK = 4, LOG_HEAD = 128 };

// In order with every access of memory of this thread, as the compiler sees them.
__device__ __forceinline__ int64_t log_time() {
  int64_t t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t)::"memory");
  return t;
}

// Logs what began at `begin` and ends now. own: the thread's next slot, and how many are left to it.
//
// Order: nobody reads an event before the launch is complete (the host synchronizes), so plain stores are enough. The counters are added to
// by this GPU alone while kernels run.
__device__ __forceinline__ void log_span(const Log& log, int64_t* own, int64_t begin, int site, int thread, int peer, int64_t amount) {
  const int64_t end = log_time();
  if (own[1] == 0) own[0] = int64_t(atomicAdd(log.taken, (unsigned long long)CHUNK)), own[1] = CHUNK;
  --own[1];
  const int64_t slot = own[0]++;
  if (slot >= log.capacity) {
    atomicAdd((unsigned long long*)((char*)log.events - LOG_HEAD), 1ull);
    return;
  }
  int multiprocessor;
  asm("mov.u32 %0, %%smid;" : "=r"(multiprocessor));
  Event* e = log.events + slot;
  e->begin = begin, e->end = end, e->amount = amount;
  e->site = site, e->peer = peer, e->thread = thread, e->kernel = log.kernel;
  e->block = int(blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z));
  e->place = log.team << 16 | multiprocessor;
}

// Copies of one statement in a loop, joined: bytes for each of so many ranks, and behind them when the first was made.
constexpr int JOINED = 64;

__device__ __forceinline__ void log_joins(const Log& log, int64_t* own, int64_t* joined, int site, int thread, int peer, int64_t amount) {
  if (peer < 0 || peer >= JOINED) return log_span(log, own, log_time(), site, thread, peer, amount);
  if (joined[JOINED] == 0) joined[JOINED] = log_time();
  joined[peer] += amount;
}

// Logs them: one span for each rank that bytes went to or came from.
__device__ __forceinline__ void log_joined(const Log& log, int64_t* own, int64_t* joined, int site, int thread) {
  for (int peer = 0; peer < JOINED; ++peer) {
    if (joined[peer] > 0) log_span(log, own, joined[JOINED], site, thread, peer, joined[peer]);
    joined[peer] = 0;
  }
  joined[JOINED] = 0;
}

// Answers the host, which compares its clock with this GPU's: round k begins when the host has written k, and ends when it sees k come back
// beside the time.
//
// Order: the time is stored before the round's number, a release at the scope of the system; the host acquires the number.
struct Rounds {
  int64_t asked, answered, time;
};
extern "C" __global__ void ts_clock(Rounds* rounds, int count, int64_t limit) {
  const int64_t start = log_time();
  for (int64_t k = 1; k <= count; ++k) {
    for (int64_t seen = 0; seen < k;) {
      asm volatile("ld.acquire.sys.global.b64 %0, [%1];" : "=l"(seen) : "l"(&rounds->asked) : "memory");
      if (log_time() - start > limit) return;
    }
    rounds->time = log_time();
    asm volatile("st.release.sys.global.b64 [%0], %1;" ::"l"(&rounds->answered), "l"(k) : "memory");
  }
}

}  // namespace ts
