/* Launches of CUDA kernels: a call's arguments checked like the CPU's, then one cuLaunchKernelEx on the current stream.
 *
 * The driver is opened when the first kernel is called, by its soname: nothing links to it, and machines without one import, compile and
 * print all the same. What we need of <cuda.h> is declared here; tests/unit/cuda/test_launcher.py compares it with the real header.
 *
 * make_cuda_kernel's `desc` is a little-endian int64 array:
 *   [0] version = 1   [1] nparams   [2] nsyms   [3] threads   [4] bytes of dynamic shared memory   [5] flags   [6..8] cluster
 *   [9] nargs         [10] nmaps    [11] words of the grid's programs                [12] fingerprint, which ranks compare
 *   then nargs × (form, index)      0: slot `index` as it lies there   1: slot `index`, a double, as a float   2: tensor map `index`
 *                                   3: the kernel's failure record on the launch's device   4: the team (ts_gpu_view)   5: the log (ts_gpu_log)
 *   then nmaps × (param, data type, rank, swizzle, L2 promotion, box[0 … rank), outermost axis first)
 *   then the grid's programs: for x, y and z the number of pairs, then (operation, value) in postfix order
 *   then nparams × alignment in bytes that the kernel relies on
 *   then the parameters as in make_kernel's `desc`
 * Slots are those of the CPU target: the parameters, rank, world, the symbols.
 * Flags: 1 all blocks resident together (cooperative)   2 dependent launch   4 reaches other ranks, between the flags of team.cuh
 *   8 without those (unordered)   16 the code has ts_pass   32, 64 see FLAG_BARE, FLAG_AWAITED
 */
#include "ts_gpu.h"
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <tvm/ffi/extra/c_env_api.h>

#define HEAD 13
enum { MAX_MAPS = 16, MAX_BOX = 5, MAX_DEVICES = 64, WAYS = 4, RECORD = 3 /* words of a failure record */ };
enum { FLAG_COOPERATIVE = 1, FLAG_DEPENDENT = 2, FLAG_DEVICE = 4, FLAG_UNORDERED = 8, FLAG_TEAM = 16,
       FLAG_BARE = 32 /* nothing counts or flags its launches: packets alone reach other ranks (compiler/passes/packets.py) */,
       FLAG_AWAITED = 64 /* a rank awaits all that is aimed at it, and so nobody's exit (compiler/passes/awaited.py) */ };
enum { FORM_SLOT, FORM_FLOAT, FORM_MAP, FORM_FAILURE, FORM_TEAM, FORM_LOG };
enum { OP_CONST, OP_SLOT, OP_ADD, OP_SUB, OP_MUL, OP_FLOORDIV, OP_FLOORMOD, OP_MIN, OP_MAX };

/* ---- of <cuda.h> */
enum { CU_LAUNCH_ATTRIBUTE_COOPERATIVE = 2, CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION = 4,
       CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION = 6, CU_STREAM_CAPTURE_MODE_RELAXED = 2,
       CU_MEMHOSTALLOC_PORTABLE = 1, CU_MEMHOSTALLOC_DEVICEMAP = 2,
       CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8, CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT = 9,
       CU_SHAREDMEM_CARVEOUT_MAX_SHARED = 100, CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED = 14,
       CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16,
       CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76 };

ts_driver ts_cu;
#define cu ts_cu

static const struct { void** to; const char* name; } entries[] = {
  {(void**)&cu.Init, "cuInit"},
  {(void**)&cu.GetErrorString, "cuGetErrorString"},
  {(void**)&cu.DeviceGetAttribute, "cuDeviceGetAttribute"},
  {(void**)&cu.CtxGetDevice, "cuCtxGetDevice"},
  {(void**)&cu.CtxPushCurrent, "cuCtxPushCurrent_v2"},
  {(void**)&cu.CtxPopCurrent, "cuCtxPopCurrent_v2"},
  {(void**)&cu.DevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain"},
  {(void**)&cu.LibraryLoadData, "cuLibraryLoadData"},
  {(void**)&cu.LibraryGetKernel, "cuLibraryGetKernel"},
  {(void**)&cu.KernelSetAttribute, "cuKernelSetAttribute"},
  {(void**)&cu.ThreadExchangeStreamCaptureMode, "cuThreadExchangeStreamCaptureMode"},
  {(void**)&cu.LaunchKernelEx, "cuLaunchKernelEx"},
  {(void**)&cu.MemHostAlloc, "cuMemHostAlloc"},
  {(void**)&cu.CtxSynchronize, "cuCtxSynchronize"},
  {(void**)&cu.TensorMapEncodeTiled, "cuTensorMapEncodeTiled"},
  {(void**)&cu.OccupancyMaxActiveBlocksPerMultiprocessor, "cuOccupancyMaxActiveBlocksPerMultiprocessor"},
  {(void**)&cu.MemAlloc, "cuMemAlloc_v2"},
  {(void**)&cu.MemsetD8Async, "cuMemsetD8Async"},
  {(void**)&cu.StreamCreate, "cuStreamCreate"},
  {(void**)&cu.StreamSynchronize, "cuStreamSynchronize"},
  {(void**)&cu.StreamIsCapturing, "cuStreamIsCapturing"},
  {(void**)&cu.StreamGetCaptureInfo, "cuStreamGetCaptureInfo_v2"},
  {(void**)&cu.StreamWaitEvent, "cuStreamWaitEvent"},
  {(void**)&cu.EventCreate, "cuEventCreate"},
  {(void**)&cu.EventRecord, "cuEventRecord"},
  {(void**)&cu.GraphCreate, "cuGraphCreate"},
  {(void**)&cu.GraphAddKernelNode, "cuGraphAddKernelNode_v2"},
  {(void**)&cu.GraphKernelNodeSetAttribute, "cuGraphKernelNodeSetAttribute"},
  {(void**)&cu.GraphInstantiateWithFlags, "cuGraphInstantiateWithFlags"},
  {(void**)&cu.GraphExecKernelNodeSetParams, "cuGraphExecKernelNodeSetParams_v2"},
  {(void**)&cu.GraphLaunch, "cuGraphLaunch"},
  {(void**)&cu.GraphExecDestroy, "cuGraphExecDestroy"},
  {(void**)&cu.GraphDestroy, "cuGraphDestroy"},
};

static pthread_once_t opened = PTHREAD_ONCE_INIT;
static char no_driver[512]; /* why there is none; empty where there is */
static void* contexts[MAX_DEVICES]; /* primary contexts that we retained, to launch on devices that are not current */

static const char* said(CUresult code) {
  const char* text = NULL;
  return cu.GetErrorString && !cu.GetErrorString(code, &text) && text ? text : "an unknown error";
}

static void open_driver(void) {
  void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  if (!driver) {
    snprintf(no_driver, sizeof no_driver, "this machine has no CUDA driver (%s)", dlerror());
    return;
  }
  for (size_t k = 0; k < sizeof entries / sizeof *entries; k++) {
    *entries[k].to = dlsym(driver, entries[k].name);
    if (*entries[k].to) continue;
    snprintf(no_driver, sizeof no_driver, "this machine's CUDA driver is too old: %s is missing (CUDA 12 or newer is needed)",
             entries[k].name);
    return;
  }
  CUresult code = cu.Init(0);
  if (code) snprintf(no_driver, sizeof no_driver, "the CUDA driver does not start (cuInit): %s", said(code));
}

/* ---- a kernel */
typedef struct { int64_t form, index; } gpu_arg;

typedef struct {
  int32_t param, type, rank, swizzle, l2;
  int64_t box[MAX_BOX];
} gpu_map;

/* One tensor map that was encoded before: of which memory, and the map. */
typedef struct {
  CUtensorMap map;
  const void* data;
  int64_t shape[MAX_BOX], stride[MAX_BOX];
  int32_t valid;
} gpu_cached;

typedef struct ts_gpu {
  ts_kernel* K;
  char *code, *symbol;
  void *library, *kernel, *pass;
  _Atomic uint64_t ready; /* devices whose attributes of the kernel are set, a bit each */
  int64_t* words;         /* the description: what follows points into it */
  const gpu_arg* args;
  const int64_t* program[3];
  gpu_map* maps;
  gpu_cached* cached; /* nmaps × WAYS */
  ts_graphs* graphs; /* null: it is never launched by one */
  int32_t nargs, nmaps, next_way, nattrs, flags;
  uint32_t threads, shared;
  int64_t resident[MAX_DEVICES]; /* blocks at once, where they wait for one another */
  CUlaunchAttribute attrs[3];
  atomic_flag lock; /* of `cached` */
  pthread_mutex_t loading;
  int32_t can_fail, logs;
  uint64_t* records;        /* RECORD words a device, in memory that GPUs write; null until the first launch, and where nothing can fail */
  struct ts_gpu* next_failing; /* in `failing` */
} ts_gpu;

/* Kernels that have records. They are never freed: a launch may still run when its kernel object is dropped. */
static struct ts_gpu* _Atomic failing;
static _Atomic int told; /* whether a failure was raised */

/* The code stays loaded: launches may still be running, and graphs that captured one keep the kernel without telling us. */
static void gpu_free(void* p) {
  ts_gpu* G = p;
  ts_graphs_free(G->graphs);
  if (G->records || G->flags & FLAG_TEAM) return; /* what a failed launch says is looked up in its kernel */
  if (G->K) ts_kernel_free(G->K);
  free(G->code);
  free(G->symbol);
  free(G->words);
  free(G->maps);
  free(G->cached);
  free(G);
}

typedef struct { const char *kernel, *file, *line; char why[TS_MESSAGE]; } failure;

/* The failure that some kernel has recorded (ts::fail in include/ts/warp.cuh), or a launch on a team (gpu_team.c); 0 where there is none.
 * The GPU is lost to this process by then: every call fails, and this is why. (Not where the process goes on behind a wait that was given up:
 * there our calls fail, until comm.finalize.) Read without locks: a record is written once, before the
 * driver can tell of the trap behind it. */
static int find_failure(failure* out) {
  for (ts_gpu* G = atomic_load_explicit(&failing, memory_order_acquire); G; G = G->next_failing)
    for (int device = 0; device < MAX_DEVICES; device++) {
      const volatile uint64_t* record = G->records + device * RECORD;
      uint64_t who = record[0], grid = record[1];
      if (!(who >> 63)) continue;
      uint64_t block = who & ((1ull << 42) - 1), x = (uint32_t)grid ? (uint32_t)grid : 1, y = grid >> 32 ? grid >> 32 : 1;
      int64_t number = (int64_t)(who >> 52 & 2047);
      static const ts_site none = {"an assertion", "", "", "", ""};
      const ts_site* at = number < G->K->nsites ? &G->K->sites[number] : &none;
      out->kernel = G->symbol, out->file = at->file, out->line = at->line;
      snprintf(out->why, sizeof out->why, "block (%llu, %llu, %llu), thread %llu: %s failed: %s", (unsigned long long)(block % x),
               (unsigned long long)(block / x % y), (unsigned long long)(block / x / y), (unsigned long long)(who >> 42 & 1023), at->kind,
               at->text);
      return 1;
    }
  const ts_kernel* K = NULL;
  int32_t site = -1;
  if (!ts_gpu_failure(&K, &site, out->why, sizeof out->why)) return 0;
  int known = K && site >= 0 && site < K->nsites;
  out->kernel = K ? K->name : "a kernel", out->file = known ? K->sites[site].file : "", out->line = known ? K->sites[site].line : "";
  return 1;
}

/* As `TS:failed:<kernel>|<file>|<line>|<why>`. */
static int recorded(char* out, size_t bytes) {
  failure f;
  if (!find_failure(&f)) return 0;
  snprintf(out, bytes, "TS:failed:%s|%s|%s|%s", f.kernel, f.file, f.line, f.why);
  return 1;
}

/* As a line for people: 1 where there is one. */
TS_API int32_t ts_gpu_says(char* out, int32_t n) {
  failure f;
  if (!find_failure(&f)) return 0;
  int has = f.file[0] != 0;
  snprintf(out, (size_t)n, "%s: %s%s%s%s%s%s", f.kernel, f.why, has ? " (" : "", f.file, has ? ":" : "", f.line, has ? ")" : "");
  return 1;
}

/* Of a job before, whose launches have ended: nothing more is said of it. */
TS_API void ts_gpu_forget(void) {
  ts_gpu_forget_failure();
  atomic_store(&told, 0);
}

int ts_driver_failed(const char* what, CUresult code) {
  char text[TS_MESSAGE];
  if (recorded(text, sizeof text)) {
    atomic_store(&told, 1);
    return ts_error("RuntimeError", "%s", text);
  }
  return ts_error("RuntimeError", "TS:run:-1:%s: %s", what, said(code));
}

#define failed ts_driver_failed

/* Memory for the records of a kernel that can fail. Page-locked memory has one address for the host and all GPUs (CUDA C++ Programming
 * Guide, "Unified Virtual Address Space"). */
static CUresult make_records(ts_gpu* G) {
  void* page = NULL;
  CUresult code = cu.MemHostAlloc(&page, MAX_DEVICES * RECORD * sizeof(uint64_t), CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP);
  if (code) return code;
  memset(page, 0, MAX_DEVICES * RECORD * sizeof(uint64_t));
  G->records = page;
  for (int device = 0; device < MAX_DEVICES; device++) G->records[device * RECORD + 2] = (uint64_t)ts_time_limit; /* of shared_wait */
  G->next_failing = atomic_load(&failing);
  while (!atomic_compare_exchange_weak(&failing, &G->next_failing, G)) continue;
  return 0;
}

/* The kernel in the place of one without blocks, and how those that wait for other ranks are placed. A multiprocessor splits its memory into L1 and shared
 * memory for the blocks that it holds, and changes that only while it holds none: the driver gives a kernel that needs little shared memory
 * little, and beside blocks of it that wait no block finds a place that needs more. Where ranks share a GPU that one may be what the others
 * wait for: so what waits asks for all the shared memory that there is. */
static CUresult make_team_ready(ts_gpu* G, int device) {
  CUresult code = cu.LibraryGetKernel(&G->pass, G->library, "ts_pass");
  void* waiting[] = {G->kernel, G->pass};
  for (int k = 0; k < 2 && !code && (G->flags & FLAG_DEVICE || G->K->nsymm); k++)
    code = cu.KernelSetAttribute(CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, CU_SHAREDMEM_CARVEOUT_MAX_SHARED, waiting[k], device);
  return code;
}

/* Loads the code and sets the kernel's attributes on a device: once each. */
static int make_ready(ts_gpu* G, int device) {
  pthread_mutex_lock(&G->loading);
  /* Loading may allocate, which a stream capture in another mode than this would refuse. */
  int mode = CU_STREAM_CAPTURE_MODE_RELAXED;
  cu.ThreadExchangeStreamCaptureMode(&mode);
  const char* what = NULL;
  CUresult code = 0;
  if (!G->kernel) {
    what = "loading the code (cuLibraryLoadData)";
    if (!G->library) {
      code = cu.LibraryLoadData(&G->library, G->code, NULL, NULL, 0, NULL, NULL, 0);
      if (!code && G->flags & FLAG_TEAM && ts_gpu_loaded(G->library)) {
        cu.ThreadExchangeStreamCaptureMode(&mode);
        G->library = NULL; /* so that the next launch is refused too */
        pthread_mutex_unlock(&G->loading);
        return ts_error("RuntimeError", "TS:run:-1:NVSHMEM does not take the kernel's code (nvshmemx_culibrary_init)");
      }
    }
    if (!code) what = "finding the kernel (cuLibraryGetKernel)", code = cu.LibraryGetKernel(&G->kernel, G->library, G->symbol);
  }
  if (!code && G->shared > 48 << 10) {
    what = "asking for shared memory (cuKernelSetAttribute)";
    code = cu.KernelSetAttribute(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, (int)G->shared, G->kernel, device);
  }
  if (!code && G->K->cluster_size > 8) {
    what = "asking for large clusters (cuKernelSetAttribute)";
    code = cu.KernelSetAttribute(CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1, G->kernel, device);
  }
  if (!code && G->flags & FLAG_TEAM) {
    what = "preparing the kernels of a launch on a team (cuLibraryGetKernel, cuKernelSetAttribute)";
    code = make_team_ready(G, device);
  }
  if (!code && G->flags & FLAG_COOPERATIVE) {
    int blocks = 0, processors = 0;
    what = "asking how many blocks are resident at once (cuOccupancyMaxActiveBlocksPerMultiprocessor)";
    code = cu.OccupancyMaxActiveBlocksPerMultiprocessor(&blocks, G->kernel, (int)G->threads, G->shared);
    if (!code) code = cu.DeviceGetAttribute(&processors, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device);
    if (G->flags & FLAG_DEVICE) processors = processors > ts_spare ? processors - ts_spare : 0;
    G->resident[device] = (int64_t)blocks * processors / G->K->cluster_size * G->K->cluster_size;
  }
  int bad = 0;
  if (!code && G->logs) bad = ts_gpu_log_ready(device, G->library);
  if (!code && G->can_fail && !G->records) what = "memory for failures (cuMemHostAlloc)", code = make_records(G);
  cu.ThreadExchangeStreamCaptureMode(&mode);
  if (!code && !bad) atomic_fetch_or_explicit(&G->ready, 1ull << device, memory_order_release);
  pthread_mutex_unlock(&G->loading);
  return code ? failed(what, code) : bad;
}

/* ---- one call */

static int64_t floor_div(int64_t a, int64_t b) { return b ? a / b - (a % b != 0 && (a % b < 0) != (b < 0)) : 0; }

static int64_t evaluate(const int64_t* program, const int64_t* slots) {
  int64_t stack[32], *top = stack;
  for (int64_t n = *program++; n > 0; n--, program += 2) {
    int64_t op = program[0], v = program[1];
    if (op <= OP_SLOT) {
      *top++ = op == OP_CONST ? v : slots[v];
      continue;
    }
    int64_t b = *--top, a = top[-1];
    top[-1] = op == OP_ADD ? a + b : op == OP_SUB ? a - b : op == OP_MUL ? a * b : op == OP_FLOORDIV ? floor_div(a, b)
              : op == OP_FLOORMOD ? a - floor_div(a, b) * b : op == OP_MIN ? (a < b ? a : b) : (a > b ? a : b);
  }
  return stack[0];
}

/* 0, 1: nothing to launch, -1: refused */
static int plan(const ts_gpu* G, const int64_t* slots, CUlaunchConfig* c) {
  static const int64_t most[3] = {INT32_MAX, 65535, 65535};
  uint32_t* grid = &c->gridDimX;
  int empty = 0;
  int64_t all = 1;
  for (int k = 0; k < 3; k++) {
    int64_t extent = evaluate(G->program[k], slots);
    if (TS_UNLIKELY(extent < 0 || extent > most[k] || (all *= extent) > INT32_MAX)) /* numbers of blocks are of 32 bits */
      return ts_error("ValueError", "TS:grid:-1:%d:%lld:%lld", k, (long long)most[k], (long long)extent);
    if (TS_UNLIKELY(extent % G->K->cluster[k]))
      return ts_error("ValueError", "TS:cluster:-1:%d:%d:%lld", k, G->K->cluster[k], (long long)extent);
    grid[k] = (uint32_t)extent;
    empty |= extent == 0;
  }
  return empty;
}

/* Where the tensor map of an empty tensor points, since the driver encodes no extent of zero: a first element that reads zero, as what lies
 * outside a tensor does, or, of a tensor that the kernel writes, one that nobody else reads. One page for all kernels and GPUs. */
static CUresult nowhere(int written, void** at) {
  enum { PART = 256 };
  static _Atomic(char*) page;
  char* made = atomic_load_explicit(&page, memory_order_acquire);
  if (!made) {
    int mode = CU_STREAM_CAPTURE_MODE_RELAXED; /* a stream that is being captured does not mind */
    cu.ThreadExchangeStreamCaptureMode(&mode);
    void* fresh = NULL;
    CUresult code = cu.MemHostAlloc(&fresh, 2 * PART, CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP);
    cu.ThreadExchangeStreamCaptureMode(&mode);
    if (code) return code;
    memset(fresh, 0, 2 * PART);
    if (atomic_compare_exchange_strong(&page, &made, fresh)) made = fresh; /* else another thread's, whose page `made` is now */
  }
  *at = made + (written ? PART : 0);
  return 0;
}

static int encode(const ts_gpu* G, const gpu_map* m, const DLTensor* t, const char* data, const int64_t* stride, gpu_cached* out) {
  int64_t size = G->K->params[m->param].bits / 8;
  uint64_t dims[MAX_BOX], strides[MAX_BOX];
  uint32_t box[MAX_BOX], steps[MAX_BOX];
  void* base = (void*)data;
  int empty = 0;
  for (int32_t d = 0; d < m->rank; d++) empty |= t->shape[d] == 0;
  CUresult code = TS_UNLIKELY(empty) ? nowhere(G->K->params[m->param].written, &base) : 0;
  if (code) return failed("memory for an empty tensor's map (cuMemHostAlloc)", code);
  for (int32_t k = 0; k < m->rank; k++) { /* the driver counts from the innermost axis */
    int32_t d = m->rank - 1 - k;
    dims[k] = (uint64_t)t->shape[d], box[k] = (uint32_t)m->box[d], steps[k] = 1;
    if (TS_UNLIKELY(empty)) {
      dims[k] = 1;
      if (k) strides[k - 1] = 16;
      continue;
    }
    if (k == 0) {
      if (stride[d] != 1 && t->shape[d] > 1)
        return ts_error("ValueError", "TS:tma:%d:%d:1:%lld", m->param, d, (long long)stride[d]);
      continue;
    }
    strides[k - 1] = (uint64_t)(stride[d] * size);
    if (stride[d] < 0 || stride[d] * size % 16) /* CUDA Driver API, cuTensorMapEncodeTiled: globalStrides */
      return ts_error("ValueError", "TS:tma:%d:%d:%lld:%lld", m->param, d, (long long)(16 / size), (long long)stride[d]);
  }
  code = cu.TensorMapEncodeTiled(&out->map, m->type, (uint32_t)m->rank, base, dims, strides, box, steps, 0, m->swizzle,
                                          m->l2, 0);
  if (code) return failed("encoding a tensor map (cuTensorMapEncodeTiled)", code);
  out->data = data, out->valid = 1;
  for (int32_t d = 0; d < m->rank; d++) out->shape[d] = t->shape[d], out->stride[d] = stride[d];
  return 0;
}

/* Tensor map k of this call: one that was encoded for the same memory before, else a new one. */
static int tensor_map(ts_gpu* G, int32_t k, const ts_arg* args, const int64_t* slots, CUtensorMap* out) {
  const gpu_map* m = &G->maps[k];
  const DLTensor* t = args[m->param].tensor;
  const char* data = (const char*)(intptr_t)slots[m->param];
  int64_t stride[MAX_BOX], packed = 1;
  for (int32_t d = m->rank - 1; d >= 0; d--) {
    stride[d] = t->strides && t->shape[d] > 1 ? t->strides[d] : packed;
    packed *= t->shape[d];
  }
  gpu_cached* c = G->cached + k * WAYS;
  size_t words = (size_t)m->rank * sizeof(int64_t);
  while (atomic_flag_test_and_set_explicit(&G->lock, memory_order_acquire)) ts_relax();
  int32_t way = 0;
  while (way < WAYS && !(c[way].valid && c[way].data == data && !memcmp(c[way].shape, t->shape, words) &&
                         !memcmp(c[way].stride, stride, words)))
    way++;
  int bad = 0;
  if (TS_UNLIKELY(way == WAYS)) {
    way = G->next_way++ % WAYS;
    c[way].valid = 0;
    bad = encode(G, m, t, data, stride, &c[way]);
  }
  if (!bad) *out = c[way].map;
  atomic_flag_clear_explicit(&G->lock, memory_order_release);
  return bad;
}

/* The device that all tensors lie on; the current one where there are none. */
static int device_of(const ts_gpu* G, const ts_arg* args, int current) {
  int device = -1;
  for (int32_t i = 0; i < G->K->nparams; i++) {
    if (!args[i].tensor) continue;
    int32_t own = args[i].tensor->device.device_id;
    if (device < 0) device = own;
    else if (TS_UNLIKELY(own != device)) return ts_error("ValueError", "TS:gpu:%d:-1:%d:%d", i, device, own);
  }
  return device < 0 ? (current < 0 ? 0 : current) : device;
}

/* The kernel itself. */
static int launch(ts_gpu* G, const struct ts_team* team, const ts_arg* args, int64_t* slots, int device, ts_gpu_view* view,
                  CUlaunchConfig* c) {
  void* values[TS_MAX_SLOTS];
  uint64_t* record = G->records ? G->records + device * RECORD : NULL;
  float floats[TS_MAX_PARAMS];
  CUtensorMap maps[MAX_MAPS];
  ts_gpu_log log;
  if (TS_UNLIKELY(G->logs && ts_gpu_log_of(device, G->K->id, team, &log))) return -1;
  for (int32_t k = 0; k < G->nmaps; k++)
    if (tensor_map(G, k, args, slots, &maps[k])) return -1;
  int32_t nfloats = 0;
  for (int32_t k = 0; k < G->nargs; k++) {
    int64_t index = G->args[k].index;
    if (G->args[k].form == FORM_SLOT) {
      values[k] = &slots[index]; /* little-endian: an integer of any width begins where its slot does */
    } else if (G->args[k].form == FORM_FLOAT) {
      double d;
      memcpy(&d, &slots[index], sizeof d);
      floats[nfloats] = (float)d;
      values[k] = &floats[nfloats++];
    } else if (G->args[k].form == FORM_MAP) {
      values[k] = &maps[index];
    } else if (G->args[k].form == FORM_FAILURE) {
      values[k] = &record;
    } else if (G->args[k].form == FORM_LOG) {
      values[k] = &log;
    } else {
      values[k] = view;
    }
  }
  c->blockDimX = G->threads, c->blockDimY = c->blockDimZ = 1, c->sharedMemBytes = G->shared;
  c->attrs = G->attrs, c->numAttrs = (uint32_t)G->nattrs;
  CUresult code = 0;
  if (G->graphs && ts_graphs_launch(G->graphs, device, c, G->kernel, values, &code))
    return TS_UNLIKELY(code) ? failed("the launch (cuGraphLaunch)", code) : 0;
  code = cu.LaunchKernelEx(c, G->kernel, values, NULL);
  return TS_UNLIKELY(code) ? failed("the launch (cuLaunchKernelEx)", code) : 0;
}

static int launch_pass(const ts_gpu* G, void* stream, ts_gpu_view* view) {
  CUlaunchConfig c = {.gridDimX = 1, .gridDimY = 1, .gridDimZ = 1, .blockDimX = 32, .blockDimY = 1, .blockDimZ = 1, .hStream = stream};
  CUresult code = cu.LaunchKernelEx(&c, G->pass, (void*[]){view}, NULL);
  return TS_UNLIKELY(code) ? failed("the launch (cuLaunchKernelEx)", code) : 0;
}

/* A launch on a team, whose kernel begins and ends it (include/ts/team.cuh) as far as it is needed: a rank alone has nobody to tell. */
static int launch_on_team(ts_gpu* G, const struct ts_team* team, const ts_arg* args, int64_t* slots, int device, int empty,
                          CUlaunchConfig* c) {
  const ts_kernel* K = G->K;
  char why[TS_MESSAGE];
  if (TS_UNLIKELY(recorded(why, sizeof why))) return failed("a launch before", 0);
  ts_gpu_view view;
  if (TS_UNLIKELY(ts_gpu_view_of(K, team, device, &view))) return -1;
  int bare = G->flags & FLAG_BARE, meets = team && view.size > 1 && G->flags & FLAG_DEVICE;
  int bad = team ? ts_gpu_in_order(c->hStream) : 0;
  if (meets && !bad && !bare) view.description = ts_gpu_describe(K, args, team);
  /* Without order others may be signalling for the next launch already: theirs to count on. */
  ts_gpu_counters_of(K, args, !meets || view.ordered, empty && !bare, &view.counters);
  if (bare) view.ordered = 0;
  view.ends = !team ? 0 : view.ordered && !(G->flags & FLAG_AWAITED) ? 2 : view.ordered || view.counters.count;
  if (!bad && !empty) bad = launch(G, team, args, slots, device, &view, c);
  if (!bad && (empty || bare) && view.ends) bad = launch_pass(G, c->hStream, &view);
  return bad;
}

static int gpu_call(void* p, const TVMFFIAny* a, int32_t n, TVMFFIAny* ret) {
  ts_gpu* G = p;
  const ts_kernel* K = G->K;
  pthread_once(&opened, open_driver);
  if (TS_UNLIKELY(no_driver[0])) return ts_error("RuntimeError", "TS:run:-1:%s", no_driver);
  int64_t slots[TS_MAX_SLOTS];
  ts_arg args[TS_MAX_PARAMS];
  if (TS_UNLIKELY(ts_check_args(K, a, n, slots, args))) return -1;
  for (int32_t k = 0; k < K->nsyms; k++) { /* kernels take them as int32 */
    int64_t extent = slots[K->nparams + 2 + k];
    if (TS_UNLIKELY(extent > INT32_MAX)) return ts_error("ValueError", "TS:symbol:-1:%d:%d:%lld", k, INT32_MAX, (long long)extent);
  }
  struct ts_team* team = NULL;
  if (G->flags & FLAG_TEAM || K->nsymm)
    if (TS_UNLIKELY(ts_team_of_args(K, args, &team))) return -1;
  slots[K->nparams] = team ? ts_team_rank(team) : ts_world_rank();
  slots[K->nparams + 1] = team ? ts_team_size(team) : ts_world_size();
  CUlaunchConfig c;
  int empty = plan(G, slots, &c);
  if (TS_UNLIKELY(empty < 0)) return -1;
  if (TS_UNLIKELY(K->ndemands && !empty && ts_check_demands(K, slots))) return -1;
  int current = -1;
  if (cu.CtxGetDevice(&current)) current = -1; /* this thread has no context yet */
  int device = device_of(G, args, current);
  if (TS_UNLIKELY(device < 0)) return -1;
  if (TS_UNLIKELY(device >= MAX_DEVICES)) return ts_error("RuntimeError", "TS:run:-1:more than %d GPUs", MAX_DEVICES);
  int pushed = 0, bad = 0;
  if (TS_UNLIKELY(device != current)) {
    CUresult code = contexts[device] ? 0 : cu.DevicePrimaryCtxRetain(&contexts[device], device);
    if (!code) code = cu.CtxPushCurrent(contexts[device]);
    if (code) return failed("using the GPU of the arguments", code);
    pushed = 1;
  }
  if (TS_UNLIKELY(!(atomic_load_explicit(&G->ready, memory_order_acquire) >> device & 1))) bad = make_ready(G, device);
  c.hStream = TVMFFIEnvGetStream(kDLCUDA, device);
  if (TS_UNLIKELY(!bad && G->flags & FLAG_COOPERATIVE)) {
    int64_t blocks = (int64_t)c.gridDimX * c.gridDimY * c.gridDimZ;
    if (blocks > G->resident[device])
      bad = ts_error("ValueError", "TS:resident:-1:-1:%lld:%lld", (long long)G->resident[device], (long long)blocks);
  }
  if (TS_UNLIKELY(!bad && G->flags & FLAG_TEAM)) bad = launch_on_team(G, team, args, slots, device, empty, &c);
  else if (!bad && !empty) bad = launch(G, NULL, args, slots, device, NULL, &c);
  if (TS_UNLIKELY(pushed)) cu.CtxPopCurrent(&(void*){NULL});
  ret->type_index = kTVMFFINone;
  ret->zero_padding = 0;
  ret->v_int64 = 0;
  return bad;
}

/* ---- from Python */

/* For what a host gives a stream before a launch on a team, and which must come behind the launches so far. */
TS_API int32_t ts_gpu_order(int64_t stream) {
  pthread_once(&opened, open_driver);
  return no_driver[0] ? 0 : ts_gpu_in_order((void*)(intptr_t)stream);
}

/* A program must leave one value, and never reach below the stack's floor or above its top. */
static const char* check_program(const int64_t* program, int64_t slots) {
  int64_t depth = 0;
  for (int64_t k = 0; k < program[0]; k++) {
    int64_t op = program[1 + 2 * k], v = program[2 + 2 * k];
    if (op < 0 || op > OP_MAX || (op == OP_SLOT && (v < 0 || v >= slots))) return "the grid's program holds something unknown";
    depth += op <= OP_SLOT ? 1 : -1;
    if (depth < 1 || depth > 32) return "the grid's program does not fit its stack";
  }
  return depth == 1 ? NULL : "the grid's program leaves no value";
}

static const char* parse(ts_gpu* G, const int64_t* d, const int64_t* end) {
  ts_kernel* K = G->K;
  int64_t slots = K->nparams + 2 + K->nsyms;
  const char* early = "the description ends early";
  if (d + 2 * G->nargs > end) return early;
  G->args = (const gpu_arg*)d;
  for (int32_t k = 0; k < G->nargs; k++, d += 2) {
    if (d[0] < 0 || d[0] > FORM_LOG || d[1] < 0 || d[1] >= (d[0] == FORM_MAP ? G->nmaps : slots)) return "an argument of no known form";
    G->can_fail |= d[0] == FORM_FAILURE, G->logs |= d[0] == FORM_LOG;
  }
  for (int32_t k = 0; k < G->nmaps; k++) {
    gpu_map* m = &G->maps[k];
    if (d + 5 > end || d + 5 + d[2] > end) return early;
    *m = (gpu_map){(int32_t)d[0], (int32_t)d[1], (int32_t)d[2], (int32_t)d[3], (int32_t)d[4], {0}};
    if (m->param < 0 || m->param >= K->nparams || m->rank < 1 || m->rank > MAX_BOX) return "a tensor map of no parameter or of no rank";
    d += 5;
    for (int32_t j = 0; j < m->rank; j++) m->box[j] = *d++;
  }
  for (int k = 0; k < 3; k++) {
    if (d >= end || d[0] < 1 || d + 1 + 2 * d[0] > end) return early;
    const char* wrong = check_program(d, slots);
    if (wrong) return wrong;
    G->program[k] = d;
    d += 1 + 2 * d[0];
  }
  if (d + K->nparams > end) return early;
  const int64_t* align = d;
  const char* wrong = ts_parse_params(K, d + K->nparams, end);
  if (wrong) return wrong;
  for (int32_t k = 0; k < K->nparams; k++) K->params[k].align = (int32_t)align[k];
  for (int32_t k = 0; k < G->nmaps; k++)
    if (K->params[G->maps[k].param].ndim != G->maps[k].rank) return "a tensor map of another rank than its parameter";
  return NULL;
}

static void set_attributes(ts_gpu* G) {
  const ts_kernel* K = G->K;
  if (K->cluster_size > 1) {
    CUlaunchAttribute* at = &G->attrs[G->nattrs++];
    at->id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
    at->value.clusterDim.x = (uint32_t)K->cluster[0], at->value.clusterDim.y = (uint32_t)K->cluster[1];
    at->value.clusterDim.z = (uint32_t)K->cluster[2];
  }
  if (G->flags & FLAG_COOPERATIVE) {
    G->attrs[G->nattrs].id = CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
    G->attrs[G->nattrs++].value.cooperative = 1;
  }
  if (G->flags & FLAG_DEPENDENT && !(G->flags & FLAG_TEAM)) { /* a team's kernel tells the others first that what came before is over */
    G->attrs[G->nattrs].id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    G->attrs[G->nattrs++].value.programmaticStreamSerializationAllowed = 1;
  }
}

/* Launches on a team, dependent and cooperative ones stay launches: their place among others is part of what they are. */
static void make_graphs(ts_gpu* G) {
  uint8_t sizes[TS_MAX_SLOTS];
  for (int32_t k = 0; k < G->nargs; k++)
    sizes[k] = G->args[k].form == FORM_MAP ? sizeof(CUtensorMap) : G->args[k].form == FORM_FLOAT ? sizeof(float) :
               G->args[k].form == FORM_LOG ? sizeof(ts_gpu_log) : sizeof(int64_t);
  if (ts_launch_graphs && !(G->flags & (FLAG_TEAM | FLAG_DEPENDENT | FLAG_COOPERATIVE)))
    G->graphs = ts_graphs_new(sizes, G->nargs);
}

static char* copy_of(const TVMFFIByteArray* bytes) {
  char* out = malloc(bytes->size + 1);
  if (out) memcpy(out, bytes->data, bytes->size), out[bytes->size] = 0;
  return out;
}

static const char* build(ts_gpu* G, const TVMFFIByteArray* code, const TVMFFIByteArray* desc, const TVMFFIByteArray* sites,
                         const TVMFFIByteArray* name, const TVMFFIByteArray* symbol) {
  const int64_t words = (int64_t)(desc->size / 8);
  G->words = malloc(desc->size + 8);
  if (!G->words) return "no memory";
  memcpy(G->words, desc->data, desc->size);
  const int64_t* d = G->words;
  if (desc->size % 8 || words < HEAD || d[0] != 1) return "the description has another version";
  if (d[1] < 0 || d[1] > TS_MAX_PARAMS || d[2] < 0 || d[1] + 2 + d[2] > TS_MAX_SLOTS) return "too many parameters or symbols";
  if (d[9] < 0 || d[9] > TS_MAX_SLOTS || d[10] < 0 || d[10] > MAX_MAPS) return "too many arguments or tensor maps";
  ts_kernel* K = G->K = calloc(1, sizeof *K + (size_t)d[1] * sizeof(ts_param));
  if (!K) return "no memory";
  K->nparams = (int32_t)d[1], K->nsyms = (int32_t)d[2], K->threads = d[3], K->shared_bytes = d[4], K->device = kDLCUDA;
  for (int k = 0; k < 3; k++) K->cluster[k] = d[6 + k] > 0 ? (int32_t)d[6 + k] : 1;
  K->cluster_size = K->cluster[0] * K->cluster[1] * K->cluster[2];
  G->threads = (uint32_t)d[3], G->shared = (uint32_t)d[4], G->flags = (int32_t)d[5];
  G->nargs = (int32_t)d[9], G->nmaps = (int32_t)d[10];
  K->fingerprint = (uint64_t)d[12], K->id = ts_next_id();
  K->flags = (G->flags & FLAG_DEVICE ? TS_FLAG_DEVICE : 0) | (G->flags & FLAG_UNORDERED ? TS_FLAG_UNORDERED : 0);
  G->maps = calloc((size_t)G->nmaps + 1, sizeof *G->maps);
  /* CUtensorMap is aligned to 64 bytes (CUDA Driver API), more than malloc promises. */
  size_t cached = (size_t)(G->nmaps * WAYS + 1) * sizeof(gpu_cached);
  G->cached = aligned_alloc(64, cached);
  G->code = copy_of(code), G->symbol = copy_of(symbol);
  if (!G->maps || !G->cached || !G->code || !G->symbol) return "no memory";
  memset(G->cached, 0, cached);
  set_attributes(G);
  const char* wrong = parse(G, d + HEAD, d + words);
  if (!wrong && (ts_parse_sites(K, sites->data, sites->size) || ts_make_label(K, name))) wrong = "no memory";
  if (!wrong) make_graphs(G);
  if (!wrong && G->flags & FLAG_TEAM) ts_gpu_known(K);
  return wrong;
}

/* make_cuda_kernel(code: bytes, desc: bytes, name: str, symbol: str, sites: str) -> function */
TS_API int __tvm_ffi_make_cuda_kernel(void* unused, const TVMFFIAny* a, int32_t n, TVMFFIAny* ret) {
  (void)unused;
  TVMFFIByteArray code, desc, name, symbol, sites;
  if (n != 5 || ts_bytes_of(a, &code) || ts_bytes_of(a + 1, &desc) || ts_bytes_of(a + 2, &name) || ts_bytes_of(a + 3, &symbol) ||
      ts_bytes_of(a + 4, &sites))
    return ts_error("TypeError", "make_cuda_kernel(code: bytes, desc: bytes, name: str, symbol: str, sites: str)");
  ts_gpu* G = calloc(1, sizeof *G);
  if (!G) return ts_error("MemoryError", "no memory");
  pthread_mutex_init(&G->loading, NULL);
  const char* wrong = build(G, &code, &desc, &sites, &name, &symbol);
  TVMFFIObjectHandle f;
  if (wrong || TVMFFIFunctionCreate(G, gpu_call, gpu_free, &f)) {
    gpu_free(G);
    return wrong ? ts_error("RuntimeError", "make_cuda_kernel(%.*s): %s", (int)name.size, name.data, wrong) : -1;
  }
  ret->type_index = kTVMFFIFunction;
  ret->zero_padding = 0;
  ret->v_obj = f;
  return 0;
}

/* cuda_missing() -> str: why no kernel can be launched on this machine; "" where one can. */
TS_API int __tvm_ffi_cuda_missing(void* unused, const TVMFFIAny* a, int32_t n, TVMFFIAny* ret) {
  (void)unused, (void)a, (void)n;
  pthread_once(&opened, open_driver);
  TVMFFIByteArray text = {no_driver, strlen(no_driver)};
  return TVMFFIStringFromByteArray(&text, ret);
}

/* cuda_synchronize() -> nothing: waits for the current GPU; raises where a kernel failed. */
TS_API int __tvm_ffi_cuda_synchronize(void* unused, const TVMFFIAny* a, int32_t n, TVMFFIAny* ret) {
  (void)unused, (void)a, (void)n;
  pthread_once(&opened, open_driver);
  if (no_driver[0]) return ts_error("RuntimeError", "TS:run:-1:%s", no_driver);
  int device;
  CUresult code = cu.CtxGetDevice(&device) ? 0 : cu.CtxSynchronize(); /* without a context nothing runs */
  char why[TS_MESSAGE];
  if (code || recorded(why, sizeof why)) return failed("waiting for the GPU (cuCtxSynchronize)", code);
  ret->type_index = kTVMFFINone;
  ret->zero_padding = 0;
  ret->v_int64 = 0;
  return 0;
}

/* cuda_failure() -> str: the failure of a kernel that no call has raised yet; "" where there is none. */
TS_API int __tvm_ffi_cuda_failure(void* unused, const TVMFFIAny* a, int32_t n, TVMFFIAny* ret) {
  (void)unused, (void)a, (void)n;
  char text[TS_MESSAGE] = "";
  if (!atomic_exchange(&told, 1) && !recorded(text, sizeof text)) atomic_store(&told, 0);
  TVMFFIByteArray out = {text, strlen(text)};
  return TVMFFIStringFromByteArray(&out, ret);
}

/* cuda_capability(device: int) -> int: its compute capability, 90 for 9.0; 0 where there is no such GPU. */
TS_API int __tvm_ffi_cuda_capability(void* unused, const TVMFFIAny* a, int32_t n, TVMFFIAny* ret) {
  (void)unused;
  if (n != 1 || a[0].type_index != kTVMFFIInt) return ts_error("TypeError", "cuda_capability(device: int)");
  int device = (int)a[0].v_int64, major = 0, minor = 0;
  pthread_once(&opened, open_driver);
  if (!no_driver[0] && (cu.DeviceGetAttribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device) ||
                        cu.DeviceGetAttribute(&minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device)))
    major = minor = 0;
  ret->type_index = kTVMFFIInt;
  ret->zero_padding = 0;
  ret->v_int64 = major * 10 + minor;
  return 0;
}
