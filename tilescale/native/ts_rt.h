/* The CPU runtime's shared declarations. docs/RUNTIME.md, "The runtime's contract", says what kernels may rely on.
 *
 * Who owns what:
 *   report.c    messages of failures, prints, the event log
 *   fiber.c     stacks, the context switch, one thread's scheduler of fibers
 *   pool.c      threads that persist between launches
 *   sync.c      what kernels call: wait, signal, barriers, fork
 *   packets.c   packets: put, awaited, taken
 *   check.c     a call's arguments against the kernel's description
 *   launch.c    kernels made from Python, launches
 *   cuda.c      the same for CUDA's kernels; shares the arguments' checks alone
 *   gpu_team.c  teams of GPUs: symmetric memory there, both ends of a launch, what a failed one says
 *   heap.c      symmetric memory, the control area, mailboxes between ranks, the abort word
 *   team.c      teams, the entry and exit flags of a launch, peers' addresses
 */
#ifndef TS_RT_H
#define TS_RT_H
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <setjmp.h>
#include <tvm/ffi/c_api.h>

#define TS_API __attribute__((visibility("default")))
#define TS_LIKELY(x) __builtin_expect(!!(x), 1)
#define TS_UNLIKELY(x) __builtin_expect(!!(x), 0)

enum {
  TS_MAX_RANKS = 128,     /* ranks of one machine */
  TS_MAX_TEAMS = 32,      /* teams that a rank belongs to at one time, the world included */
  TS_MAX_DIM = 8,         /* axes of a tensor argument */
  TS_MAX_PARAMS = 64,
  TS_MAX_SLOTS = 512,     /* words of a call: parameters, rank, world, symbols */
  TS_MAX_SYMM = 16,       /* symmetric arguments of one kernel */
  TS_MAX_RESIDENT = 132 * 32, /* blocks that the nominal device holds at once */
  TS_MESSAGE = 2048,
  TS_MAIL = 512,          /* bytes of one message between hosts */
};

/* What a kernel says instead of a rank that is outside of its team inside the kernel: this plus the lower 16 bits of what it named. */
#define TS_OUTSIDE (-(1 << 30))
#define TS_IS_OUTSIDE(rank) ((rank) >= TS_OUTSIDE && (rank) < TS_OUTSIDE + (1 << 16))

enum { TS_KIND_TENSOR, TS_KIND_INT, TS_KIND_FLOAT, TS_KIND_SYMM, TS_KIND_SIGNAL, TS_KIND_SIGNAL_KEEP, TS_KIND_PACKETS, TS_KIND_DENSE };
static inline int ts_is_box(int32_t kind) { return kind == TS_KIND_PACKETS || kind == TS_KIND_DENSE; }
enum { TS_HOW_VALUE, TS_HOW_DEFINE, TS_HOW_SYMBOL, TS_HOW_FREE, TS_HOW_MULTIPLE };
/* TS_HOW_MULTIPLE defines the symbol in the lower half of its value, which must be a multiple of the upper half: 1 says that
 * the symbol is int64. Others are int32. */
#define TS_SYMBOL_OF(value) ((value) & 0xffffffff)
#define TS_MULTIPLE_OF(value) ((value) >> 32)
enum { TS_FLAG_WAITS = 1, TS_FLAG_DEVICE = 2, TS_FLAG_UNORDERED = 4, TS_FLAG_CLUSTER = 8, TS_FLAG_EVENTS = 16,
       TS_FLAG_BARE = 64 /* packets make the flags of a launch needless (compiler/passes/packets.py): one without blocks does not count */,
       TS_FLAG_LOCAL = 32 /* waits within a block or a cluster alone: no block needs another cluster's to be resident */ };

typedef struct ts_rule { int64_t how, value; } ts_rule;

/* What a collective asks of the number of ranks that launch: TS_DEMAND_PARTS: to be this extent; TS_DEMAND_ROOT: to be more than this. */
enum { TS_DEMAND_PARTS, TS_DEMAND_ROOT };
typedef struct ts_demand { int64_t kind; ts_rule rule; } ts_demand;

typedef struct ts_param {
  int32_t kind, code, bits, written, ndim, strided, align; /* align: bytes, where more than the element's size */
  ts_rule shape[TS_MAX_DIM], stride[TS_MAX_DIM];
  const char* name; /* "" where the sites do not tell */
} ts_param;

typedef struct ts_site { const char *kind, *name, *file, *line, *text; } ts_site;

typedef int32_t (*ts_block_fn)(void*, const int64_t*, uint8_t*, int32_t, int32_t, int32_t);
typedef int32_t (*ts_grid_fn)(const int64_t*, int64_t*);
typedef int32_t (*ts_region_fn)(void*, const int64_t*, uint8_t*, int64_t*, int32_t);

typedef struct ts_kernel {
  void* handle;
  ts_block_fn block;
  ts_grid_fn grid;
  ts_region_fn* regions;
  int32_t nparams, nsyms, nregions, flags, nsites, nsymm, id;
  int32_t device;      /* DLPack's device type that tensors lie on */
  int64_t arena_bytes, threads, max_blocks, shared_bytes, resident;
  int32_t cluster[3], cluster_size;
  uint64_t fingerprint;
  char *name, *label; /* label: the name, a newline, the symmetric parameters' names */
  char* site_text;
  ts_site* sites;
  int64_t ndemands;
  ts_demand* demands;
  uint64_t narrow[TS_MAX_SLOTS / 64]; /* symbols that kernels take as int32, a bit each */
  ts_param params[];
} ts_kernel;

/* One argument of one call, as far as later checks and reports need it. */
typedef struct ts_arg { char *lo, *hi; const DLTensor* tensor; } ts_arg;

/* Barriers of a block: 16 as on a GPU, and one for each of at most 32 warps. */
enum { TS_BLOCK_BARRIERS = 48 };
typedef struct ts_barrier_t { _Atomic int64_t arrived, generation; } ts_barrier_t;

struct ts_team;
struct ts_fiber;
struct ts_worker;

typedef struct ts_launch {
  const ts_kernel* kernel;
  const int64_t* slots;
  const ts_arg* args;
  struct ts_team* team; /* null: this rank alone, without a heap */
  int64_t number;       /* of this launch on its team, from 1 */
  int64_t grid[3], nblocks, nunits; /* a unit is one cluster: the piece of work that one thread takes */
  int32_t nworkers, as_fibers;
  _Atomic int64_t next; /* the next unit to start */
  _Atomic int32_t failed; /* 0 runs, 1 a failure is being written, 2 it can be read */
  int32_t interrupted;  /* the caller's Python has an exception pending */
  int32_t site, quiet;  /* quiet: the failure came from another rank, which has told everyone already */
  ts_barrier_t grid_barrier;
  _Atomic int32_t own_signal_waits, *signal_waits; /* how many executors wait for signals; other ranks may look: reports only */
  int64_t device_barriers; /* written by the last block to arrive only */
  _Atomic uint8_t touched[TS_MAX_RANKS];
  char message[TS_MESSAGE];
} ts_launch;

typedef struct ts_cluster { uint8_t* slab; struct ts_cluster* next; int32_t live; ts_barrier_t barrier; } ts_cluster;

/* A team inside a kernel, as its code describes it: `ranks` 0: first, count and step; else the count and then so many of the launch's
 * ranks, -1 for none. name: what its members call it; lowest: of them; block: whose meeting it is, TS_MAX_RESIDENT all blocks'. */
typedef struct ts_among { const int32_t* terms; int32_t ranks, lowest, block; int64_t name; } ts_among;

enum { TS_WAIT_NONE, TS_WAIT_SIGNAL, TS_WAIT_BARRIER, TS_WAIT_ENTRY, TS_WAIT_SYNC, TS_WAIT_EXIT, TS_WAIT_CHILDREN, TS_WAIT_AMONG,
       TS_WAIT_PACKETS };
/* Whether it waits for what an executor of another block sends: such waits have the launch's time limit, and know most of what is missing. */
static inline int ts_is_sent(int32_t why) { return why == TS_WAIT_SIGNAL || why == TS_WAIT_PACKETS; }
/* How a packet's word compares (as `cmp` of a wait): its upper half is the launch's number; of a dense box it is not 0. */
enum { TS_CMP_NUMBER = 6, TS_CMP_NOT = 3 };

/* A strand of execution: a block, or one index of a forked region. Kernels see it as their `ctx`. */
typedef struct ts_fiber {
  void* sp; /* where it stopped */
#if !defined(__x86_64__) && !defined(__aarch64__)
  void* uc;
#endif
  ts_launch* launch;
  struct ts_worker* worker;
  struct ts_fiber *next, *prev, *parent;
  /* what it waits for; flag null: it can run */
  _Atomic int64_t* flag;
  int64_t value, since;
  int32_t cmp, site, why, peer, of; /* of: how many a barrier awaits */
  ts_barrier_t* barrier;
  ts_among* among; /* the team with which it meets */
  /* who it is */
  int32_t block /* -1: the host's own waits */, xyz[3], region, index, done;
  uint8_t* arena;
  int64_t* frame;
  ts_cluster* cluster;
  int64_t phase; /* of the cluster's barrier, at which it has arrived */
  ts_barrier_t *block_barriers, own_barriers[TS_BLOCK_BARRIERS];
  _Atomic int64_t children;
  char* stack;
} ts_fiber;

typedef struct ts_worker {
  void* sp;
#if !defined(__x86_64__) && !defined(__aarch64__)
  void* uc;
#endif
  ts_fiber *ring, *spare; /* the next to look at; stacks to reuse */
  int64_t nfibers, idle, ticks, looks, passes;
  int32_t index;
  uint8_t* arena;
  int64_t arena_bytes, slab_bytes;
  ts_cluster* spare_clusters;
  int64_t signal_check, asked, polls;
  jmp_buf leave;  /* out of a block that runs on the thread's own stack */
  ts_fiber plain; /* the ctx of such a block */
} ts_worker;

/* ---- report.c */
int64_t ts_now(void);   /* ns, exact */
int64_t ts_about(void); /* ns, to a few milliseconds, cheaper */
void ts_launch_fail(ts_launch* L, int32_t site, const char* format, ...) __attribute__((format(printf, 3, 4)));
void ts_raise(ts_fiber* f, int32_t site, const char* format, ...) __attribute__((noreturn, format(printf, 3, 4)));
void ts_report_timeout(ts_fiber* f);
void ts_report_signal(ts_fiber* f, double limit, const char* known);
void ts_who(const ts_fiber* f, char out[96]);
const char* ts_dtype_name(int32_t code, int32_t bits, char out[32]);
int ts_error(const char* kind, const char* format, ...) __attribute__((format(printf, 2, 3)));

/* ---- fiber.c */
ts_worker* ts_self(void);
void ts_worker_run(ts_launch* L, ts_worker* W);
/* Lets the other fibers of this thread go on. */
void ts_yield(ts_fiber* f);
void ts_block_on(ts_fiber* f, _Atomic int64_t* flag, int64_t value, int32_t cmp, int32_t site, int32_t why);
void ts_leave(ts_fiber* f) __attribute__((noreturn));
ts_fiber* ts_spawn(ts_launch* L, ts_worker* W);
int ts_is_fiber(const ts_fiber* f);
uint8_t* ts_memory(int64_t bytes); /* zero pages, reserved lazily; null where the system has none */

/* ---- pool.c */
extern int64_t ts_time_limit; /* ns */
extern int32_t ts_spare;       /* multiprocessors that kernels on a team leave to others */
extern int ts_launch_graphs;  /* whether new GPU kernels are launched by graphs (gpu_graph.c) */
int ts_pool_threads(void);
void ts_pool_run(ts_launch* L);

/* ---- launch.c */
void ts_kernel_free(void* kernel);
const char* ts_parse_params(ts_kernel* K, const int64_t* d, const int64_t* end); /* null, or what is wrong */
int ts_parse_sites(ts_kernel* K, const char* text, size_t bytes);
int ts_make_label(ts_kernel* K, const TVMFFIByteArray* name);
int32_t ts_next_id(void);
int ts_bytes_of(const TVMFFIAny* a, TVMFFIByteArray* out);

/* ---- packets.c */
void ts_packets_count(const ts_launch* L); /* behind its blocks: one launch more has used its boxes */
void ts_packets_spoil(const ts_launch* L); /* it has failed */
int32_t ts_packets_spoiled(const ts_launch* L); /* the first dense box that a launch which failed has used, or -1 */

/* ---- check.c */
int ts_check_args(const ts_kernel* K, const TVMFFIAny* a, int32_t n, int64_t* slots, ts_arg* args);
/* Of the number of ranks that launch, as collectives ask for it: -1 where it is another one, and the error is set. */
int ts_check_demands(const ts_kernel* K, const int64_t* slots);

/* ---- heap.c and team.c */
int32_t ts_world_rank(void);
int32_t ts_world_size(void);
int ts_others_failed(char* out, size_t bytes); /* 1, and why, when another rank has stopped the job */
int ts_rank_gone(int32_t world_rank, char* out, size_t bytes); /* 1, and how, when that process has ended */
int ts_cannot_complete(const ts_launch* L, char* out, size_t bytes); /* 1, and who has ended without finishing the launch */
TS_API void ts_stop_others(const char* why);
void ts_teams_forget(void);
int32_t ts_heap_back_slot(int32_t slot);
int ts_team_of_args(const ts_kernel* K, const ts_arg* args, struct ts_team** team);
int32_t ts_team_rank(const struct ts_team* team);
int32_t ts_team_size(const struct ts_team* team);
int32_t ts_team_member(const struct ts_team* team, int32_t rank);
void ts_team_enter(ts_launch* L);
void ts_team_leave(ts_launch* L); /* after the blocks; awaits the others; may fail the launch */
void ts_touch(ts_fiber* f, int32_t rank, int32_t site);
_Atomic int64_t* ts_team_word(const struct ts_team* team, int32_t rank, int32_t block); /* block < 0: the device barrier's */
_Atomic int64_t* ts_among_word(const struct ts_team* team, int32_t rank, int32_t block); /* block: as in ts_among */
int32_t ts_missing_of(const ts_fiber* f); /* a rank that has not come to the meeting of `among` */
int ts_rank_waits(const ts_launch* L, int32_t rank); /* whether an executor of that rank waits for a signal */
void ts_describe_launch(const ts_launch* L, int32_t rank, char* out, size_t bytes);

static inline int ts_holds(int64_t x, int64_t value, int32_t cmp) {
  switch (cmp) {
    case 0: return x >= value;
    case 1: return x == value;
    case 2: return x > value;
    case 3: return x != value;
    case 4: return x <= value;
    case TS_CMP_NUMBER: return (int32_t)(x >> 32) == (int32_t)value;
    default: return x < value;
  }
}

/* Acquire: whoever changed the flag released it, so what it did before is visible to what comes after this load. */
static inline int ts_ready(const ts_fiber* f) {
  return !f->flag || ts_holds(atomic_load_explicit(f->flag, memory_order_acquire), f->value, f->cmp);
}

static inline int ts_failed(ts_launch* L) { return TS_UNLIKELY(atomic_load_explicit(&L->failed, memory_order_relaxed)); }

static inline void ts_relax(void) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield" ::: "memory");
#endif
}
#endif
