/* Launches that come again, as CUDA graphs of one kernel.
 *
 * The driver takes 2.6 to 3.3 µs for a launch and 1.1 µs for a graph that it has made ready (`python -m tests.gpu.launch_cost`). So each
 * kernel remembers the argument blocks of its last calls; one that comes for the third time on the same stream becomes a graph of one node,
 * and is launched as that from then on. The result is the same launch: its arguments were copied into the node, tensor maps included.
 *
 * An executable graph runs once at a time: entries are of one stream each, where launches follow one another anyway. Graphs are no safe thing
 * for several threads (CUDA Driver API, "Graph object thread safety"): who finds the table in use launches as ever.
 */
#include "ts_gpu.h"
#include <stdlib.h>
#include <string.h>

enum { ENTRIES = 8, WORDS = 80 /* of a key: two tensor maps and 44 arguments, or four and ten */, OFTEN = 3, BY_MAP = 16, HEAD = 3 };
enum { CU_STREAM_CAPTURE_MODE_RELAXED = 2 };

typedef struct {
  uint64_t key[WORDS], used; /* used: the table's clock when it was last asked for; 0: never */
  void *graph, *node, *exec;
  int32_t seen, ready; /* ready: exec holds this key's arguments */
} entry;

struct ts_repeated {
  atomic_flag busy;
  int32_t nargs, words, cannot;
  uint64_t clock;
  uint8_t* sizes; /* of the arguments, in bytes */
  entry entries[ENTRIES];
};

ts_repeated* ts_repeated_new(const uint8_t* sizes, int32_t nargs) {
  int32_t words = HEAD;
  for (int32_t k = 0; k < nargs; k++) words += (sizes[k] + 7) / 8;
  ts_repeated* R = words > WORDS ? NULL : calloc(1, sizeof *R + (size_t)nargs);
  if (!R) return NULL;
  R->nargs = nargs, R->words = words, R->sizes = (uint8_t*)(R + 1);
  memcpy(R->sizes, sizes, (size_t)nargs);
  return R;
}

/* A graph that still runs is freed by the driver when it is through (cuGraphExecDestroy). */
void ts_repeated_free(ts_repeated* R) {
  for (int k = 0; R && k < ENTRIES; k++) {
    if (R->entries[k].exec) ts_cu.GraphExecDestroy(R->entries[k].exec);
    if (R->entries[k].graph) ts_cu.GraphDestroy(R->entries[k].graph);
  }
  free(R);
}

static entry* find(ts_repeated* R, const uint64_t* key) {
  size_t bytes = (size_t)R->words * sizeof *key;
  entry* oldest = &R->entries[0];
  for (int k = 0; k < ENTRIES; k++) {
    entry* e = &R->entries[k];
    if (e->used && !memcmp(e->key, key, bytes)) return e;
    if (e->used < oldest->used) oldest = e;
  }
  memcpy(oldest->key, key, bytes); /* it keeps its graph, which takes other arguments when these come often */
  oldest->seen = oldest->ready = 0;
  return oldest;
}

/* Gives the entry a graph of this launch. */
static CUresult prepare(entry* e, const CUlaunchConfig* c, void* kernel, void** values) {
  ts_kernel_node node = {NULL, c->gridDimX, c->gridDimY, c->gridDimZ, c->blockDimX, c->blockDimY, c->blockDimZ, c->sharedMemBytes, values,
                         NULL, kernel, NULL};
  CUresult code = 0;
  int mode = CU_STREAM_CAPTURE_MODE_RELAXED; /* another thread may be capturing, and this allocates */
  ts_cu.ThreadExchangeStreamCaptureMode(&mode);
  if (e->exec) {
    code = ts_cu.GraphExecKernelNodeSetParams(e->exec, e->node, &node); /* of future launches: those that run keep theirs */
  } else {
    if (!e->graph) code = ts_cu.GraphCreate(&e->graph, 0);
    if (!code && !e->node) code = ts_cu.GraphAddKernelNode(&e->node, e->graph, NULL, 0, &node);
    for (uint32_t k = 0; k < c->numAttrs && !code; k++)
      code = ts_cu.GraphKernelNodeSetAttribute(e->node, (int)c->attrs[k].id, &c->attrs[k].value);
    if (!code) code = ts_cu.GraphInstantiateWithFlags(&e->exec, e->graph, 0);
  }
  ts_cu.ThreadExchangeStreamCaptureMode(&mode);
  e->ready = !code;
  return code;
}

int ts_launch_repeated(ts_repeated* R, int device, const CUlaunchConfig* c, void* kernel, void** values, CUresult* code) {
  uint64_t key[WORDS] = {(uint64_t)(uintptr_t)c->hStream, c->gridDimX | (uint64_t)c->gridDimY << 32, c->gridDimZ | (uint64_t)device << 32};
  uint64_t* at = key + HEAD;
  for (int32_t k = 0; k < R->nargs; k++) {
    at[0] = 0;
    memcpy(at, values[k], R->sizes[k]);
    at += (R->sizes[k] + 7) / 8;
  }
  if (R->cannot || atomic_flag_test_and_set_explicit(&R->busy, memory_order_acquire)) return 0;
  int capturing = 1, launched = 0;
  entry* e = find(R, key);
  e->used = ++R->clock;
  /* A capture is to hold the kernel itself. */
  if (++e->seen >= OFTEN && !ts_cu.StreamIsCapturing(c->hStream, &capturing) && !capturing) {
    if (TS_UNLIKELY(!e->ready) && prepare(e, c, kernel, values)) R->cannot = 1;
    if (e->ready) *code = ts_cu.GraphLaunch(e->exec, c->hStream), launched = 1;
  }
  if (TS_UNLIKELY(e->seen > OFTEN)) e->seen = OFTEN;
  atomic_flag_clear_explicit(&R->busy, memory_order_release);
  return launched;
}
