/* What cuda.c and gpu_team.c share: the driver, and launches on a team. */
#ifndef TS_GPU_H
#define TS_GPU_H
#include "ts_rt.h"

/* ---- of <cuda.h> */
typedef int CUresult;
typedef struct { _Alignas(64) uint64_t opaque[16]; } CUtensorMap;
typedef struct {
  uint32_t id, pad;
  union { char pad[64]; struct { uint32_t x, y, z; } clusterDim; int cooperative; int programmaticStreamSerializationAllowed; } value;
} CUlaunchAttribute;
typedef struct {
  uint32_t gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ, sharedMemBytes;
  void* hStream;
  CUlaunchAttribute* attrs;
  uint32_t numAttrs;
} CUlaunchConfig;

typedef struct { /* CUDA_KERNEL_NODE_PARAMS_v2 */
  void* func;
  uint32_t gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ, sharedMemBytes;
  void **kernelParams, **extra, *kern, *ctx;
} ts_kernel_node;

typedef struct ts_driver {
  CUresult (*Init)(unsigned);
  CUresult (*GetErrorString)(CUresult, const char**);
  CUresult (*DeviceGetAttribute)(int*, int, int);
  CUresult (*CtxGetDevice)(int*);
  CUresult (*CtxPushCurrent)(void*);
  CUresult (*CtxPopCurrent)(void**);
  CUresult (*DevicePrimaryCtxRetain)(void**, int);
  CUresult (*LibraryLoadData)(void**, const void*, void*, void*, unsigned, void*, void*, unsigned);
  CUresult (*LibraryGetKernel)(void**, void*, const char*);
  CUresult (*KernelSetAttribute)(int, int, void*, int);
  CUresult (*ThreadExchangeStreamCaptureMode)(int*);
  CUresult (*LaunchKernelEx)(const CUlaunchConfig*, void*, void**, void**);
  CUresult (*TensorMapEncodeTiled)(CUtensorMap*, int, uint32_t, void*, const uint64_t*, const uint64_t*, const uint32_t*,
                                   const uint32_t*, int, int, int, int);
  CUresult (*MemHostAlloc)(void**, size_t, unsigned);
  CUresult (*CtxSynchronize)(void);
  CUresult (*OccupancyMaxActiveBlocksPerMultiprocessor)(int*, void*, int, size_t);
  CUresult (*MemAlloc)(void**, size_t);
  CUresult (*MemsetD8Async)(void*, unsigned char, size_t, void*);
  CUresult (*StreamCreate)(void**, unsigned);
  CUresult (*StreamSynchronize)(void*);
  CUresult (*StreamIsCapturing)(void*, int*);
  CUresult (*StreamGetCaptureInfo)(void*, int*, uint64_t*, void**, const void***, size_t*);
  CUresult (*StreamWaitEvent)(void*, void*, unsigned);
  CUresult (*EventCreate)(void**, unsigned);
  CUresult (*EventRecord)(void*, void*);
  CUresult (*GraphCreate)(void**, unsigned);
  CUresult (*GraphAddKernelNode)(void**, void*, const void*, size_t, const ts_kernel_node*);
  CUresult (*GraphKernelNodeSetAttribute)(void*, int, const void*);
  CUresult (*GraphInstantiateWithFlags)(void**, void*, unsigned long long);
  CUresult (*GraphExecKernelNodeSetParams)(void*, void*, const ts_kernel_node*);
  CUresult (*GraphLaunch)(void*, void*);
  CUresult (*GraphExecDestroy)(void*);
  CUresult (*GraphDestroy)(void*);
} ts_driver;

extern ts_driver ts_cu;
/* -1, with the error set: what the driver said of `what`, or what a launch said that failed before. */
int ts_driver_failed(const char* what, CUresult code);

/* ---- launches by graphs of one kernel (gpu_graph.c) */
typedef struct ts_graphs ts_graphs;
/* For a kernel with arguments of these many bytes; null where they are too many, or memory is out. */
ts_graphs* ts_graphs_new(const uint8_t* sizes, int32_t nargs);
void ts_graphs_free(ts_graphs* G);
/* 1: it is launched, or refused with `code`; 0: the caller launches it. The device is current. */
int ts_graphs_launch(ts_graphs* G, int device, const CUlaunchConfig* c, void* kernel, void** values, CUresult* code);

/* ---- logs of instrumented kernels (gpu_log.c): as ts::Log in include/ts/trace.cuh */
typedef struct ts_gpu_log { void* events; uint64_t* taken; int64_t capacity; int32_t kernel, team; } ts_gpu_log;
/* Makes a device's log, once; its clock is compared with the host's by ts_clock, which the library of an instrumented kernel has. */
int ts_gpu_log_ready(int device, void* library);
/* What a launch is told; `team` may be null. */
int ts_gpu_log_of(int device, int32_t kernel, const struct ts_team* team, ts_gpu_log* out);

/* ---- teams: as include/ts/team.cuh has them */
typedef struct ts_gpu_counters {
  int32_t count, pad;
  char* at[TS_MAX_SYMM];
  int64_t length[TS_MAX_SYMM];
} ts_gpu_counters;

typedef struct ts_gpu_view {
  int32_t rank, size, ordered, kernel;
  int64_t limit;
  void* record;
  const void* stop;
  int64_t control, description;
  int32_t ends, recover;
  ts_gpu_counters counters;
  char* base[TS_MAX_RANKS];
} ts_gpu_view;

/* How a launch sees its team; without one it is a rank of its own, with control words on the device. */
int ts_gpu_view_of(const ts_kernel* K, const struct ts_team* team, int device, ts_gpu_view* out);
/* The code of a kernel with a team has been loaded: not 0 where NVSHMEM refuses it. */
int ts_gpu_loaded(void* library);
/* What ranks compare: kernel, constants, team, offsets and shapes of symmetric arguments. Kept for people under that number. */
int64_t ts_gpu_describe(const ts_kernel* K, const ts_arg* args, const struct ts_team* team);
/* Launches on teams are one sequence in host order: one on another stream than the last waits for that. */
int ts_gpu_in_order(void* stream);
/* signals: those that are zero behind a launch; boxes: of packets, whose launch nobody else counts (length -1). */
void ts_gpu_counters_of(const ts_kernel* K, const ts_arg* args, int signals, int boxes, ts_gpu_counters* out);
/* 1 where a launch has failed on this rank's GPU: why, and the site in that kernel. */
int ts_gpu_failure(const ts_kernel** K, int32_t* site, char* out, size_t bytes);
void ts_gpu_forget_failure(void); /* no launch runs */
void ts_gpu_known(const ts_kernel* K); /* for reports; it is never freed */
#endif
