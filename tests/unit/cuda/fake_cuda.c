/* A CUDA driver that launches nothing and remembers the last launch, for tests of tilescale/native/cuda.c without a GPU. Where a
 * toolkit is there it is compiled against the real <cuda.h>, so that our own declarations are compared with it. */
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#ifdef REAL_HEADER /* its functions under other names: ours take plain ints for its enums */
#define cuInit real_cuInit
#define cuGetErrorString real_cuGetErrorString
#define cuDeviceGetAttribute real_cuDeviceGetAttribute
#define cuCtxGetDevice real_cuCtxGetDevice
#define cuCtxPushCurrent_v2 real_cuCtxPushCurrent_v2
#define cuCtxPopCurrent_v2 real_cuCtxPopCurrent_v2
#define cuDevicePrimaryCtxRetain real_cuDevicePrimaryCtxRetain
#define cuLibraryLoadData real_cuLibraryLoadData
#define cuLibraryGetKernel real_cuLibraryGetKernel
#define cuKernelSetAttribute real_cuKernelSetAttribute
#define cuThreadExchangeStreamCaptureMode real_cuThreadExchangeStreamCaptureMode
#define cuTensorMapEncodeTiled real_cuTensorMapEncodeTiled
#define cuLaunchKernelEx real_cuLaunchKernelEx
#define cuOccupancyMaxActiveBlocksPerMultiprocessor real_cuOccupancyMaxActiveBlocksPerMultiprocessor
#define cuMemAlloc_v2 real_cuMemAlloc_v2
#define cuMemsetD8Async real_cuMemsetD8Async
#define cuStreamCreate real_cuStreamCreate
#define cuStreamSynchronize real_cuStreamSynchronize
#define cuStreamIsCapturing real_cuStreamIsCapturing
#define cuStreamGetCaptureInfo_v2 real_cuStreamGetCaptureInfo_v2
#define cuStreamWaitEvent real_cuStreamWaitEvent
#define cuEventCreate real_cuEventCreate
#define cuEventRecord real_cuEventRecord
#define cuMemHostAlloc real_cuMemHostAlloc
#define cuCtxSynchronize real_cuCtxSynchronize
#define cuGraphCreate real_cuGraphCreate
#define cuGraphAddKernelNode_v2 real_cuGraphAddKernelNode_v2
#define cuGraphKernelNodeSetAttribute real_cuGraphKernelNodeSetAttribute
#define cuGraphInstantiateWithFlags real_cuGraphInstantiateWithFlags
#define cuGraphExecKernelNodeSetParams_v2 real_cuGraphExecKernelNodeSetParams_v2
#define cuGraphLaunch real_cuGraphLaunch
#define cuGraphExecDestroy real_cuGraphExecDestroy
#define cuGraphDestroy real_cuGraphDestroy
#include <cuda.h>
#undef cuInit
#undef cuGetErrorString
#undef cuDeviceGetAttribute
#undef cuCtxGetDevice
#undef cuCtxPushCurrent_v2
#undef cuCtxPopCurrent_v2
#undef cuDevicePrimaryCtxRetain
#undef cuLibraryLoadData
#undef cuLibraryGetKernel
#undef cuKernelSetAttribute
#undef cuThreadExchangeStreamCaptureMode
#undef cuTensorMapEncodeTiled
#undef cuLaunchKernelEx
#undef cuOccupancyMaxActiveBlocksPerMultiprocessor
#undef cuMemAlloc_v2
#undef cuMemsetD8Async
#undef cuStreamCreate
#undef cuStreamSynchronize
#undef cuStreamIsCapturing
#undef cuStreamGetCaptureInfo_v2
#undef cuStreamWaitEvent
#undef cuEventCreate
#undef cuEventRecord
#undef cuMemHostAlloc
#undef cuCtxSynchronize
#undef cuGraphCreate
#undef cuGraphAddKernelNode_v2
#undef cuGraphKernelNodeSetAttribute
#undef cuGraphInstantiateWithFlags
#undef cuGraphExecKernelNodeSetParams_v2
#undef cuGraphLaunch
#undef cuGraphExecDestroy
#undef cuGraphDestroy
typedef const CUlaunchConfig* Config;
#else
typedef struct { uint32_t id, pad; struct { uint32_t x, y, z; char rest[52]; } value; } Attribute;
typedef const struct { uint32_t gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ, sharedMemBytes; void* hStream;
                       Attribute* attrs; uint32_t numAttrs; } *Config;
#endif

struct { int64_t launches, loads, encodes, grid[3], block[3], shared, stream, nattrs, attrs[4][4], device, pushed, attribute[2]; } fake;
struct { int64_t dims[5], strides[5], box[5], type, rank, swizzle, l2; } fake_map;
int64_t fake_sizes[16], fake_fail, fake_current;
char fake_params[16][512], fake_symbol[64];

static int code(int which) { return fake_fail == which ? 209 : 0; }
int cuInit(unsigned flags) { (void)flags; return getenv("FAKE_NO_GPU") ? 100 : 0; }
int cuGetErrorString(int c, const char** out) {
  *out = c == 719 ? "unspecified launch failure" : c == 100 ? "no CUDA-capable device is detected" : "no kernel image is available for execution on the device";
  return 0;
}
int cuDeviceGetAttribute(int* out, int a, int device) { *out = a == 75 ? 9 : a == 16 ? 10 : 0; return device > 1; }
int cuCtxGetDevice(int* device) { *device = (int)fake_current; return fake_current < 0 ? 201 : 0; }
int cuCtxPushCurrent_v2(void* c) { (void)c; fake.pushed++; return 0; }
int cuCtxPopCurrent_v2(void** c) { *c = NULL; fake.pushed += 100; return 0; }
int cuDevicePrimaryCtxRetain(void** c, int device) { *c = (void*)(intptr_t)(device + 1); return 0; }
int cuLibraryLoadData(void** l, const void* d, void* a, void* b, unsigned c, void* e, void* f, unsigned g) {
  (void)d, (void)a, (void)b, (void)c, (void)e, (void)f, (void)g;
  fake.loads++;
  *l = (void*)1;
  return code(1);
}
int cuLibraryGetKernel(void** k, void* l, const char* name) {
  (void)l;
  strncpy(fake_symbol, name, sizeof fake_symbol - 1);
  *k = (void*)(intptr_t)(!strcmp(name, "ts_pass") ? 5 : !strcmp(name, "ts_clock") ? 6 : 2);
  return 0;
}
int64_t fake_carveout[6]; /* per cent of a multiprocessor's memory that shared memory gets, of each kernel */
int cuKernelSetAttribute(int a, int v, void* k, int device) {
  if (a == 9) return fake_carveout[(intptr_t)k] = v, 0; /* CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT */
  fake.attribute[0] = a, fake.attribute[1] = v, fake.device = device;
  return 0;
}
int cuThreadExchangeStreamCaptureMode(int* mode) { int was = 0; was = *mode == 2 ? 0 : 2, *mode = was; return 0; }
int cuTensorMapEncodeTiled(void* map, int type, uint32_t rank, void* data, const uint64_t* dims, const uint64_t* strides,
                           const uint32_t* box, const uint32_t* steps, int interleave, int swizzle, int l2, int fill) {
  (void)interleave, (void)fill;
  fake.encodes++;
  fake_map.type = type, fake_map.rank = rank, fake_map.swizzle = swizzle, fake_map.l2 = l2;
  for (uint32_t k = 0; k < rank; k++) {
    if (steps[k] != 1) return 1;
    fake_map.dims[k] = (int64_t)dims[k], fake_map.box[k] = box[k];
    if (k) fake_map.strides[k - 1] = (int64_t)strides[k - 1];
  }
  memset(map, 0, 128);
  memcpy(map, &data, sizeof data);
  return 0;
}
/* What teams of GPUs need: four blocks of any kernel fit a multiprocessor, of which there are ten (cuDeviceGetAttribute). */
int64_t fake_calls[64], fake_ncalls, fake_capturing;
static void note(int64_t what, const void* a, const void* b) {
  if (fake_ncalls > 61) return;
  fake_calls[fake_ncalls++] = what, fake_calls[fake_ncalls++] = (int64_t)(intptr_t)a, fake_calls[fake_ncalls++] = (int64_t)(intptr_t)b;
}
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* out, void* kernel, int threads, size_t shared) {
  (void)kernel, (void)threads, (void)shared;
  *out = 4;
  return 0;
}
int cuMemAlloc_v2(void** out, size_t bytes) { *out = malloc(bytes); return 0; }
int cuMemsetD8Async(void* at, unsigned char v, size_t bytes, void* stream) { (void)stream; memset(at, v, bytes); return 0; }
int cuStreamCreate(void** out, unsigned flags) { (void)flags; *out = (void*)7; return 0; }
int cuStreamSynchronize(void* stream) { (void)stream; return 0; }
int cuStreamIsCapturing(void* stream, int* out) { (void)stream; *out = (int)fake_capturing; return 0; }
/* All streams are in one capture, whose number is `fake_capturing`. */
int cuStreamGetCaptureInfo_v2(void* stream, int* out, uint64_t* id, void** g, const void*** deps, size_t* n) {
  (void)stream, (void)g, (void)deps, (void)n;
  *out = fake_capturing != 0, *id = (uint64_t)fake_capturing;
  return 0;
}
int cuStreamWaitEvent(void* stream, void* event, unsigned flags) { (void)flags; note(3, stream, event); return 0; }
int cuEventCreate(void** out, unsigned flags) { (void)flags; *out = (void*)8; return 0; }
int cuEventRecord(void* event, void* stream) { note(2, stream, event); return 0; }
static int lost; /* a kernel has failed */
int cuMemHostAlloc(void** to, size_t bytes, unsigned flags) { *to = flags == 3 ? aligned_alloc(64, bytes) : NULL; return code(5); }
int cuCtxSynchronize(void) { return lost; }
/* ts_clock on a GPU whose clock is FAKE_AHEAD ns ahead of the host's: answers until all rounds are over. */
enum { FAKE_AHEAD = 1000000007 };
typedef struct { int64_t asked, answered, time; } Rounds;
static void* answers(void* p) {
  Rounds* r = *(Rounds**)p;
  for (int64_t k = 1, count = ((int64_t*)p)[1]; k <= count; k++) {
    struct timespec t;
    while (__atomic_load_n(&r->asked, __ATOMIC_ACQUIRE) != k) sched_yield();
    clock_gettime(CLOCK_MONOTONIC, &t);
    r->time = t.tv_sec * 1000000000LL + t.tv_nsec + FAKE_AHEAD;
    __atomic_store_n(&r->answered, k, __ATOMIC_RELEASE);
  }
  free(p);
  return NULL;
}
int cuLaunchKernelEx(Config c, void* kernel, void** params, void** extra) {
  (void)extra;
  if ((intptr_t)kernel == 6) {
    int64_t* given = malloc(16);
    pthread_t who;
    given[0] = *(int64_t*)params[0], given[1] = *(int*)params[1];
    return pthread_create(&who, NULL, answers, given) || pthread_detach(who);
  }
  note(1, kernel, c->hStream);
  fake.launches++;
  fake.grid[0] = c->gridDimX, fake.grid[1] = c->gridDimY, fake.grid[2] = c->gridDimZ;
  fake.block[0] = c->blockDimX, fake.block[1] = c->blockDimY, fake.block[2] = c->blockDimZ;
  fake.shared = c->sharedMemBytes, fake.stream = (int64_t)(intptr_t)c->hStream, fake.nattrs = c->numAttrs;
  for (uint32_t k = 0; k < c->numAttrs && k < 4; k++) {
    uint32_t value[3];
    memcpy(value, &c->attrs[k].value, sizeof value);
    fake.attrs[k][0] = c->attrs[k].id;
    for (int j = 0; j < 3; j++) fake.attrs[k][1 + j] = value[j];
  }
  if (lost) return lost;
  if (fake_fail == 4) { /* the kernel that has one parameter, its record, fails: site 1, thread 33, block 7 */
    uint64_t* record = *(uint64_t**)params[0];
    record[1] = 5 | 3ull << 32, record[0] = 1ull << 63 | 1ull << 52 | 33ull << 42 | 7;
    lost = 719;
    return 0;
  }
  for (int k = 0; k < 16 && fake_sizes[k]; k++) memcpy(fake_params[k], params[k], (size_t)fake_sizes[k]);
  return code(2);
}

/* Graphs of one kernel: what was put into each, what its launches launched, and how many were made. */
#ifdef REAL_HEADER
typedef const CUDA_KERNEL_NODE_PARAMS* Node;
#else
typedef const struct { void* func; uint32_t gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ, sharedMemBytes;
                       void **kernelParams, **extra, *kern, *ctx; } *Node;
#endif
enum { GRAPHS = 64 };
static struct { uint32_t grid[3], block[3], shared; void* kernel; char params[16][512]; } held[GRAPHS];
int64_t fake_graphs[4]; /* made, given other arguments, launched, destroyed */
static int hold(intptr_t g, Node p) {
  if (p->func || p->ctx || p->extra) return 1;
  held[g].grid[0] = p->gridDimX, held[g].grid[1] = p->gridDimY, held[g].grid[2] = p->gridDimZ;
  held[g].block[0] = p->blockDimX, held[g].block[1] = p->blockDimY, held[g].block[2] = p->blockDimZ;
  held[g].shared = p->sharedMemBytes, held[g].kernel = (void*)p->kern;
  for (int k = 0; k < 16 && fake_sizes[k]; k++) memcpy(held[g].params[k], p->kernelParams[k], (size_t)fake_sizes[k]);
  return 0;
}
int cuGraphCreate(void** g, unsigned flags) { *g = (void*)(intptr_t)(fake_graphs[0] + 1); return flags || fake_graphs[0] >= GRAPHS - 1; }
int cuGraphAddKernelNode_v2(void** node, void* g, const void* before, size_t n, Node p) {
  *node = g;
  return before || n ? 1 : hold((intptr_t)g, p);
}
int cuGraphKernelNodeSetAttribute(void* node, int id, const void* value) { (void)node, (void)value; return id != 4; }
int cuGraphInstantiateWithFlags(void** exec, void* g, unsigned long long flags) {
  if (flags || code(6)) return 1;
  *exec = g, fake_graphs[0]++;
  return 0;
}
int cuGraphExecKernelNodeSetParams_v2(void* exec, void* node, Node p) {
  fake_graphs[1]++;
  return exec != node ? 1 : hold((intptr_t)exec, p);
}
int cuGraphLaunch(void* exec, void* stream) {
  intptr_t g = (intptr_t)exec;
  fake_graphs[2]++, fake.launches++;
  for (int k = 0; k < 3; k++) fake.grid[k] = held[g].grid[k], fake.block[k] = held[g].block[k];
  fake.shared = held[g].shared, fake.stream = (int64_t)(intptr_t)stream;
  memcpy(fake_params, held[g].params, sizeof fake_params);
  return lost ? lost : code(2);
}
int cuGraphExecDestroy(void* exec) { (void)exec; fake_graphs[3]++; return 0; }
int cuGraphDestroy(void* g) { (void)g; return 0; }
