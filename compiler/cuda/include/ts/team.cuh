// Ranks that launch together: peers' addresses, signals and waits, meetings, and what runs at both ends of a launch.
//
// Host order numbers the launches of a team 1, 2, … on every rank alike; the number is counted on the device, so that a graph that is
// replayed counts too. Launch k of rank r, on its stream:
//   1. r's first block tells every rank: r is in launch k, which is described by this number (`begin_launch`, a release at the scope of the
//      system). Whatever r's earlier work did, its zeroed signals included, lies before the kernel in the stream.
//   2. A block awaits rank q's entry before it first touches q's memory (`enter`, `peer`), with acquire, and compares the descriptions.
//   3. Each of r's blocks tells every rank, r too, when it is through with launch k (`end_launch`, a release). The last block does so when
//      all ranks have entered; then it awaits the same of all blocks of everyone (acquire), zeroes r's own signals and counts the launch. So
//      r's launch is complete when every access aimed at r is. (The last block, since it begins last: nobody awaits its place.)
// A launch without blocks is passed by a kernel of one block that does these three alone (`ts_pass`). One without order does none of it, and
// is not counted: all that the number is for there is to tell meetings of different launches apart, and they go on counting.
// Where every rank awaits all that is aimed at it within the launch (T.Kernel(awaited=True), compiler/passes/awaited.py), exits are left out: a
// block tells its own rank alone, whose last block zeroes the rank's signals and counts. Then ranks may be a launch apart, so that whoever looks
// at an entry may see a later one. Exits have a count of their own.
// Flags are pushed: each lies in the memory of the rank that awaits it, one writer a word, and only grows. Peers' memory is written by
// plain stores, whose completion a release of the same thread orders, or of another one of the block behind a barrier.
#pragma once
#include <ts/types.cuh>
#ifdef TS_NVSHMEM
#include <ts/nvshmem.cuh>
// A word in the memory of a rank that is not addressed: its release is the library's.
#define TS_FAR(name)                       \
  if constexpr (system)                    \
    if (pe_of(at) >= 0) return far_##name(at, value);
#else
#define TS_FAR(name)
#endif

namespace ts {

constexpr int MAX_RANKS = 128;
constexpr int MAX_BLOCKS = 132 * 32;  // that are resident at once on the nominal device
constexpr int OUTSIDE = -(1 << 30);   // plus the lower 16 bits of what a program named: no rank of the team of its T.Scale

// What went wrong in a launch, for the host: memory that it reads. `state` is 2 when all else is there.
struct Record {
  int64_t state, why, kernel, control, site, block[3], rank, launch, value, seen, compare, index;
};
enum Why { LATE_SIGNAL = 1, LATE_ENTRY, LATE_EXIT, LATE_MEETING, LATE_BLOCKS, DIFFERENT, NO_RANK, NO_COUNTER, STOPPED, LATE_PACKETS, NO_SCRATCH, OVERLAP };

// Own counters that are zero when the next launch begins; where length is -1 a box of packets, in a launch without blocks, which would
// have counted it (packets.cuh).
struct Counters {
  int count, pad;
  int64_t* at[16];
  int64_t length[16];
};

// A team as a kernel sees it (tilescale/native/gpu_team.c fills it).
struct Team {
  int rank, size, ordered, kernel;
  int64_t limit;        // ns that a wait may take
  Record* record;       // null: nobody reads it
  const int* stop;      // not 0 there: the job has been stopped; null: nobody says
  int64_t control;      // where the control words lie in every rank's arena
  int64_t description;  // of what this launch is, which ranks compare: 32 bits
  int ends;             // what is done when blocks have ended: 0 nothing, 1 what is the rank's own, 2 exits too
  int recover;          // the process goes on behind a wait that is given up (see give_up)
  Counters counters;
  char* base[MAX_RANKS];
};

// The control words of a rank: its own, then what each rank tells it.
enum Words { LAUNCHES, ARRIVED, GENERATION, FAILED, CLEARED, ENDED, RUNNING, EXITS, ENTRIES = 16 };
__device__ __forceinline__ int64_t* words(const Team& team, int rank) { return (int64_t*)(team.base[rank] + team.control); }
// This launch's number: the count stands still until all its blocks have ended.
__device__ __forceinline__ int64_t launch_of(const Team& team) { return words(team, team.rank)[LAUNCHES] + 1; }
// That `rank` has entered: in the upper half the launch's number, in the lower one what describes the launch. How often it has left: in the
// upper half, which changes when all its blocks have added to it. Numbers in halves go round after four thousand million launches, so words are
// compared by their difference (WITHIN).
__device__ __forceinline__ int64_t* entry_of(const Team& team, int at, int rank) { return words(team, at) + ENTRIES + rank; }
__device__ __forceinline__ int64_t* exit_of(const Team& team, int at, int rank) { return words(team, at) + ENTRIES + team.size + rank; }
__device__ __forceinline__ int64_t* meeting_of(const Team& team, int at, int rank) {
  return words(team, at) + ENTRIES + 2 * team.size + rank;
}
__device__ __forceinline__ int64_t* sync_of(const Team& team, int at, int rank, int64_t block) {
  return words(team, at) + ENTRIES + (3 + block) * team.size + rank;
}
// Teams inside a kernel, for each block and (block -1) all blocks of a rank: how often `rank` has met, or has come to meet, the one at
// whose words this lies; and how often that one has come to meet `rank`.
__device__ __forceinline__ int64_t* met_of(const Team& team, int at, int rank, int64_t block) {
  return words(team, at) + ENTRIES + (3 + MAX_BLOCKS) * team.size + 2 * (block + 1) * team.size + rank;
}
__device__ __forceinline__ int64_t* came_of(const Team& team, int at, int rank, int64_t block) {
  return met_of(team, at, rank, block) + team.size;
}

// ---- words that others change (PTX ISA, "Memory Consistency Model": acquire and release patterns)

template <bool system>
__device__ __forceinline__ int64_t load_acquire(const int64_t* at) {
  int64_t seen;
  if constexpr (system) asm volatile("ld.acquire.sys.global.b64 %0, [%1];" : "=l"(seen) : "l"(at) : "memory");
  else asm volatile("ld.acquire.gpu.global.b64 %0, [%1];" : "=l"(seen) : "l"(at) : "memory");
  return seen;
}
// A look that orders nothing: it leaves the multiprocessor's L1 cache alone, which every acquire empties (of all its warps, too).
template <bool system>
__device__ __forceinline__ int64_t load_relaxed(const int64_t* at) {
  int64_t seen;
  if constexpr (system) asm volatile("ld.relaxed.sys.global.b64 %0, [%1];" : "=l"(seen) : "l"(at) : "memory");
  else asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];" : "=l"(seen) : "l"(at) : "memory");
  return seen;
}
template <bool system>
__device__ __forceinline__ void signal_set(int64_t* at, int64_t value) {
  TS_FAR(set)
  if constexpr (system) asm volatile("st.release.sys.global.b64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
  else asm volatile("st.release.gpu.global.b64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}
// An addition is a read-modify-write and goes on with the release sequence of those before it: who sees the sum has acquired them all.
// So do a maximum and a minimum.
#define TS_SIGNAL(name, op)                                                                                         \
  template <bool system>                                                                                            \
  __device__ __forceinline__ void signal_##name(int64_t* at, int64_t value) {                                       \
    TS_FAR(name)                                                                                                    \
    if constexpr (system) asm volatile("red.release.sys.global." op " [%0], %1;" ::"l"(at), "l"(value) : "memory"); \
    else asm volatile("red.release.gpu.global." op " [%0], %1;" ::"l"(at), "l"(value) : "memory");                  \
  }
TS_SIGNAL(add, "add.u64")
TS_SIGNAL(max, "max.s64")
TS_SIGNAL(min, "min.s64")
#undef TS_SIGNAL

// ---- waiting, at most so long

__device__ __forceinline__ uint64_t now() {
  uint64_t t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}

// A function that is called and not inlined, unless the kernel moves registers between its warps, where ptxas allocates none for calls.
#ifndef TS_COLD
#define TS_COLD __noinline__
#endif

// Whether waits of this rank are void, since one of them was given up and the process goes on behind it.
__device__ __forceinline__ bool is_void(const Team& team) { return team.recover && load_relaxed<false>(&words(team, team.rank)[FAILED]); }

// Gives up, with an error. The first to come says why; the others leave it the time. The launch ends here, and with it the process's use of
// the GPU: a trap.
//
// But where the process goes on (comm.init(recover=True)) a wait is given up by its return. From then on all waits of this rank are void:
// each looks some hundred times, sees that, and returns as if it had been answered. So all threads of this launch, and of those that are
// under way behind it, go on to their ends, through the barriers that they share; nothing is cut off that another thread relies on. What they
// compute is worth nothing, and the host says so (gpu_team.c). Their accesses go where those of a launch that works may go: places are
// guarded by extents, not by what arrived, and other ranks' memory is mapped until this process lets go of it, whether they live or not.
// What is no wait has an access behind it that must not happen: it traps, unless waits are void, so that what it stands on may be worth nothing
// either; then it returns, and its caller leaves the access out.
static __device__ TS_COLD void give_up(const Team& team, int why, int site, int rank, int64_t value, int64_t seen, int compare,
                                            int64_t index) {
  int64_t* own = words(team, team.rank);
  const bool first = atomicCAS((unsigned long long*)&own[FAILED], 0ull, 1ull) == 0;
  if (team.recover && !first) return;
  if (team.record && first) {
    Record* r = team.record;
    r->why = why, r->kernel = team.kernel, r->control = team.control, r->site = site, r->rank = rank, r->launch = launch_of(team);
    r->value = value, r->seen = seen, r->compare = compare, r->index = index;
    int x, y, z;  // read here: a kernel that never fails holds no registers for them
    asm volatile("mov.u32 %0, %%ctaid.x; mov.u32 %1, %%ctaid.y; mov.u32 %2, %%ctaid.z;" : "=r"(x), "=r"(y), "=r"(z));
    r->block[0] = x, r->block[1] = y, r->block[2] = z;
    signal_set<true>(&r->state, 2);
    __threadfence_system();
  } else {
    for (const uint64_t start = now(); now() - start < 100000000;) __nanosleep(1000);
  }
  if (team.recover && (why == STOPPED || why == LATE_PACKETS || why <= LATE_BLOCKS)) return;
  asm volatile("trap;");
}

constexpr int WITHIN = 6;  // as many as `value` or more, of numbers that go round
__device__ __forceinline__ int64_t upper(int64_t number) { return int64_t(uint64_t(number) << 32); }

__device__ __forceinline__ bool holds(int64_t seen, int64_t value, int compare) {
  return compare == 0   ? seen >= value
         : compare == WITHIN ? int64_t(uint64_t(seen) - uint64_t(value)) >= 0
         : compare == 1 ? seen == value
         : compare == 2 ? seen > value
         : compare == 3 ? seen != value
         : compare == 4 ? seen <= value
                        : seen < value;
}

// Whether the job has been stopped, which the host's memory says: some thousand waiting warps that look at it without a break keep each other
// waiting for milliseconds. So each looks every LOOK nanoseconds at most.
constexpr uint64_t LOOK = 10000000;
__device__ __forceinline__ bool stopped(const Team& team) { return team.stop && *(volatile const int*)team.stop; }

// What a word has told that a network may have written.
template <bool system>
__device__ __forceinline__ int64_t awaited(const int64_t* at, int64_t seen) {
#ifdef TS_NVSHMEM
  if constexpr (system) ts_nvshmem_seen((uint64_t*)at);
#endif
  return seen;
}

// Until the word compares with `value`; what its writers did before they released it is visible behind this. index: of a counter, for
// the report.
//
// The first look acquires, since mostly it is the last one. Those behind it do not, so that warps beside this one keep their L1 cache; the one
// behind them does, and decides: it reads what they saw or something newer (coherence of one location), released by the same writers.
template <bool system>
__device__ __forceinline__ int64_t await(const Team& team, const int64_t* at, int64_t value, int compare, int why, int site, int rank,
                                         int64_t index = -1) {
  int64_t seen = load_acquire<system>(at);
  if (holds(seen, value, compare)) return awaited<system>(at, seen);
  const uint64_t start = now();
  uint64_t looked = start;
  for (int round = 1;; ++round) {
    seen = load_relaxed<system>(at);
    if (holds(seen, value, compare)) {
      seen = load_acquire<system>(at);
      if (holds(seen, value, compare)) return awaited<system>(at, seen);
    }
    if (round % 256 == 0) {
      if (is_void(team)) return seen;
      const uint64_t time = now();
      const bool late = time - start > uint64_t(team.limit), look = time - looked > LOOK;
      if (look) looked = time;
      if (late || (look && stopped(team))) {
        give_up(team, late ? why : STOPPED, site, rank, value, seen, compare, index);
        return seen;
      }
    }
  }
}
template <bool system>
__device__ __forceinline__ void wait(const Team& team, const int64_t* counters, int64_t index, int64_t value, int compare, int site) {
  await<system>(team, counters + index, value, compare, LATE_SIGNAL, site, -1, index);
}

// A look: what the counter's writers did is visible behind it where the comparison holds (an acquire, too, where it does not). Where waits are
// void it holds, as they do.
template <bool system>
__device__ __forceinline__ int test(const Team& team, const int64_t* counters, int64_t index, bool inside, int64_t value, int compare,
                                    int site) {
  if (!inside) {
    give_up(team, NO_COUNTER, site, -1, 0, 0, 0, -1);
    return 1;
  }
  return holds(load_acquire<system>(counters + index), value, compare) || is_void(team);
}

// An index outside a T.Signal.
__device__ __forceinline__ void no_counter(const Team& team, int site) { give_up(team, NO_COUNTER, site, -1, 0, 0, 0, -1); }

// ---- peers

// Whether an entry says that its rank has entered the launch that `mine` describes, or, described as it likes, a later one.
__device__ __forceinline__ bool is_there(int64_t seen, int64_t mine) {
  return uint64_t(seen ^ mine) >> 32 ? holds(seen, mine, WITHIN) : seen == mine;
}

// Step 2 by a thread for itself: its own acquire orders what it does in the rank's memory.
__device__ __forceinline__ void touch(const Team& team, int rank, int site) {
  if (!team.ordered || rank == team.rank) return;
  const int64_t launch = upper(launch_of(team)), mine = launch | team.description;
  const int64_t seen = await<true>(team, entry_of(team, team.rank, rank), launch, WITHIN, LATE_ENTRY, site, rank);
  if (!is_there(seen, mine)) give_up(team, DIFFERENT, site, rank, team.description, seen & 0xffffffff, 0, -1);
}

constexpr int EVERYONE = MAX_RANKS;

// Step 2 by an executor at once, in front of its first access to `rank`, of all its threads. Whether it knows now that every rank of the
// team has entered: then it need never look again in this launch, and takes addresses by `twin`.
//
// Thread i looks at the entries of ranks i, i + threads, …: those of a node cost one latency together. It awaits that of `rank` alone. Others
// that are late are left for a later look: a rank that this executor never touches may enter after this kernel has done all its work here,
// and what comes before the first access to a late rank goes on beside it. A rank that entered with another description counts as late too, so
// that the access to it gives up, and names it.
//
// Order: rank r's begin_launch releases at the scope of the system (its st.release.sys), behind all that r did before in its stream. The thread
// that sees the number acquires it (ld.acquire.sys, a morally strong pair: one synchronizes with the other). The barrier synchronizes with
// itself (PTX ISA, "bar.red": orders as bar.sync does; __syncwarp among a warp), and causality order is transitive (PTX ISA, "Memory
// Consistency Model", "Causality order"). So what any thread of the executor does behind this comes after r's entry, and plain accesses of
// r's memory need no look of their own. Entries only grow, and no rank passes launch k + 1's before this one has left launch k: what was seen
// stays true to the launch's end.
//
// number: of the barrier of these threads, -1 a warp's. Which statement they are at is the same for all, as for every barrier of theirs.
__device__ __forceinline__ int enter(const Team& team, int rank, int thread, int threads, int number, int site) {
  if (!team.ordered) return 1;
  const int64_t mine = upper(launch_of(team)) | team.description;
  int all = 1;
  for (int r = thread; r < team.size; r += threads) {
    if (r == rank || rank == EVERYONE) {
      touch(team, r, site);
    } else if (r != team.rank) {
      all &= is_there(load_acquire<true>(entry_of(team, team.rank, r)), mine);
    }
  }
  if (number < 0) {
    all = __all_sync(0xffffffffu, all);
    __syncwarp();  // a vote orders no memory
  } else if (number == 0) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %0, 0; barrier.red.and.pred p, 0, p; selp.b32 %0, 1, 0, p; }" : "+r"(all)::"memory");
  } else {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %0, 0; barrier.red.and.pred p, %1, %2, p; selp.b32 %0, 1, 0, p; }"
                 : "+r"(all)
                 : "r"(number), "r"(threads)
                 : "memory");
  }
  return all;
}
// The same of all ranks, each of which is awaited.
__device__ __forceinline__ int enter_all(const Team& team, int thread, int threads, int number, int site) {
  return enter(team, EVERYONE, thread, threads, number, site);
}

// The twin of `p` in the memory of the team's `rank`; nobody awaits here that the rank has reached this launch.
template <typename T>
__device__ __forceinline__ T* twin(const Team& team, T* p, int rank, int site) {
  if (rank < 0 || rank >= team.size) {
    give_up(team, NO_RANK, site, rank, 0, 0, 0, -1);
    rank = team.rank;  // one address for both: of two, stores through it would be cut into words
  }
  return (T*)(team.base[rank] + ((const char*)p - team.base[team.rank]));
}
// The same, behind step 2.
template <typename T>
__device__ __forceinline__ T* peer(const Team& team, T* p, int rank, int site) {
  if (rank < 0 || rank >= team.size) {
    give_up(team, NO_RANK, site, rank, 0, 0, 0, -1);
    rank = team.rank;
  }
  if (rank == team.rank) return p;
  touch(team, rank, site);
  return (T*)(team.base[rank] + ((const char*)p - team.base[team.rank]));
}

#ifdef TS_NVSHMEM
// From `first` on in this block's part, of so many bytes, of the scratch that lies behind the team's words: registered, as all of the arena is.
constexpr int64_t SCRATCH = 32 << 20;  // bytes a team (comm/nvshmem.py)
template <typename T>
__device__ __forceinline__ T* scratch(const Team& team, const T* like, int bytes, int first, int site) {
  const int64_t block = blockIdx.x + int64_t(gridDim.x) * (blockIdx.y + int64_t(gridDim.y) * blockIdx.z);
  if ((block + 1) * bytes > SCRATCH) give_up(team, NO_SCRATCH, site, -1, (block + 1) * bytes, SCRATCH, 0, -1);
  const int64_t size = ENTRIES + (3 + MAX_BLOCKS + 2 * (1 + MAX_BLOCKS)) * int64_t(team.size);  // of the words
  return (T*)((char*)words(team, team.rank) + (size * 8 + 255) / 256 * 256 + block * bytes + first);
}
#endif

// ---- meetings, each by one thread of an executor behind and in front of the executor's own

// The next round of a word that only this thread writes; launches only grow, so no word is ever reset.
__device__ __forceinline__ int64_t next_round(const Team& team, int64_t was) {
  const int64_t launch = upper(launch_of(team));
  return upper(was >> 32) == launch ? was + 1 : launch | 1;
}

// Tells every rank by a release, and awaits the same of each: by a thread, or by the lanes of a warp, each of which does so with some.
template <typename Word>
__device__ __forceinline__ void meet_ranks(const Team& team, int site, Word word, int lane = 0, int lanes = 1) {
  int64_t* own = word(team.rank, team.rank);
  const int64_t round = next_round(team, *own);
  if (lanes > 1) __syncwarp();  // all have read the word
  if (lane == 0) *own = round;
  for (int i = 1 + lane; i < team.size; i += lanes) signal_set<true>(word((team.rank + i) % team.size, team.rank), round);
  for (int i = 1 + lane; i < team.size; i += lanes) {
    const int rank = (team.rank + i) % team.size;
    await<true>(team, word(team.rank, rank), round, WITHIN, LATE_MEETING, site, rank);
  }
}

// The own place in the grid.
__device__ __forceinline__ int64_t own_block() {
  return blockIdx.x + int64_t(gridDim.x) * (blockIdx.y + int64_t(gridDim.y) * blockIdx.z);
}

// This block and the same block of every rank, by a warp of it, behind `enter_all`. Each lane releases what the barrier in front has handed to
// it, so all that the block did; what lanes acquire the barrier behind hands to the block.
__device__ __forceinline__ void team_sync(const Team& team, int lane, int site) {
  const int64_t block = own_block();
  meet_ranks(team, site, [&](int at, int rank) { return sync_of(team, at, rank, block); }, lane, 32);
}

// The members of a team inside a kernel, as ranks of the launch: evenly spaced, or a list, of which -1 is none.
struct Range {
  int first, count, step;
  __device__ __forceinline__ int size() const { return count; }
  __device__ __forceinline__ int at(int i) const { return first + i * step; }
};
template <int n>
struct List {
  int ranks[n];
  __device__ __forceinline__ int size() const { return n; }
  __device__ __forceinline__ int at(int i) const { return ranks[i]; }
};
__device__ __forceinline__ Range range_of_ranks(int first, int count, int step) { return {first, count, step}; }
template <typename... Ranks>
__device__ __forceinline__ List<sizeof...(Ranks)> list_of_ranks(Ranks... ranks) { return {{ranks...}}; }

// Members meet by pairs: each counts, for every other, the meetings to which it came with that one, tells it the number by a release and
// awaits the same number of it. Two ranks come to the meetings that both are members of in one order, so the n-th of a pair is one
// meeting, whatever other teams either meets in between, and teams that overlap cannot take one another's arrivals. Launches only grow,
// so no word is ever reset. Behind it every member has acquired what each of the others released.
template <typename Members>
__device__ __forceinline__ void meet_among(const Team& team, int site, const Members& members, int64_t block) {
  for (int i = 0; i < members.size(); ++i)
    if (members.at(i) >= team.size) {
      give_up(team, NO_RANK, site, members.at(i), 0, 0, 0, -1);
      return;
    }
  for (int i = 0; i < members.size(); ++i)
    if (members.at(i) >= 0) touch(team, members.at(i), site);
  for (int i = 0; i < members.size(); ++i) {
    const int rank = members.at(i);
    if (rank < 0 || rank == team.rank) continue;
    int64_t* met = met_of(team, team.rank, rank, block);
    *met = next_round(team, *met);
    signal_set<true>(came_of(team, rank, team.rank, block), *met);
  }
  for (int i = 0; i < members.size(); ++i) {
    const int rank = members.at(i);
    if (rank < 0 || rank == team.rank) continue;
    await<true>(team, came_of(team, team.rank, rank, block), *met_of(team, team.rank, rank, block), WITHIN, LATE_MEETING, site, rank);
  }
}

// This block and the same block of the other members.
template <typename Members>
__device__ __forceinline__ void team_sync_among(const Team& team, int site, const Members& members) {
  meet_among(team, site, members, own_block());
}

// All blocks of this rank, with `executors` each that call it; the last one to arrive runs `last` before it lets the others go. Each
// arrival releases what its executor did and acquires what came before, so the last one's releases, to the ranks and to this rank's
// blocks, hand everything on.
template <typename Last>
__device__ __forceinline__ void meet_blocks(const Team& team, int executors, int site, Last last) {
  int64_t* own = words(team, team.rank);
  const int64_t all = int64_t(gridDim.x) * gridDim.y * gridDim.z * executors;
  const int64_t generation = *(volatile int64_t*)&own[GENERATION];  // does not move before this executor has arrived
  int64_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u64 %0, [%1], 1;" : "=l"(before) : "l"(&own[ARRIVED]) : "memory");
  if (before + 1 < all) {
    await<false>(team, &own[GENERATION], generation, 3, LATE_BLOCKS, site, -1);
    return;
  }
  last();
  *(volatile int64_t*)&own[ARRIVED] = 0;
  signal_set<false>(&own[GENERATION], generation + 1);
}

// All blocks of this rank; with `device` those of all ranks.
template <bool device>
__device__ __forceinline__ void barrier(const Team& team, int executors, int site) {
  meet_blocks(team, executors, site, [&] {
    if constexpr (device) {
      for (int i = 1; i < team.size; ++i) touch(team, (team.rank + i) % team.size, site);
      meet_ranks(team, site, [&](int at, int rank) { return meeting_of(team, at, rank); });
    }
  });
}

// All blocks of all members of a team inside the kernel.
template <typename Members>
__device__ __forceinline__ void barrier_among(const Team& team, int executors, int site, const Members& members) {
  meet_blocks(team, executors, site, [&] { meet_among(team, site, members, -1); });
}

// ---- the ends of a launch

// Step 1, by the first warp of the first block, before anything else. Then the launch is one of those that run, of which there must be one at a
// time: hosts order launches (gpu_team.c), but not graphs that they replay on several streams. Two at once would have one number and each
// other's counters and memory. The first of them to end finds the other one (`finish_launch`).
__device__ __forceinline__ void begin_launch(const Team& team, int thread) {
  if (!team.ordered || own_block() != 0 || thread >= 32) return;
  const int64_t mine = upper(launch_of(team)) | team.description;
  for (int rank = thread; rank < team.size; rank += 32) signal_set<true>(entry_of(team, rank, team.rank), mine);
  if (thread == 0) asm volatile("red.relaxed.gpu.global.add.u64 [%0], 1;" ::"l"(&words(team, team.rank)[RUNNING]) : "memory");
}

// Behind all else of a block, by all its threads. Additions of all blocks of a rank are 1 << 32 together: the last block's holds what keeps
// the upper half where it is until all have come. Without order the rank's own counters alone are seen to, and the rank counts for itself.
//
// Order: what a block's threads did is before the barrier, and so before each lane's addition, which releases it at the scope of the system;
// additions to one word go on with each other's release sequences, so who sees the upper half change knows of all that the blocks of that rank
// did. What r acquires of the others' exits is before this kernel's end, and so before whatever comes behind it in the stream: the zeroes,
// too, which the next launch's entry releases. A block reads nothing of the launch behind its additions, so the count may change then.
//
// Without exits the additions are for the last block alone, whose zeroes and count come behind them: this GPU's scope. What blocks did for
// other ranks they have released by signals.
__device__ __forceinline__ bool has_exits(const Team& team) { return team.ends > 1; }
__device__ __forceinline__ int64_t* end_of(const Team& team, int at, int rank) {
  return has_exits(team) ? exit_of(team, at, rank) : words(team, team.rank) + ENDED;
}
static __device__ TS_COLD void finish_launch(const Team& team, int lane) {
  int64_t* count = words(team, team.rank) + (has_exits(team) ? EXITS : CLEARED);
  const int64_t number = *count + 1;
  for (int rank = lane; rank < (has_exits(team) ? team.size : 1); rank += 32)
    await<true>(team, end_of(team, team.rank, rank), upper(number), WITHIN, LATE_EXIT, -1, rank);
  __syncwarp();
  for (int k = 0; k < team.counters.count; ++k) {
    if (team.counters.length[k] < 0 && lane == 0) team.counters.at[k][0] += 1ll << 32;
    for (int64_t i = lane; i < team.counters.length[k]; i += 32) team.counters.at[k][i] = 0;
  }
  // The first block's addition is before its exit, which a lane has acquired. Another launch's may come behind this look: then it has begun
  // when all accesses of this one were over.
  if (lane == 0 && team.ordered) {
    if (load_relaxed<false>(&words(team, team.rank)[RUNNING]) != 1) give_up(team, OVERLAP, -1, -1, 0, 0, 0, -1);
    words(team, team.rank)[RUNNING] = 0;
  }
  if (lane == 0) {
    *count = number;
    if (team.ordered) words(team, team.rank)[LAUNCHES] += 1;
  }
}
__device__ __forceinline__ void end_launch(const Team& team, int thread) {
  if (!team.ends) return;
  __syncthreads();
  if (thread >= 32) return;
  const int64_t others = int64_t(gridDim.x) * gridDim.y * gridDim.z - 1;
  const bool last = own_block() == others;
  const int64_t mine = last ? (1ll << 32) - others : 1;
  for (int rank = thread; has_exits(team) && rank < team.size; rank += 32) {
    if (last) touch(team, rank, -1);  // nobody is passed over who has launched something else
    signal_add<true>(end_of(team, rank, team.rank), mine);
  }
  if (!has_exits(team) && thread == 0) signal_add<false>(end_of(team, team.rank, team.rank), mine);
  __syncwarp();
  if (last) finish_launch(team, thread);
}

}  // namespace ts

// A launch without blocks.
extern "C" __global__ void __launch_bounds__(32) ts_pass(const __grid_constant__ ts::Team team) {
  ts::begin_launch(team, threadIdx.x);
  ts::end_launch(team, threadIdx.x);
}
