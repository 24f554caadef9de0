/* Fibers: stacks, the switch, and one thread's scheduler.
 *
 * A block that waits is a fiber. A thread starts blocks in order and keeps those that it started; a waiting fiber leaves its
 * condition behind, and the scheduler tests conditions itself, so a fiber is switched to only when it can go on.
 */
#include "ts_rt.h"
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
#include <tvm/ffi/extra/c_env_api.h>

#define STACK_BYTES ((int64_t)256 << 10)
#define GUARD_BYTES ((int64_t)64 << 10) /* whole pages also where a page is 64 KiB */

#if defined(__x86_64__)
/* Callee-saved registers only; the floating-point control words are left alone because no kernel changes them. */
__asm__(
    ".text\n.globl ts_switch\n.hidden ts_switch\n.type ts_switch,@function\n"
    "ts_switch:\n"
    "  pushq %rbp\n  pushq %rbx\n  pushq %r12\n  pushq %r13\n  pushq %r14\n  pushq %r15\n"
    "  movq %rsp, (%rdi)\n  movq %rsi, %rsp\n"
    "  popq %r15\n  popq %r14\n  popq %r13\n  popq %r12\n  popq %rbx\n  popq %rbp\n"
    "  ret\n.size ts_switch,.-ts_switch\n"
    ".globl ts_thunk\n.hidden ts_thunk\n.type ts_thunk,@function\n"
    "ts_thunk:\n  movq %r12, %rdi\n  call ts_fiber_main\n  ud2\n.size ts_thunk,.-ts_thunk\n");
#elif defined(__aarch64__)
__asm__(
    ".text\n.globl ts_switch\n.hidden ts_switch\n.type ts_switch,%function\n"
    "ts_switch:\n"
    "  sub sp, sp, #160\n"
    "  stp x19, x20, [sp, #0]\n  stp x21, x22, [sp, #16]\n  stp x23, x24, [sp, #32]\n  stp x25, x26, [sp, #48]\n"
    "  stp x27, x28, [sp, #64]\n  stp x29, x30, [sp, #80]\n"
    "  stp d8, d9, [sp, #96]\n  stp d10, d11, [sp, #112]\n  stp d12, d13, [sp, #128]\n  stp d14, d15, [sp, #144]\n"
    "  mov x9, sp\n  str x9, [x0]\n  mov sp, x1\n"
    "  ldp x19, x20, [sp, #0]\n  ldp x21, x22, [sp, #16]\n  ldp x23, x24, [sp, #32]\n  ldp x25, x26, [sp, #48]\n"
    "  ldp x27, x28, [sp, #64]\n  ldp x29, x30, [sp, #80]\n"
    "  ldp d8, d9, [sp, #96]\n  ldp d10, d11, [sp, #112]\n  ldp d12, d13, [sp, #128]\n  ldp d14, d15, [sp, #144]\n"
    "  add sp, sp, #160\n  ret\n.size ts_switch,.-ts_switch\n"
    ".globl ts_thunk\n.hidden ts_thunk\n.type ts_thunk,%function\n"
    "ts_thunk:\n  mov x0, x19\n  bl ts_fiber_main\n  brk #1\n.size ts_thunk,.-ts_thunk\n");
#else
#include <ucontext.h>
#endif

__attribute__((visibility("hidden"))) void ts_fiber_main(ts_fiber* f);

#if defined(__x86_64__) || defined(__aarch64__)
extern void ts_switch(void** save, void* to) __attribute__((visibility("hidden")));
extern void ts_thunk(void) __attribute__((visibility("hidden")));

static void fiber_prepare(ts_fiber* f, char* top) {
  uintptr_t t = (uintptr_t)top & ~(uintptr_t)15;
#if defined(__x86_64__)
  void** s = (void**)(t - 56); /* r15 r14 r13 r12 rbx rbp, then the address that ts_switch returns to, at t - 8 */
  memset(s, 0, 56);
  s[3] = f;
  s[6] = (void*)ts_thunk;
#else
  void** s = (void**)(t - 160);
  memset(s, 0, 160);
  s[0] = f;              /* x19 */
  s[11] = (void*)ts_thunk; /* x30 */
#endif
  f->sp = s;
}
static void fiber_enter(ts_worker* W, ts_fiber* f) { ts_switch(&W->sp, f->sp); }
static void fiber_exit(ts_fiber* f) { ts_switch(&f->sp, f->worker->sp); }
#else
static void uc_main(unsigned hi, unsigned lo) { ts_fiber_main((ts_fiber*)(((uintptr_t)hi << 16 << 16) | lo)); }
static void fiber_prepare(ts_fiber* f, char* top) {
  if (!f->uc) f->uc = malloc(sizeof(ucontext_t));
  ucontext_t* u = f->uc;
  getcontext(u);
  u->uc_stack.ss_sp = f->stack + GUARD_BYTES;
  u->uc_stack.ss_size = (size_t)(top - f->stack - GUARD_BYTES);
  u->uc_link = NULL;
  uintptr_t p = (uintptr_t)f;
  makecontext(u, (void (*)(void))uc_main, 2, (unsigned)(p >> 16 >> 16), (unsigned)p);
}
static void fiber_enter(ts_worker* W, ts_fiber* f) {
  if (!W->uc) W->uc = malloc(sizeof(ucontext_t));
  swapcontext(W->uc, f->uc);
}
static void fiber_exit(ts_fiber* f) { swapcontext(f->uc, f->worker->uc); }
#endif

/* ---- a thread's own state: made at its first launch, kept for its life, given back by the key's destructor */

static __thread ts_worker* self;
static pthread_key_t self_key;
static pthread_once_t self_once = PTHREAD_ONCE_INIT;

static void worker_free(void* p) {
  ts_worker* W = p;
  for (ts_fiber* f = W->spare; f;) {
    ts_fiber* next = f->next;
#if !defined(__x86_64__) && !defined(__aarch64__)
    free(f->uc);
#endif
    munmap(f->stack, (size_t)(GUARD_BYTES + STACK_BYTES));
    f = next;
  }
  for (ts_cluster* c = W->spare_clusters; c;) {
    ts_cluster* next = c->next;
    if (W->slab_bytes) munmap(c->slab, (size_t)W->slab_bytes);
    free(c);
    c = next;
  }
  if (W->arena) munmap(W->arena, (size_t)W->arena_bytes);
#if !defined(__x86_64__) && !defined(__aarch64__)
  free(W->uc);
#endif
  free(W);
  self = NULL;
}
static void self_init(void) { pthread_key_create(&self_key, worker_free); }

ts_worker* ts_self(void) {
  if (TS_LIKELY(self != NULL)) return self;
  pthread_once(&self_once, self_init);
  self = calloc(1, sizeof *self);
  if (self) pthread_setspecific(self_key, self);
  return self;
}

uint8_t* ts_memory(int64_t bytes) {
  void* p = mmap(NULL, (size_t)bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return p == MAP_FAILED ? NULL : p;
}

/* ---- fibers of one worker, in a ring */

static void ring_insert(ts_worker* W, ts_fiber* f) {
  /* Before the cursor's fiber, and made the cursor: what was just spawned is looked at next. */
  if (!W->ring) {
    f->next = f->prev = f;
  } else {
    f->next = W->ring;
    f->prev = W->ring->prev;
    f->prev->next = f->next->prev = f;
  }
  W->ring = f;
  W->nfibers++;
}

static void ring_remove(ts_worker* W, ts_fiber* f) {
  if (f->next == f) {
    W->ring = NULL;
  } else {
    f->prev->next = f->next;
    f->next->prev = f->prev;
    if (W->ring == f) W->ring = f->next;
  }
  W->nfibers--;
}

ts_fiber* ts_spawn(ts_launch* L, ts_worker* W) {
  ts_fiber* f = W->spare;
  if (f) {
    W->spare = f->next;
  } else {
    char* stack = (char*)ts_memory(GUARD_BYTES + STACK_BYTES);
    if (!stack || mprotect(stack, (size_t)GUARD_BYTES, PROT_NONE)) {
      if (stack) munmap(stack, (size_t)(GUARD_BYTES + STACK_BYTES));
      return NULL;
    }
    /* The fiber's own record lies at the top of its stack. */
    f = (ts_fiber*)(((uintptr_t)stack + GUARD_BYTES + STACK_BYTES - sizeof(ts_fiber)) & ~(uintptr_t)63);
    f->stack = stack;
  }
  char* stack = f->stack;
#if !defined(__x86_64__) && !defined(__aarch64__)
  void* uc = f->uc;
#endif
  memset(f, 0, sizeof *f);
  f->stack = stack;
#if !defined(__x86_64__) && !defined(__aarch64__)
  f->uc = uc;
#endif
  f->launch = L;
  f->worker = W;
  fiber_prepare(f, (char*)f);
  ring_insert(W, f);
  return f;
}

int ts_is_fiber(const ts_fiber* f) { return f->stack != NULL; }

__attribute__((visibility("hidden"))) void ts_fiber_main(ts_fiber* f) {
  ts_launch* L = f->launch;
  int32_t rc = f->parent ? L->kernel->regions[f->region](f, L->slots, f->arena, f->frame, f->index)
                         : L->kernel->block(f, L->slots, f->arena, f->xyz[0], f->xyz[1], f->xyz[2]);
  if (rc) ts_raise(f, -1, "the kernel's code returned %d", rc);
  ts_leave(f);
}

void ts_leave(ts_fiber* f) {
  if (ts_is_fiber(f)) {
    f->done = 1;
    fiber_exit(f);
    __builtin_unreachable();
  }
  f->flag = NULL;
  longjmp(f->worker->leave, 1);
}

static void cluster_drop(ts_worker* W, ts_cluster* c) {
  c->next = W->spare_clusters;
  W->spare_clusters = c;
}

static void fiber_end(ts_worker* W, ts_fiber* f) {
  ring_remove(W, f);
  if (f->parent) {
    /* Same thread as the parent: the order of this decrement needs no fence. */
    atomic_fetch_sub_explicit(&f->parent->children, 1, memory_order_relaxed);
  } else if (f->cluster && --f->cluster->live == 0) {
    cluster_drop(W, f->cluster); /* the blocks of a cluster keep their arenas until the last of them has ended */
  }
  f->next = W->spare;
  W->spare = f;
}

static void resume(ts_worker* W, ts_fiber* f) {
  if (ts_is_sent(f->why)) atomic_fetch_sub_explicit(f->launch->signal_waits, 1, memory_order_relaxed);
  f->flag = NULL;
  f->why = TS_WAIT_NONE;
  fiber_enter(W, f);
  if (f->done) fiber_end(W, f);
}

/* ---- waiting */

/* Ctrl-C: Python's own exception is set and goes up with the failed call. Only the calling thread can ask. */
static void look_for_signals(ts_launch* L, ts_worker* W, int64_t now) {
  if (W->index != 0 || now - W->signal_check <= 20000000) return;
  W->signal_check = now;
  if (TVMFFIEnvCheckSignals()) {
    L->interrupted = 1;
    ts_launch_fail(L, -1, "interrupted");
  }
}

static void check_limits(ts_launch* L, ts_worker* W) {
  char why[TS_MESSAGE];
  if (ts_others_failed(why, sizeof why)) {
    L->quiet = 1;
    ts_launch_fail(L, -1, "%s", why);
    return;
  }
  int64_t now = ts_about();
  ts_fiber* late = NULL;
  int ask = now - W->asked > 10000000; /* who is still alive is a file of /proc for each */
  if (ask) W->asked = now;
  ts_fiber* f = W->ring ? W->ring : &W->plain;
  ts_fiber* first = f;
  do {
    if (f->flag && f->why != TS_WAIT_CHILDREN) {
      if (f->why == TS_WAIT_AMONG) f->peer = ts_missing_of(f);
      if (f->why == TS_WAIT_ENTRY || f->why == TS_WAIT_SYNC || f->why == TS_WAIT_EXIT || f->why == TS_WAIT_AMONG) {
        int32_t r = ts_team_member(L->team, f->peer);
        /* Whether it has ended is asked before its flag is looked at again: what it set before it ended counts. */
        if (ask && ts_rank_gone(r, why, sizeof why) && !ts_ready(f)) {
          char who[96], told[TS_MESSAGE];
          if (ts_others_failed(told, sizeof told)) { /* it said why just before */
            L->quiet = 1;
            ts_launch_fail(L, -1, "%s", told);
            return;
          }
          ts_who(f, who);
          ts_launch_fail(L, f->site, "%s: waited for rank %d in launch %lld of their team (%s), and %s", who, r, (long long)L->number,
                         L->kernel->name, why);
          return;
        }
      }
      if (ask && ts_is_sent(f->why) && ts_cannot_complete(L, why, sizeof why) && !ts_ready(f)) {
        ts_report_signal(f, 0, why);
        return;
      }
      /* Those who wait at a barrier, or for another rank, often wait for somebody who waits for a signal: that one knows
       * more and speaks first. */
      int64_t limit = ts_time_limit;
      if (f->why == TS_WAIT_BARRIER) limit += atomic_load(L->signal_waits) > 0 ? limit : limit / 16;
      else if (!ts_is_sent(f->why)) limit += ts_rank_waits(L, f->peer) ? limit : limit / 8;
      if (now - f->since > limit && (!late || f->since < late->since)) late = f;
    }
    f = f->next;
  } while (f && f != first);
  if (late && !ts_ready(late)) ts_report_timeout(late);
  look_for_signals(L, W, now);
}

/* Nothing on this thread can go on. Spin a little, then give the processor away, then sleep: other ranks may share it. */
static void idle(ts_launch* L, ts_worker* W) {
  int64_t n = ++W->idle;
  if (n < 64) {
    ts_relax();
    return;
  }
  if (n < 2048) {
    sched_yield();
    if (n & 63) return;
  } else {
    struct timespec t = {0, n < 2248 ? 50000 : n < 3248 ? 200000 : 1000000}; /* longer naps after 10 and 200 ms */
    nanosleep(&t, NULL);
    if (n < 3248 && n & 7) return;
  }
  check_limits(L, W);
}

void ts_block_on(ts_fiber* f, _Atomic int64_t* flag, int64_t value, int32_t cmp, int32_t site, int32_t why) {
  ts_launch* L = f->launch;
  if (ts_failed(L)) ts_leave(f);
  f->flag = flag;
  f->value = value;
  f->cmp = cmp;
  f->site = site;
  f->why = why;
  f->since = ts_about();
  if (ts_is_sent(why)) atomic_fetch_add_explicit(L->signal_waits, 1, memory_order_relaxed);
  if (ts_is_fiber(f)) {
    fiber_exit(f);
    return;
  }
  ts_worker* W = f->worker;
  W->idle = 0;
  while (!ts_ready(f)) {
    idle(L, W);
    if (ts_failed(L)) ts_leave(f);
  }
  if (ts_is_sent(why)) atomic_fetch_sub_explicit(L->signal_waits, 1, memory_order_relaxed);
  f->flag = NULL;
}

/* In each round of a loop whose end depends on memory, so that one that never ends can be ended: by Ctrl-C, by another rank's
 * failure, by a failure of another block of the launch. Looks at clocks and processes every few thousand rounds. */
TS_API void ts_poll(void* ctx) {
  ts_fiber* f = ctx;
  ts_worker* W = f->worker;
  if (TS_LIKELY(++W->polls & 1023)) return;
  ts_launch* L = f->launch;
  char why[TS_MESSAGE];
  if (!ts_failed(L)) look_for_signals(L, W, ts_about());
  if (!ts_failed(L) && !(W->polls & 0xfffff) && ts_others_failed(why, sizeof why)) {
    L->quiet = 1;
    ts_launch_fail(L, -1, "%s", why);
  }
  if (!ts_failed(L) && !(W->polls & 0xfffff) && ts_cannot_complete(L, why, sizeof why)) {
    char who[96];
    ts_who(f, who);
    ts_launch_fail(L, -1, "%s: is in a loop that looks at memory, and %s", who, why);
  }
  if (ts_failed(L)) ts_leave(f);
}

/* Between the rounds of a long loop. What a round takes is not known, so each call looks at the clock. */
TS_API void ts_glance(void* ctx) {
  ts_fiber* f = ctx;
  ts_launch* L = f->launch;
  if (!ts_failed(L)) look_for_signals(L, f->worker, ts_about());
  if (ts_failed(L)) ts_leave(f);
}

void ts_yield(ts_fiber* f) {
  static _Atomic int64_t nothing; /* 0, so that the fiber can run as soon as its turn comes */
  if ((++f->worker->looks & 255) == 0) {
    sched_yield();
    check_limits(f->launch, f->worker);
  }
  ts_block_on(f, &nothing, 0, 0, -1, TS_WAIT_CHILDREN); /* no time limit: it waits for nobody */
}

/* ---- one worker's share of a launch */

static void place_block(const ts_launch* L, int64_t unit, int32_t j, int32_t xyz[3]) {
  /* Units are clusters in order; j counts the blocks of one, x fastest. Without clusters a unit is a block. */
  const int32_t* c = L->kernel->cluster;
  int64_t gx = L->grid[0] / c[0], gy = L->grid[1] / c[1];
  xyz[0] = (int32_t)(unit % gx) * c[0] + j % c[0];
  xyz[1] = (int32_t)(unit / gx % gy) * c[1] + j / c[0] % c[1];
  xyz[2] = (int32_t)(unit / (gx * gy)) * c[2] + j / (c[0] * c[1]);
}

static int64_t linear(const ts_launch* L, const int32_t xyz[3]) {
  return xyz[0] + L->grid[0] * (xyz[1] + L->grid[1] * (int64_t)xyz[2]);
}

static int64_t arena_stride(const ts_kernel* K) { return ((K->arena_bytes > 64 ? K->arena_bytes : 64) + 63) & ~(int64_t)63; }

static ts_cluster* cluster_take(ts_launch* L, ts_worker* W) {
  int64_t bytes = (arena_stride(L->kernel) * L->kernel->cluster_size + 4095) & ~(int64_t)4095;
  if (bytes > W->slab_bytes) { /* only ever between launches: all slabs of a worker have one size */
    for (ts_cluster* c = W->spare_clusters; c;) {
      ts_cluster* next = c->next;
      munmap(c->slab, (size_t)W->slab_bytes);
      free(c);
      c = next;
    }
    W->spare_clusters = NULL;
    W->slab_bytes = bytes;
  }
  ts_cluster* c = W->spare_clusters;
  if (c) {
    W->spare_clusters = c->next;
  } else {
    c = calloc(1, sizeof *c);
    if (!c || !(c->slab = ts_memory(W->slab_bytes))) {
      free(c);
      ts_launch_fail(L, -1, "no memory for %lld bytes of shared memory and fragments", (long long)bytes);
      return NULL;
    }
  }
  c->live = L->kernel->cluster_size;
  atomic_store_explicit(&c->barrier.arrived, 0, memory_order_relaxed);
  atomic_store_explicit(&c->barrier.generation, 0, memory_order_relaxed);
  return c;
}

static int start_unit(ts_launch* L, ts_worker* W) {
  int64_t unit = atomic_fetch_add_explicit(&L->next, 1, memory_order_relaxed);
  if (unit >= L->nunits) return 0;
  ts_cluster* c = cluster_take(L, W);
  if (!c) return 0;
  int32_t n = L->kernel->cluster_size;
  for (int32_t j = 0; j < n; j++) {
    ts_fiber* f = ts_failed(L) ? NULL : ts_spawn(L, W);
    if (!f) {
      c->live -= n - j;
      if (!c->live) cluster_drop(W, c);
      ts_launch_fail(L, -1, "no memory for the stack of one more block (%lld are waiting on this thread); vm.max_map_count "
                     "limits how many there can be", (long long)W->nfibers);
      return 0;
    }
    f->cluster = c;
    f->arena = c->slab + j * arena_stride(L->kernel);
    f->block_barriers = f->own_barriers;
    place_block(L, unit, j, f->xyz);
    f->block = (int32_t)linear(L, f->xyz);
    resume(W, f);
  }
  return 1;
}

static void drop_all(ts_worker* W) {
  /* Blocks that stand in the middle of the kernel are left behind: they own nothing but their stacks and arenas. */
  while (W->ring) fiber_end(W, W->ring);
}

static void run_fibers(ts_launch* L, ts_worker* W) {
  int more = 1;
  while (!ts_failed(L)) {
    int progress = 0;
    /* With a thousand blocks waiting, start the next ones soon. Blocks of many executors come to their end first: stacks
       would run out before all blocks had begun. */
    int crowded = L->kernel->nregions > 0 && W->nfibers > 2048;
    int64_t looks = more && !crowded && W->nfibers > 32 ? 32 : W->nfibers;
    for (; looks > 0 && W->ring && !ts_failed(L); looks--) {
      ts_fiber* f = W->ring;
      W->ring = f->next;
      if (ts_ready(f)) {
        resume(W, f);
        progress = 1;
      }
    }
    if (more && !ts_failed(L) && (!crowded || !progress || (++W->passes & 63) == 0)) { /* polling is progress, too */
      more = start_unit(L, W);
      progress |= more;
    }
    if (!more && !W->nfibers) break;
    if (!progress) {
      idle(L, W);
    } else {
      W->idle = 0;
      if ((++W->ticks & 4095) == 0) check_limits(L, W);
    }
  }
  drop_all(W);
}

static void run_plain(ts_launch* L, ts_worker* W) {
  const ts_kernel* K = L->kernel;
  int64_t need = arena_stride(K);
  if (W->arena_bytes < need) {
    if (W->arena) munmap(W->arena, (size_t)W->arena_bytes);
    W->arena_bytes = (need + 4095) & ~(int64_t)4095;
    W->arena = ts_memory(W->arena_bytes);
    if (!W->arena) {
      W->arena_bytes = 0;
      ts_launch_fail(L, -1, "no memory for %lld bytes of shared memory and fragments", (long long)need);
      return;
    }
  }
  ts_fiber* f = &W->plain;
  memset(f, 0, sizeof *f);
  f->launch = L;
  f->worker = W;
  f->arena = W->arena;
  f->block_barriers = f->own_barriers;
  if (setjmp(W->leave)) return;
  for (;;) {
    int64_t unit = atomic_fetch_add_explicit(&L->next, 1, memory_order_relaxed);
    if (unit >= L->nunits || ts_failed(L)) return;
    if (unit && W->index == 0) look_for_signals(L, W, ts_about());
    for (int32_t j = 0; j < K->cluster_size; j++) {
      place_block(L, unit, j, f->xyz);
      f->block = (int32_t)linear(L, f->xyz);
      int32_t rc = K->block(f, L->slots, f->arena, f->xyz[0], f->xyz[1], f->xyz[2]);
      if (rc) ts_raise(f, -1, "the kernel's code returned %d", rc);
    }
  }
}

void ts_worker_run(ts_launch* L, ts_worker* W) {
  W->idle = 0;
  if (L->as_fibers) {
    run_fibers(L, W);
  } else {
    run_plain(L, W);
  }
}
