/* Teams of GPUs: where their symmetric memory lies, what a launch is told of them, and what one that failed says.
 *
 * Every rank has one arena in its GPU's memory, which the others can address; at `control` in it, for each team, the words of the protocol
 * that compiler/cuda/include/ts/team.cuh tells. The hosts' own part (ts_heap.h) stays in POSIX shared memory: letters, the word that stops
 * the job, and what each rank launched, in words. comm/arena.py sets all this up.
 */
#include "ts_gpu.h"
#include "ts_heap.h"
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* As ts::Record and ts::Why have it. */
typedef struct ts_record { int64_t state, why, kernel, control, site, block[3], rank, launch, value, seen, compare, index; } ts_record;
enum { LATE_SIGNAL = 1, LATE_ENTRY, LATE_EXIT, LATE_MEETING, LATE_BLOCKS, DIFFERENT, NO_RANK, NO_COUNTER, STOPPED, LATE_PACKETS, NO_SCRATCH, OVERLAP };
enum { ALONE = 64, ALONE_BYTES = 4096, MAX_DEVICES = 64, KNOWN = 4096 };

static struct {
  int32_t n, rank;
  char* base[TS_MAX_RANKS]; /* n of them; n = 0: there is no symmetric memory on a GPU */
  int64_t control, segment, limit;
  uint8_t* tags;
  const void* stop;
  int32_t recover; /* this process goes on behind a wait that a launch gave up */
} gpu;
static ts_record* the_record; /* page-locked, with one address for the host and all GPUs; null until the first launch that may fail */
static struct { int64_t control; int there; } in_team[TS_MAX_TEAMS];
/* The stream of the last launch on any team, and that of the last one which was captured, in which capture. */
static struct { void *stream, *event; uint64_t capture; int used; } last_of[2];

/* ---- set up from Python */

/* bases: where each rank's arena begins in this process. control: bytes at its head that are the world's words. */
TS_API int32_t ts_gpu_heap(int32_t n, int32_t rank, const int64_t* bases, int64_t segment, int64_t control, int64_t stop, int64_t limit) {
  memset(&gpu, 0, sizeof gpu);
  memset(in_team, 0, sizeof in_team);
  last_of[0].used = last_of[1].used = 0;
  gpu.tags = calloc((size_t)(segment / TS_PAGE) + 1, 1);
  if (!gpu.tags) return -1;
  for (int32_t r = 0; r < n; r++) gpu.base[r] = (char*)(intptr_t)bases[r];
  gpu.rank = rank, gpu.segment = segment, gpu.control = control, gpu.limit = limit;
  gpu.stop = (const void*)(intptr_t)stop;
  gpu.n = n;
  return 0;
}

void ts_gpu_forget_failure(void) {
  if (the_record) memset(the_record, 0, sizeof *the_record);
}

TS_API void ts_gpu_recover(int32_t recover) { gpu.recover = recover; }

TS_API void ts_gpu_close(void) { gpu.n = 0; }

/* From now on kernels reach other ranks by NVSHMEM (include/ts/nvshmem.cuh). init: nvshmemx_culibrary_init. */
static int (*library_init)(void*);
enum { FAR_BIT = 56 };
TS_API void ts_gpu_far(int64_t init) { library_init = (int (*)(void*))(intptr_t)init; }

int ts_gpu_loaded(void* library) { return library_init ? library_init(library) : 0; }

TS_API void ts_gpu_tag(int64_t offset, int64_t bytes, int32_t tag) {
  memset(gpu.tags + offset / TS_PAGE, tag, (size_t)((bytes + TS_PAGE - 1) / TS_PAGE));
}

/* Where the words of team `slot` lie; the team itself is ts_team_make's. */
TS_API void ts_gpu_team_at(int32_t slot, int64_t control) {
  in_team[slot].control = control;
  in_team[slot].there = 1;
}

/* Bytes of the control words of a team of `size` ranks. */
TS_API int64_t ts_gpu_control_bytes(int32_t size) {
  int64_t meetings = 3 + (int64_t)TS_MAX_RESIDENT, inside = 2 * (1 + (int64_t)TS_MAX_RESIDENT); /* of everyone, of teams inside kernels */
  return 8 * (16 + (meetings + inside) * size);
}

/* Of the word that stops the job, which GPUs look at while they wait. */
TS_API int64_t ts_stop_word(void) { return ts_the_heap.base ? (int64_t)(intptr_t)&ts_control_of(0)->stop : 0; }

static int of_a_peer(const char* p) {
  for (int32_t r = 0; r < gpu.n; r++)
    if (p >= gpu.base[r] && p < gpu.base[r] + gpu.segment) return 1;
  return 0;
}

ts_arena ts_gpu_arena(void) {
  return (ts_arena){gpu.n ? gpu.base[gpu.rank] : NULL, gpu.control, gpu.segment, gpu.tags, of_a_peer};
}

/* ---- a launch */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of what the first launches allocate */

static int make_record(void) {
  CUresult code = 0;
  pthread_mutex_lock(&lock);
  if (!the_record) {
    int mode = 2; /* CU_STREAM_CAPTURE_MODE_RELAXED: the first launch may stand in a capture */
    void* made = NULL;
    ts_cu.ThreadExchangeStreamCaptureMode(&mode);
    code = ts_cu.MemHostAlloc(&made, sizeof *the_record, 3); /* CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP */
    ts_cu.ThreadExchangeStreamCaptureMode(&mode);
    if (!code) memset(made, 0, sizeof *the_record), the_record = made;
  }
  pthread_mutex_unlock(&lock);
  return code ? ts_driver_failed("memory for what a launch says that fails", code) : 0;
}

/* Control words for launches without a team, a page each; launches take turns, and more than so many never run at once. */
static int words_alone(int device, char** out) {
  static char* pages[MAX_DEVICES];
  static uint32_t next;
  CUresult code = 0;
  pthread_mutex_lock(&lock);
  if (!pages[device]) {
    int mode = 2;
    void *stream = NULL, *made = NULL;
    ts_cu.ThreadExchangeStreamCaptureMode(&mode);
    code = ts_cu.MemAlloc(&made, ALONE * ALONE_BYTES);
    if (!code) code = ts_cu.StreamCreate(&stream, 1); /* CU_STREAM_NON_BLOCKING */
    if (!code) code = ts_cu.MemsetD8Async(made, 0, ALONE * ALONE_BYTES, stream);
    if (!code) code = ts_cu.StreamSynchronize(stream);
    ts_cu.ThreadExchangeStreamCaptureMode(&mode);
    if (!code) pages[device] = made;
  }
  if (!code) *out = pages[device] + (size_t)(next++ % ALONE) * ALONE_BYTES;
  pthread_mutex_unlock(&lock);
  return code ? ts_driver_failed("memory for blocks that meet", code) : 0;
}

int ts_gpu_view_of(const ts_kernel* K, const struct ts_team* team, int device, ts_gpu_view* out) {
  memset(out, 0, offsetof(ts_gpu_view, base));
  out->kernel = K->id;
  out->limit = team ? gpu.limit : ts_time_limit;
  if (TS_UNLIKELY(!the_record) && make_record()) return -1;
  out->record = the_record, out->stop = gpu.n ? gpu.stop : NULL;
  if (!team) {
    out->size = 1;
    return words_alone(device, &out->base[0]);
  }
  out->rank = ts_team_rank(team), out->size = ts_team_size(team);
  out->recover = gpu.recover;
  out->ordered = out->size > 1 && (K->flags & TS_FLAG_DEVICE) && !(K->flags & TS_FLAG_UNORDERED);
  out->control = in_team[ts_team_index(team)].control;
  for (int32_t r = 0; r < out->size; r++) {
    int32_t member = ts_team_member(team, r);
    out->base[r] = gpu.base[member];
    if (library_init && r != out->rank) /* a far address; the library's PEs are the world's ranks */
      out->base[r] = (char*)((uintptr_t)gpu.base[gpu.rank] | (uintptr_t)(member + 1) << FAR_BIT);
  }
  return 0;
}

static uint64_t mixed(uint64_t hash, uint64_t word) { return (hash ^ word) * 1099511628211u; } /* FNV-1a, a word at a time */

int64_t ts_gpu_describe(const ts_kernel* K, const ts_arg* args, const struct ts_team* team) {
  static __thread ts_description now;
  ts_put_description(K, args, team, gpu.base[gpu.rank], &now);
  uint64_t hash = mixed(mixed(1469598103934665603u, now.fingerprint), now.members);
  for (int32_t i = 0; i < now.nsymm; i++) {
    hash = mixed(hash, (uint64_t)now.symm[i].offset);
    for (int32_t d = 0; d < now.symm[i].ndim; d++) hash = mixed(hash, (uint64_t)now.symm[i].shape[d]);
  }
  hash = (hash ^ hash >> 32) & 0xffffffff; /* stands beside the launch's number */
  ts_slot* s = ts_team_slot(team, ts_team_rank(team));
  ts_launched* kept = &s->launched[hash % TS_LAUNCHED];
  if (atomic_load_explicit(&kept->hash, memory_order_relaxed) != hash) {
    atomic_store_explicit(&kept->hash, 0, memory_order_relaxed);
    snprintf(now.label, sizeof now.label, "%s", K->label);
    kept->what = now;
    /* Release: who finds the number may read what stands beside it. */
    atomic_store_explicit(&kept->hash, hash, memory_order_release);
  }
  atomic_store_explicit(&s->last, hash, memory_order_relaxed);
  return (int64_t)hash;
}

/* All launches on teams that a process makes are one sequence, whatever their teams and streams: each rank's GPU runs them in the order of
 * its host. Kernels that wait for other ranks may take a whole GPU, so two of them that were free to begin in any order could begin as A, B on
 * one GPU and as B, A on another, and wait for each other. In one order on every rank the launch that comes first of all that have not ended
 * is awaited by nobody who stands behind another one, so it ends.
 *
 * In a capture the same: an edge from the launch that was captured last. What comes before a graph, and beside it, is the program's to say
 * where it launches the graph; launches of a team that overlap all the same are found at their end (team.cuh).
 *
 * What a stream holds besides, between a launch and the next one on another stream, comes before that too: a program's copies from and to
 * symmetric memory, which the next launch may write. */
int ts_gpu_in_order(void* stream) {
  int status = 0, before = 0;
  uint64_t capture = 0;
  CUresult code = ts_cu.StreamGetCaptureInfo(stream, &status, &capture, NULL, NULL, NULL);
  int capturing = !code && status == 1; /* CU_STREAM_CAPTURE_STATUS_ACTIVE */
  if (!capturing) capture = 0;
  if (!code && last_of[capturing].used && last_of[capturing].stream != stream && last_of[capturing].capture == capture) {
    if (!capturing) code = ts_cu.StreamIsCapturing(last_of[0].stream, &before);
    if (before)
      return ts_error("RuntimeError", "TS:run:-1:the launch of a team before this one was made on a stream that is being captured now, and "
                      "this one on a stream that is not: nothing can order them");
    if (!code && !last_of[capturing].event) code = ts_cu.EventCreate(&last_of[capturing].event, 2); /* CU_EVENT_DISABLE_TIMING */
    if (!code) code = ts_cu.EventRecord(last_of[capturing].event, last_of[capturing].stream);
    if (!code) code = ts_cu.StreamWaitEvent(stream, last_of[capturing].event, 0);
  }
  if (code) return ts_driver_failed("ordering two streams of launches on teams", code);
  last_of[capturing].used = 1, last_of[capturing].stream = stream, last_of[capturing].capture = capture;
  return 0;
}

void ts_gpu_counters_of(const ts_kernel* K, const ts_arg* args, int signals, int boxes, ts_gpu_counters* out) {
  out->count = 0;
  for (int32_t i = 0; i < K->nparams; i++) {
    int box = boxes && ts_is_box(K->params[i].kind);
    if (!box && (!signals || K->params[i].kind != TS_KIND_SIGNAL || args[i].lo == args[i].hi)) continue;
    out->at[out->count] = args[i].lo;
    out->length[out->count++] = box ? -1 : (args[i].hi - args[i].lo) / 8;
  }
}

/* ---- what a launch that failed says */

static const ts_kernel* known[KNOWN];
static pthread_mutex_t knowing = PTHREAD_MUTEX_INITIALIZER;

void ts_gpu_known(const ts_kernel* K) {
  pthread_mutex_lock(&knowing);
  known[(uint32_t)K->id % KNOWN] = K;
  pthread_mutex_unlock(&knowing);
}

static void launched_by(const ts_slot* s, uint64_t hash, char* out, size_t bytes) {
  const ts_launched* kept = &s->launched[hash % TS_LAUNCHED];
  if (hash && atomic_load_explicit(&kept->hash, memory_order_acquire) == hash) ts_put_words(&kept->what, out, bytes);
  else snprintf(out, bytes, "%s", hash ? "something that it has forgotten" : "nothing");
}

static void put_late(const ts_record* r, const char* who, const struct ts_team* team, const char* name, char* out, size_t bytes) {
  char text[700];
  const char* what = r->why == LATE_ENTRY ? "reach" : r->why == LATE_EXIT ? "finish" : "arrive at the barrier of";
  const ts_slot* its = ts_team_slot(team, (int32_t)r->rank);
  int32_t world = ts_team_member(team, (int32_t)r->rank);
  launched_by(its, atomic_load_explicit(&its->last, memory_order_relaxed), text, sizeof text);
  snprintf(out, bytes, "%s: waited %g s for rank %d to %s launch %lld of their team (%s); rank %d launched last %s", who,
           (double)gpu.limit * 1e-9, world, what, (long long)r->launch, name, world, text);
  /* Its host has made this launch, or one like it: then the launch stands behind something on its GPU. */
  uint64_t own = atomic_load_explicit(&ts_team_slot(team, ts_team_rank(team))->last, memory_order_relaxed);
  size_t n = strlen(out);
  if (r->why == LATE_ENTRY && own && own == atomic_load_explicit(&its->last, memory_order_relaxed) && n < bytes)
    snprintf(out + n, bytes - n, ", as this rank did: what waits on that GPU's other streams may leave it no room (docs/OPS.md, Streams)");
}

static void put_different(const ts_record* r, const struct ts_team* team, char* out, size_t bytes) {
  char a[800], b[800];
  const ts_slot *mine = ts_team_slot(team, ts_team_rank(team)), *its = ts_team_slot(team, (int32_t)r->rank);
  int32_t me = ts_team_member(team, ts_team_rank(team)), it = ts_team_member(team, (int32_t)r->rank);
  const ts_launched *x = &mine->launched[(uint64_t)r->value % TS_LAUNCHED], *y = &its->launched[(uint64_t)r->seen % TS_LAUNCHED];
  int both = atomic_load(&x->hash) == (uint64_t)r->value && atomic_load(&y->hash) == (uint64_t)r->seen;
  const char* what = both ? ts_difference(&x->what, &y->what) : NULL;
  launched_by(mine, (uint64_t)r->value, a, sizeof a);
  launched_by(its, (uint64_t)r->seen, b, sizeof b);
  snprintf(out, bytes, "in launch %lld of their team ranks %d and %d launched %s: rank %d: %s | rank %d: %s", (long long)r->launch, me, it,
           what ? what : "different kernels", me, a, it, b);
}

static const struct ts_team* team_of(const ts_record* r) {
  for (int32_t k = 0; k < TS_MAX_TEAMS && gpu.n; k++)
    if (in_team[k].there && in_team[k].control == r->control) return ts_team_at(k);
  return NULL;
}

/* `arrived[1, 2]`; signals are row-major. */
static void put_counter(const ts_kernel* K, const char* name, int64_t at, char* out, size_t bytes) {
  const ts_param* p = NULL;
  for (int32_t i = 0; K && i < K->nparams; i++)
    if (K->params[i].kind >= TS_KIND_SIGNAL && !strcmp(K->params[i].name, name)) p = &K->params[i];
  int64_t index[TS_MAX_DIM];
  for (int32_t d = p ? p->ndim - 1 : -1; d >= 0; d--) {
    int64_t extent = d == 0 ? at + 1 : p->shape[d].how == TS_HOW_VALUE ? p->shape[d].value : 0;
    if (extent < 1) p = NULL; /* only the launch knew */
    if (!p) break;
    index[d] = at % extent;
    at /= extent;
  }
  size_t n = (size_t)snprintf(out, bytes, "%s", name);
  if (!p) return;
  for (int32_t d = 0; d < p->ndim && n < bytes; d++)
    n += (size_t)snprintf(out + n, bytes - n, "%s%lld%s", d ? ", " : "[", (long long)index[d], d + 1 == p->ndim ? "]" : "");
}

/* Behind what a wait says that took too long: `; by now rank 1 has ended`. */
static void put_gone(const struct ts_team* team, char* out, size_t bytes) {
  char one[600];
  for (int32_t k = 0; k < ts_team_size(team); k++) {
    size_t n = strlen(out);
    if (ts_rank_gone(ts_team_member(team, k), one, sizeof one)) snprintf(out + n, bytes - n, "; by now %s", one);
  }
}

static void put_failure(const ts_record* r, const ts_kernel* K, char* out, size_t bytes) {
  static const char* const sign[] = {">=", "==", ">", "!=", "<=", "<"};
  char who[96];
  int n = snprintf(who, sizeof who, "rank %d", ts_world_rank());
  if (r->why != LATE_EXIT)
    snprintf(who + n, sizeof who - (size_t)n, ", block (%lld, %lld, %lld)", (long long)r->block[0], (long long)r->block[1],
             (long long)r->block[2]);
  const ts_site* site = K && r->site >= 0 && r->site < K->nsites ? &K->sites[r->site] : NULL;
  const struct ts_team* team = team_of(r);
  const char* name = site && site->name[0] ? site->name : "a counter";
  double limit = (double)(gpu.n ? gpu.limit : ts_time_limit) * 1e-9;
  char others[600];
  if (r->why == LATE_SIGNAL) {
    char counter[200];
    put_counter(K, name, r->index, counter, sizeof counter);
    snprintf(out, bytes, "%s: waited %g s for %s: expected %s %lld, the value is %lld", who, limit, counter,
             sign[r->compare < 0 || r->compare > 5 ? 5 : r->compare], (long long)r->value, (long long)r->seen);
  } else if (r->why == LATE_PACKETS) {
    snprintf(out, bytes, "%s: waited %g s for packets of %s in launch %lld of those that use it", who, limit, name, (long long)r->value);
    size_t end = strlen(out);
    if (r->seen >= 0 && end < bytes) snprintf(out + end, bytes - end, r->seen ? ": those of launch %lld came last" : ": none came before", (long long)r->seen);
  } else if (r->why == NO_SCRATCH) {
    snprintf(out, bytes, "%s: copies of %s to and from ranks by NVSHMEM stage more than the %lld bytes of scratch: launch fewer blocks, or copy smaller tiles",
             who, name, (long long)r->seen);
  } else if (r->why == OVERLAP) {
    snprintf(out, bytes, "rank %d: two launches of one team ran at once, in or before launch %lld (%s): a CUDA graph that is replayed on one "
             "stream beside launches or a graph on another one needs an event between them", ts_world_rank(), (long long)r->launch,
             K ? K->name : "a kernel");
  } else if (r->why == LATE_BLOCKS) {
    snprintf(out, bytes, "%s: waited %g s at a barrier for other blocks", who, limit);
  } else if (r->why == DIFFERENT && team) {
    put_different(r, team, out, bytes);
  } else if (r->why == NO_RANK && TS_IS_OUTSIDE(r->rank)) {
    snprintf(out, bytes, "%s: rank %d is out of range of the team of its T.Scale", who, (int16_t)(r->rank - TS_OUTSIDE));
  } else if (r->why == NO_RANK) {
    int32_t size = team ? ts_team_size(team) : 1;
    snprintf(out, bytes, "%s: rank %lld is out of range: the team has %d rank%s", who, (long long)r->rank, size, size > 1 ? "s" : "");
  } else if (r->why == NO_COUNTER) {
    snprintf(out, bytes, "%s: an index of %s lies outside", who, name);
  } else if (r->why == STOPPED) {
    if (!ts_others_failed(others, sizeof others)) snprintf(others, sizeof others, "the job was stopped");
    snprintf(out, bytes, "%s", others);
  } else if (team) {
    put_late(r, who, team, K ? K->name : "a kernel", out, bytes);
  } else {
    snprintf(out, bytes, "%s: a launch failed", who);
  }
  if (team && (r->why <= LATE_MEETING || r->why == LATE_PACKETS)) put_gone(team, out, bytes);
}

int ts_gpu_failure(const ts_kernel** K, int32_t* site, char* out, size_t bytes) {
  const ts_record* r = the_record;
  /* Written by the GPU at the scope of the system, `state` last. */
  if (!r || __atomic_load_n(&r->state, __ATOMIC_ACQUIRE) != 2) return 0;
  pthread_mutex_lock(&knowing);
  *K = known[(uint32_t)r->kernel % KNOWN];
  if (*K && (*K)->id != r->kernel) *K = NULL;
  *site = (int32_t)r->site;
  put_failure(r, *K, out, bytes);
  pthread_mutex_unlock(&knowing);
  return 1;
}
