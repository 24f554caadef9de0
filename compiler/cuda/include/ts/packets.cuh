// Packets between ranks (tilescale/packets.py): 16 bytes, twice four of data and the launch's number; those of dense boxes at the end.
//
// Each half of a packet is one 64-bit access: a vector access is as many scalar ones in any order, each of which is whole (PTX ISA, "Memory
// Consistency Model", "Vector Data-types"). So whoever sees the number of this launch has the data beside it. Nothing else is ordered: all
// accesses are relaxed, at the scope of the system.
#pragma once
#include <ts/team.cuh>

namespace ts {

// The number of this launch among those that use the box, from 1. Its blocks count themselves in the lower half of the word, and the last one
// changes the upper half, so it stands still until every thread of every block has read it.
__device__ __forceinline__ int launch_of_packets(const int64_t* box) {
  int64_t seen;
  asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];" : "=l"(seen) : "l"(box) : "memory");
  return int(seen >> 32) + 1;
}

// A block has ended: by one thread, behind a barrier of all. The first block adds what lets the lower half be zero behind the last.
__device__ __forceinline__ void count_packets(int64_t* box) {
  const int64_t others = int64_t(gridDim.x) * gridDim.y * gridDim.z - 1;
  const int64_t mine = blockIdx.x == 0 && blockIdx.y == 0 && blockIdx.z == 0 ? (1ll << 32) - others : 1;
  asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(box), "l"(mine) : "memory");
}

__device__ __forceinline__ void put_packet(int64_t* to, int64_t data, int number) {
  const uint64_t mark = uint64_t(uint32_t(number)) << 32, low = uint32_t(data) | mark, high = uint64_t(data) >> 32 | mark;
#ifdef TS_NVSHMEM
  // Two signals, each whole by the library's word (a put's bytes may come in any pieces): each half bears its own mark.
  if (pe_of(to) >= 0) return far_set(to, int64_t(low)), far_set(to + 1, int64_t(high));
#endif
  asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1, %2};" ::"l"(to), "l"(low), "l"(high) : "memory");
}

__device__ __forceinline__ bool look_at_packet(const int64_t* at, int number, uint64_t& low, uint64_t& high) {
  asm volatile("ld.relaxed.sys.global.v2.b64 {%0, %1}, [%2];" : "=l"(low), "=l"(high) : "l"(at) : "memory");
  return int(low >> 32) == number && int(high >> 32) == number;
}

__device__ __forceinline__ int64_t data_of_packet(uint64_t low, uint64_t high) { return int64_t(high << 32 | uint32_t(low)); }

// Whether to look no more: waits are void, or packets have not come in the time that a wait may take, of which `round` looks are over; LOOKS of
// them take some ten milliseconds (see LOOK). seen: the number of what is there, -1 where nobody says.
constexpr int64_t LOOKS = 1 << 14;
__device__ __forceinline__ bool packets_are_late(const Team& team, uint64_t start, int64_t round, int number, int64_t seen, int site) {
  if (is_void(team)) return true;
  const bool late = now() - start > uint64_t(team.limit), over = late || (round % LOOKS == 0 && stopped(team));
  if (over) give_up(team, late ? LATE_PACKETS : STOPPED, site, -1, number, seen, 0, -1);
  return over;
}

// Until the packet has come; its data.
__device__ __forceinline__ int64_t get_packet(const Team& team, const int64_t* at, int number, int site) {
  uint64_t low, high;
  if (!look_at_packet(at, number, low, high)) {
    const uint64_t start = now();
    for (int round = 1; !look_at_packet(at, number, low, high); ++round)
      if (round % 256 == 0 &&
          packets_are_late(team, start, round, number, int64_t(int(low >> 32) == number ? high >> 32 : low >> 32), site))
        break;
  }
  return data_of_packet(low, high);
}

// Of several packets of a thread: the data, and whether it is late. Looks at packets that are not awaited one by one are under way together.
__device__ __forceinline__ int64_t look_for_packet(const int64_t* at, int number, int* late) {
  uint64_t low, high;
  *late |= !look_at_packet(at, number, low, high);
  return data_of_packet(low, high);
}

// Whether to look (again), which is the case where some are late. since: how many looks there were, and when the first one was in vain.
__device__ __forceinline__ bool await_packets(const Team& team, int* late, int64_t* since, int number, int site) {
  if (!*late) return false;
  *late = 0;
  if (since[0]++ == 1) since[1] = int64_t(now());
  return since[0] % 256 != 0 || !packets_are_late(team, uint64_t(since[1]), since[0], number, -1, site);
}

// ---- dense boxes: a packet is one word, the complement of its data; a place without one is 0
//
// Two neighbours are one access, each whole by itself, as above. Who has seen a packet stores 0 there; its own load came first in program
// order and is not changed by that (coherence of one location), and nobody else looks at the place. That no packet of a later launch is lost
// to the store is argued in compiler/passes/packets.py.

__device__ __forceinline__ uint64_t dense(int64_t data) { return data == -1 ? 1 : ~uint64_t(data); }

__device__ __forceinline__ void put_dense(int64_t* to, int64_t data) {
#ifdef TS_NVSHMEM
  if (pe_of(to) >= 0) return far_set(to, int64_t(dense(data)));
#endif
  asm volatile("st.relaxed.sys.global.b64 [%0], %1;" ::"l"(to), "l"(dense(data)) : "memory");
}

__device__ __forceinline__ void put_two_dense(int64_t* to, int64_t data, int64_t next) {
#ifdef TS_NVSHMEM
  if (pe_of(to) >= 0) return put_dense(to, data), put_dense(to + 1, next);
#endif
  asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1, %2};" ::"l"(to), "l"(dense(data)), "l"(dense(next)) : "memory");
}

__device__ __forceinline__ int64_t look_for_dense(const int64_t* at, int* late) {
  uint64_t word;
  asm volatile("ld.relaxed.sys.global.b64 %0, [%1];" : "=l"(word) : "l"(at) : "memory");
  *late |= word == 0;
  return int64_t(~word);
}

__device__ __forceinline__ void look_for_two_dense(const int64_t* at, int* late, int64_t* data) {
  uint64_t word, next;
  asm volatile("ld.relaxed.sys.global.v2.b64 {%0, %1}, [%2];" : "=l"(word), "=l"(next) : "l"(at) : "memory");
  *late |= word == 0 || next == 0;
  data[0] = int64_t(~word), data[1] = int64_t(~next);
}

__device__ __forceinline__ void empty_dense(int64_t* at) {
  asm volatile("st.relaxed.sys.global.b64 [%0], %1;" ::"l"(at), "l"(0ll) : "memory");
}

__device__ __forceinline__ void empty_two_dense(int64_t* at) {
  asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1, %1};" ::"l"(at), "l"(0ll) : "memory");
}

}  // namespace ts
