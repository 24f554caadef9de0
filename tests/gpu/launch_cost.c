/* What the driver alone takes for a launch: bursts of one call in C, without Python, torch or checks. For launch_cost.py. */
#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>

typedef struct {
  uint32_t gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ, sharedMemBytes;
  void* hStream;
  void* attrs;
  uint32_t numAttrs;
} CUlaunchConfig;

static int (*LaunchKernel)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**);
static int (*LaunchKernelEx)(const CUlaunchConfig*, void*, void**, void**);
static int (*CtxGetDevice)(int*);
static int (*CtxSynchronize)(void);
static void *kernel, *function; /* CUkernel, which any context takes, and its CUfunction in this one */

/* 0, or the line that failed. The caller has made the context current. */
int prepare(const void* code, const char* symbol) {
  void* d = dlopen("libcuda.so.1", RTLD_NOW);
  if (!d) return __LINE__;
  int (*load)(void**, const void*, void*, void*, unsigned, void*, void*, unsigned) = dlsym(d, "cuLibraryLoadData");
  int (*find)(void**, void*, const char*) = dlsym(d, "cuLibraryGetKernel");
  int (*resolve)(void**, void*) = dlsym(d, "cuKernelGetFunction");
  LaunchKernel = dlsym(d, "cuLaunchKernel"), LaunchKernelEx = dlsym(d, "cuLaunchKernelEx");
  CtxGetDevice = dlsym(d, "cuCtxGetDevice"), CtxSynchronize = dlsym(d, "cuCtxSynchronize");
  if (!load || !find || !resolve || !LaunchKernel || !LaunchKernelEx || !CtxGetDevice || !CtxSynchronize) return __LINE__;
  void* library;
  if (load(&library, code, NULL, NULL, 0, NULL, NULL, 0)) return __LINE__;
  if (find(&kernel, library, symbol)) return __LINE__;
  return resolve(&function, kernel) ? __LINE__ : 0;
}

enum { PLAIN_FUNCTION, EX_FUNCTION, PLAIN_KERNEL, EX_KERNEL, BUFFER_FUNCTION, BUFFER_KERNEL, GET_DEVICE };

/* values: pointers to the arguments; buffer: the arguments themselves, as cuLaunchKernel's `extra` takes them (CUDA Driver API). */
static int once(int what, const CUlaunchConfig* c, void** values, void* buffer, size_t size) {
  void* code = what == PLAIN_FUNCTION || what == EX_FUNCTION || what == BUFFER_FUNCTION ? function : kernel;
  void* extra[] = {(void*)1 /* CU_LAUNCH_PARAM_BUFFER_POINTER */, buffer, (void*)2 /* …_SIZE */, &size, NULL /* …_END */};
  int device;
  if (what == GET_DEVICE) return CtxGetDevice(&device);
  if (what == EX_FUNCTION || what == EX_KERNEL) return LaunchKernelEx(c, code, values, NULL);
  int packed = what == BUFFER_FUNCTION || what == BUFFER_KERNEL;
  return LaunchKernel(code, c->gridDimX, 1, 1, c->blockDimX, 1, 1, c->sharedMemBytes, c->hStream, packed ? NULL : values, packed ? extra : NULL);
}

static int by_size(const void* a, const void* b) {
  double x = *(const double*)a, y = *(const double*)b;
  return (x > y) - (x < y);
}

/* Nanoseconds a call: the median and, in *least, the least of `rounds` bursts of `burst` calls; negative where a call failed. */
double cost(int what, unsigned grid, unsigned block, unsigned shared, void* stream, void** values, void* buffer, size_t size, int burst,
            int rounds, double* least) {
  CUlaunchConfig c = {grid, 1, 1, block, 1, 1, shared, stream, NULL, 0};
  double* samples = malloc((size_t)rounds * sizeof *samples);
  double out = -1;
  if (!samples) return -1;
  for (int r = 0; r < rounds; r++) {
    struct timespec a, b;
    if (CtxSynchronize()) goto end;
    clock_gettime(CLOCK_MONOTONIC, &a);
    for (int k = 0; k < burst; k++)
      if (once(what, &c, values, buffer, size)) goto end;
    clock_gettime(CLOCK_MONOTONIC, &b);
    samples[r] = ((double)(b.tv_sec - a.tv_sec) * 1e9 + (double)(b.tv_nsec - a.tv_nsec)) / burst;
  }
  if (CtxSynchronize()) goto end;
  qsort(samples, (size_t)rounds, sizeof *samples, by_size);
  *least = samples[0], out = samples[rounds / 2];
end:
  free(samples);
  return out;
}
