/* What instrumented kernels log on a GPU, and how a GPU's clock compares with the host's.
 *
 * Each GPU has one log for the process, in page-locked memory that it writes (compiler/cuda/include/ts/trace.cuh). Its address is the same
 * for every launch, so a replayed graph logs, too; and it can be read when a kernel has failed.
 *
 * The clock is compared when the first instrumented kernel is loaded and when the log is read: a kernel answers the host with the time, again
 * and again. The quickest answer counts: the GPU read its clock between the host's two looks, so the middle of them is off by at most half
 * of what lies between. Between the two comparisons the clocks are taken to drift evenly.
 */
#include "ts_gpu.h"
#include <pthread.h>
#include <sched.h>
#include <string.h>

enum { MAX_DEVICES = 64, TEAMS = 64, ROUNDS = 200, SLOTS = 1 << 20, HEAD = 128 /* ts::LOG_HEAD */, LATE = -1 };
enum { CU_STREAM_NON_BLOCKING = 1 };
#define PROMPT 100000LL /* ns in which a GPU answers that is nobody else's */
#define PATIENCE 10000000000LL /* ns that the GPU has for all answers: another process may have it for a while */

typedef struct { int64_t begin, end, amount; int32_t site, peer, block, thread, kernel, place; } event; /* ts::Event */
typedef struct { int64_t asked, answered, time; } rounds;                                            /* ts::Rounds */
typedef struct { int64_t gpu, host, within; } sample;

static struct {
  event* events;
  uint64_t* lost; /* events without a slot */
  void* taken;    /* how many slots are taken; the GPU's memory */
  rounds* answers;
  void *clock, *stream;
  sample samples[2]; /* the first comparison, the latest */
  int nsamples;
} logs[MAX_DEVICES];
static struct { int32_t size, members[TS_MAX_RANKS]; } teams[TEAMS];
static int nteams;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* One comparison of clocks; the device is current. LATE: the GPU did not answer in time. */
static CUresult compare(int device, sample* out) {
  rounds* r = logs[device].answers;
  int64_t limit = PATIENCE;
  int count = ROUNDS, late = 0;
  CUlaunchConfig c = {.gridDimX = 1, .gridDimY = 1, .gridDimZ = 1, .blockDimX = 1, .blockDimY = 1, .blockDimZ = 1,
                      .hStream = logs[device].stream};
  __atomic_store_n(&r->asked, 0, __ATOMIC_RELAXED);
  __atomic_store_n(&r->answered, 0, __ATOMIC_RELEASE);
  CUresult code = ts_cu.LaunchKernelEx(&c, logs[device].clock, (void*[]){&r, &count, &limit}, NULL);
  if (code) return code;
  out->within = INT64_MAX;
  const int64_t deadline = ts_now() + limit;
  for (int64_t k = 1; k <= ROUNDS && !late; k++) {
    const int64_t before = ts_now();
    int64_t after = before;
    __atomic_store_n(&r->asked, k, __ATOMIC_RELEASE);
    /* Acquire: the time stands beside the number (ts_clock releases it at the scope of the system). */
    while (__atomic_load_n(&r->answered, __ATOMIC_ACQUIRE) != k && !late) {
      const int64_t now = ts_now();
      late = now > deadline;
      if (now - before > PROMPT) sched_yield(); /* the quickest round counts, which this one is not any more */
    }
    after = ts_now();
    if (!late && (after - before + 1) / 2 < out->within)
      *out = (sample){r->time, before + (after - before) / 2, (after - before + 1) / 2};
  }
  if (late) return LATE; /* the kernel ends by itself: nobody waits for it */
  return ts_cu.StreamSynchronize(logs[device].stream);
}

static int refused(CUresult code) {
  if (code == LATE)
    return ts_error("RuntimeError", "TS:run:-1:the GPU did not answer within %lld s, so its clock cannot be compared with the host's",
                    PATIENCE / 1000000000LL);
  return ts_driver_failed("preparing the log of an instrumented kernel", code);
}

int ts_gpu_log_ready(int device, void* library) {
  CUresult code = 0;
  void* page = NULL;
  pthread_mutex_lock(&lock);
  if (!logs[device].events) {
    code = ts_cu.LibraryGetKernel(&logs[device].clock, library, "ts_clock");
    if (!code) code = ts_cu.StreamCreate(&logs[device].stream, CU_STREAM_NON_BLOCKING);
    /* CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP */
    if (!code) code = ts_cu.MemHostAlloc(&page, HEAD + (size_t)SLOTS * sizeof(event), 3);
    if (!code) code = ts_cu.MemAlloc(&logs[device].taken, sizeof(uint64_t));
    if (!code) code = ts_cu.MemsetD8Async(logs[device].taken, 0, sizeof(uint64_t), logs[device].stream);
    if (!code) {
      memset(page, 0, HEAD + (size_t)SLOTS * sizeof(event));
      logs[device].lost = page, logs[device].answers = (rounds*)((char*)page + 64);
      code = compare(device, &logs[device].samples[0]); /* behind the memset in its stream, which it waits for */
    }
    if (!code) logs[device].nsamples = 1, logs[device].events = (event*)((char*)page + HEAD);
  }
  pthread_mutex_unlock(&lock);
  return code ? refused(code) : 0;
}

/* The number of a team's members: a team may be gone when the log is read. */
static int number_of(const struct ts_team* team) {
  int32_t size = team ? ts_team_size(team) : 0, members[TS_MAX_RANKS] = {0};
  for (int32_t r = 0; r < size; r++) members[r] = ts_team_member(team, r);
  int k = 0;
  pthread_mutex_lock(&lock);
  while (k < nteams && (teams[k].size != size || memcmp(teams[k].members, members, sizeof members))) k++;
  if (k == nteams && nteams < TEAMS) {
    teams[nteams].size = size;
    memcpy(teams[nteams++].members, members, sizeof members);
  }
  pthread_mutex_unlock(&lock);
  return k < TEAMS ? k : ts_error("RuntimeError", "TS:run:-1:instrumented kernels know at most %d teams", TEAMS);
}

int ts_gpu_log_of(int device, int32_t kernel, const struct ts_team* team, ts_gpu_log* out) {
  *out = (ts_gpu_log){logs[device].events, logs[device].taken, SLOTS, kernel, number_of(team)};
  return out->team < 0 ? -1 : 0;
}

/* ---- from Python */

/* The world rank of a launch's rank, by the team's number in an event. */
TS_API int32_t ts_gpu_log_rank(int32_t team, int32_t rank) {
  return team >= 0 && team < nteams && rank >= 0 && rank < teams[team].size ? teams[team].members[rank] : rank;
}

/* Waits for all that a GPU was given, and compares its clock again. empty: no slot is taken any more. */
static void settle(int device, int empty) {
  void* context = NULL;
  CUresult code = ts_cu.DevicePrimaryCtxRetain(&context, device);
  if (!code) code = ts_cu.CtxPushCurrent(context);
  if (code) return;
  code = ts_cu.CtxSynchronize();
  if (!code && empty) code = ts_cu.MemsetD8Async(logs[device].taken, 0, sizeof(uint64_t), logs[device].stream);
  if (!code && !compare(device, &logs[device].samples[1])) logs[device].nsamples = 2;
  ts_cu.CtxPopCurrent(&context);
}

/* How many slots may hold events: threads take them in order, and what follows the last that was used is as it was. */
static int64_t kept_of(int device) {
  int64_t k = SLOTS;
  while (k && !logs[device].events[k - 1].end) k--;
  return k;
}

/* The log of a GPU, once all that it was given is done, and its clock compared again; null where it has none. kept: slots that may hold
 * events, lost: events without one. samples: two of (GPU's ns, host's ns, ± ns), of which *nsamples are known; one where the GPU has failed. */
TS_API const event* ts_gpu_events(int32_t device, int64_t* kept, int64_t* lost, int32_t* nsamples, int64_t samples[6]) {
  if (device < 0 || device >= MAX_DEVICES || !logs[device].events) return NULL;
  settle(device, 0);
  *kept = kept_of(device), *lost = (int64_t)*logs[device].lost, *nsamples = logs[device].nsamples;
  memcpy(samples, logs[device].samples, sizeof logs[device].samples);
  return logs[device].events;
}

/* Empties the logs, once all that the GPUs were given is done. */
TS_API void ts_gpu_events_clear(void) {
  for (int device = 0; device < MAX_DEVICES; device++) {
    if (!logs[device].events) continue;
    settle(device, 1);
    memset(logs[device].events, 0, (size_t)kept_of(device) * sizeof(event));
    *logs[device].lost = 0;
  }
}
