/* The threads of a launch. They persist between launches; the calling thread is always worker 0.
 *
 * A launch of one unit (or on one thread) touches nothing here: no lock, no wake-up.
 */
#include "ts_rt.h"
#include <pthread.h>
#include <stdlib.h>
#include <time.h>
#include <tvm/ffi/extra/c_env_api.h>

int64_t ts_time_limit = 120000000000LL;
int ts_launch_graphs;
int32_t ts_spare;
static int nthreads = 1;

static struct {
  pthread_mutex_t launching; /* held through a launch that uses the pool: launches from several Python threads take turns */
  pthread_mutex_t lock;      /* guards what follows */
  pthread_cond_t wake, done;
  int started;               /* workers 1 … started exist */
  _Atomic int64_t epoch;     /* counts launches; written under the lock, read without it by those who spin */
  ts_launch* launch;
  _Atomic int active;        /* workers still at it */
} pool = {.launching = PTHREAD_MUTEX_INITIALIZER, .lock = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER,
          .done = PTHREAD_COND_INITIALIZER};

TS_API void ts_configure(int32_t threads, int64_t time_limit_ns, int32_t launch_graphs, int32_t spare) {
  if (threads > 0) nthreads = threads;
  if (time_limit_ns > 0) ts_time_limit = time_limit_ns;
  ts_launch_graphs = launch_graphs;
  ts_spare = spare;
}

int ts_pool_threads(void) { return nthreads; }

static void* pool_main(void* p) {
  int index = (int)(intptr_t)p;
  int64_t seen = 0;
  for (;;) {
    /* Launches often follow one another at once: look for a moment before going to sleep. */
    for (int i = 0; i < 1000 && atomic_load_explicit(&pool.epoch, memory_order_relaxed) == seen; i++) ts_relax();
    pthread_mutex_lock(&pool.lock);
    /* The lock orders the launch's fields before this thread's reads of them, and this thread's work before the caller's. */
    while (pool.epoch == seen) pthread_cond_wait(&pool.wake, &pool.lock);
    seen = pool.epoch;
    ts_launch* L = pool.launch;
    if (!L || index >= L->nworkers) {
      pthread_mutex_unlock(&pool.lock);
      continue;
    }
    pthread_mutex_unlock(&pool.lock);
    ts_worker* W = ts_self();
    if (W) {
      W->index = index;
      ts_worker_run(L, W);
    } else {
      ts_launch_fail(L, -1, "no memory for a thread of the pool");
    }
    pthread_mutex_lock(&pool.lock);
    if (--pool.active == 0) pthread_cond_signal(&pool.done);
    pthread_mutex_unlock(&pool.lock);
  }
  return NULL;
}

static void after_fork_in_child(void) {
  /* Only the forking thread lives on: forget the others and start new ones when they are needed. */
  pthread_mutex_init(&pool.launching, NULL);
  pthread_mutex_init(&pool.lock, NULL);
  pthread_cond_init(&pool.wake, NULL);
  pthread_cond_init(&pool.done, NULL);
  pool.started = 0;
  pool.active = 0;
  pool.epoch = 0;
  pool.launch = NULL;
}

__attribute__((constructor)) static void pool_load(void) { pthread_atfork(NULL, NULL, after_fork_in_child); }

static int pool_grow(int want) {
  pthread_attr_t a;
  pthread_attr_init(&a);
  pthread_attr_setdetachstate(&a, PTHREAD_CREATE_DETACHED);
  while (pool.started < want) {
    pthread_t t;
    if (pthread_create(&t, &a, pool_main, (void*)(intptr_t)(pool.started + 1))) break;
    pool.started++;
  }
  pthread_attr_destroy(&a);
  return pool.started;
}

void ts_pool_run(ts_launch* L) {
  ts_worker* W = ts_self();
  if (!W) {
    ts_launch_fail(L, -1, "no memory for the launch");
    return;
  }
  W->index = 0;
  int64_t want = L->nunits < nthreads ? L->nunits : nthreads;
  if (want <= 1) {
    L->nworkers = 1;
    ts_worker_run(L, W);
    return;
  }
  pthread_mutex_lock(&pool.launching);
  pthread_mutex_lock(&pool.lock);
  L->nworkers = 1 + pool_grow((int)want - 1);
  if (L->nworkers > want) L->nworkers = (int32_t)want;
  pool.launch = L;
  pool.active = L->nworkers - 1;
  pool.epoch++;
  pthread_cond_broadcast(&pool.wake);
  pthread_mutex_unlock(&pool.lock);
  ts_worker_run(L, W);
  for (int i = 0; i < 1000 && pool.active; i++) ts_relax();
  pthread_mutex_lock(&pool.lock);
  while (pool.active) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    t.tv_nsec += 50000000;
    if (t.tv_nsec >= 1000000000) t.tv_sec++, t.tv_nsec -= 1000000000;
    pthread_cond_timedwait(&pool.done, &pool.lock, &t);
    if (pool.active && !ts_failed(L)) {
      pthread_mutex_unlock(&pool.lock);
      if (TVMFFIEnvCheckSignals()) {
        L->interrupted = 1;
        ts_launch_fail(L, -1, "interrupted");
      }
      pthread_mutex_lock(&pool.lock);
    }
  }
  pool.launch = NULL;
  pthread_mutex_unlock(&pool.lock);
  pthread_mutex_unlock(&pool.launching);
}
