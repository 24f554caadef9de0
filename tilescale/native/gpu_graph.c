/* Launches by a CUDA graph of one kernel, which the driver hands to the GPU in a third of a launch's time.
 *
 * A kernel that is called for the third time on a stream gets an executable graph there. A call with the arguments of the one before launches
 * it as it is, another one sets its arguments first: they are copied into the graph, tensor maps included, and launches that still run keep
 * theirs (cuGraphExecKernelNodeSetParams). To the program it is the same launch.
 *
 * An executable graph runs once at a time, so each stream has its own: there launches follow one another anyway. Graphs are not for several
 * threads at once (CUDA Driver API, "Graph object thread safety"): who finds them in use launches as ever.
 */
#include "ts_gpu.h"
#include <stdlib.h>
#include <string.h>

enum { STREAMS = 4, WORDS = 80 /* of a key: four tensor maps and 14 arguments, for one */, OFTEN = 3 };
enum { CU_STREAM_CAPTURE_MODE_RELAXED = 2 };

typedef struct {
  void *stream, *graph, *node, *exec;
  int32_t device, calls;
  uint64_t used;       /* the clock when it was last asked for; 0: never */
  uint64_t key[WORDS]; /* the grid and the arguments that `exec` holds */
} entry;

struct ts_graphs {
  atomic_flag busy;
  int32_t nargs, words, refused;
  uint64_t clock;
  entry entries[STREAMS];
  uint8_t sizes[]; /* of the arguments, in bytes */
};

ts_graphs* ts_graphs_new(const uint8_t* sizes, int32_t nargs) {
  int32_t words = 2;
  for (int32_t k = 0; k < nargs; k++) words += (sizes[k] + 7) / 8;
  ts_graphs* G = words > WORDS ? NULL : calloc(1, sizeof *G + (size_t)nargs);
  if (!G) return NULL;
  G->nargs = nargs, G->words = words;
  memcpy(G->sizes, sizes, (size_t)nargs);
  return G;
}

/* A graph that still runs is freed by the driver when it is through (cuGraphExecDestroy). */
static void clear(entry* e) {
  if (e->exec) ts_cu.GraphExecDestroy(e->exec);
  if (e->graph) ts_cu.GraphDestroy(e->graph);
  memset(e, 0, sizeof *e);
}

void ts_graphs_free(ts_graphs* G) {
  for (int k = 0; G && k < STREAMS; k++) clear(&G->entries[k]);
  free(G);
}

/* The entry of this stream; where there is none it takes the place of the one that was not used for longest. */
static entry* entry_of(ts_graphs* G, void* stream, int device) {
  entry* oldest = &G->entries[0];
  for (int k = 0; k < STREAMS; k++) {
    entry* e = &G->entries[k];
    if (e->used && e->stream == stream && e->device == device) return e;
    if (e->used < oldest->used) oldest = e;
  }
  clear(oldest);
  oldest->stream = stream, oldest->device = device;
  return oldest;
}

static CUresult make(entry* e, const CUlaunchConfig* c, const ts_kernel_node* node) {
  int mode = CU_STREAM_CAPTURE_MODE_RELAXED; /* another thread may be capturing, and this allocates */
  ts_cu.ThreadExchangeStreamCaptureMode(&mode);
  CUresult code = ts_cu.GraphCreate(&e->graph, 0);
  if (!code) code = ts_cu.GraphAddKernelNode(&e->node, e->graph, NULL, 0, node);
  for (uint32_t k = 0; k < c->numAttrs && !code; k++)
    code = ts_cu.GraphKernelNodeSetAttribute(e->node, (int)c->attrs[k].id, &c->attrs[k].value);
  if (!code) code = ts_cu.GraphInstantiateWithFlags(&e->exec, e->graph, 0);
  ts_cu.ThreadExchangeStreamCaptureMode(&mode);
  return code;
}

int ts_graphs_launch(ts_graphs* G, int device, const CUlaunchConfig* c, void* kernel, void** values, CUresult* code) {
  uint64_t key[WORDS] = {c->gridDimX | (uint64_t)c->gridDimY << 32, c->gridDimZ}, *at = key + 2;
  for (int32_t k = 0; k < G->nargs; k++) {
    at[0] = 0;
    memcpy(at, values[k], G->sizes[k]);
    at += (G->sizes[k] + 7) / 8;
  }
  if (atomic_flag_test_and_set_explicit(&G->busy, memory_order_acquire)) return 0;
  size_t bytes = (size_t)G->words * sizeof *key;
  int capturing = 1, ready = 0;
  entry* e = entry_of(G, c->hStream, device);
  e->used = ++G->clock;
  if (e->calls < OFTEN) e->calls++;
  /* A capture is to hold the kernel itself. */
  if (e->calls == OFTEN && !G->refused && !ts_cu.StreamIsCapturing(c->hStream, &capturing) && !capturing) {
    ready = e->exec && !memcmp(e->key, key, bytes);
    if (!ready) {
      ts_kernel_node node = {NULL, c->gridDimX, c->gridDimY, c->gridDimZ, c->blockDimX, c->blockDimY, c->blockDimZ, c->sharedMemBytes,
                             values, NULL, kernel, NULL};
      ready = !(e->exec ? ts_cu.GraphExecKernelNodeSetParams(e->exec, e->node, &node) : make(e, c, &node));
      memcpy(e->key, key, bytes);
      G->refused = !ready;
    }
    if (ready) *code = ts_cu.GraphLaunch(e->exec, c->hStream);
  }
  atomic_flag_clear_explicit(&G->busy, memory_order_release);
  return ready;
}
