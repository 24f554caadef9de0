/* What kernels call to wait, to signal, to meet and to fork. Memory order is argued at each. */
#include "ts_rt.h"

TS_API void ts_wait(void* ctx, int64_t* flag, int64_t value, int32_t cmp, int32_t site) {
  ts_fiber* f = ctx;
  _Atomic int64_t* a = (_Atomic int64_t*)flag;
  /* Acquire pairs with the release of ts_signal: what the signaller did before is visible after. */
  if (ts_holds(atomic_load_explicit(a, memory_order_acquire), value, cmp)) return;
  if (f->worker->nfibers <= 1) { /* nobody else to run here: a short look saves a switch */
    for (int i = 0; i < 64; i++) {
      ts_relax();
      if (ts_holds(atomic_load_explicit(a, memory_order_acquire), value, cmp)) return;
    }
  }
  ts_block_on(f, a, value, cmp, site, TS_WAIT_SIGNAL);
}

TS_API int32_t ts_test(void* ctx, int64_t* flag, int64_t value, int32_t cmp) {
  ts_fiber* f = ctx;
  /* Acquire where it holds, as in ts_wait. A loop that looks in vain lets the others of this thread go on, who may be those that signal. */
  if (ts_holds(atomic_load_explicit((_Atomic int64_t*)flag, memory_order_acquire), value, cmp)) return 1;
  ts_yield(f);
  return 0;
}

TS_API void ts_signal(void* ctx, int64_t* flag, int64_t value, int32_t op) {
  (void)ctx;
  /* Release: all that this executor did before, here or in a peer's memory, is visible to whoever acquires the new value.
   * Adds are read-modify-writes, so each continues the release sequence of those before it: a waiter that sees the sum has
   * acquired them all. The flag may lie in memory that another process maps: lock-free 64-bit atomics mean the same there. */
  _Static_assert(ATOMIC_LLONG_LOCK_FREE == 2, "flags shared between processes need lock-free 64-bit atomics");
  _Atomic int64_t* a = (_Atomic int64_t*)flag;
  if (op == 0) {
    atomic_fetch_add_explicit(a, value, memory_order_release);
  } else if (op == 1) {
    atomic_store_explicit(a, value, memory_order_release);
  } else { /* A maximum or a minimum writes where it changes nothing, too: it continues the release sequence as an addition does. */
    int64_t old = atomic_load_explicit(a, memory_order_relaxed);
    while (!atomic_compare_exchange_weak_explicit(a, &old, (op == 2 ? value > old : value < old) ? value : old, memory_order_release,
                                                  memory_order_relaxed)) {}
  }
}

/* Meets `of` executors of this process. The last to arrive runs `last` before it lets the others go. */
static void meet(ts_fiber* f, ts_barrier_t* b, int64_t of, int32_t site, void (*last)(ts_fiber*, int32_t)) {
  /* The generation cannot move before this executor has arrived, so a relaxed look at it is exact. */
  int64_t generation = atomic_load_explicit(&b->generation, memory_order_relaxed);
  /* Each arrival releases what its executor did; the last one's read-modify-write acquires all of them. */
  int64_t n = atomic_fetch_add_explicit(&b->arrived, 1, memory_order_acq_rel) + 1;
  if (n == of) {
    if (last) last(f, site);
    atomic_store_explicit(&b->arrived, 0, memory_order_relaxed);
    /* Release: who acquires the new generation sees all that was done before any arrival, and the zero above. */
    atomic_store_explicit(&b->generation, generation + 1, memory_order_release);
    return;
  }
  if (!ts_is_fiber(f)) ts_raise(f, site, "a barrier of %lld in a kernel that was not compiled to wait", (long long)of);
  f->barrier = b;
  f->of = (int32_t)of;
  ts_block_on(f, &b->generation, generation, 3, site, TS_WAIT_BARRIER);
}

/* Run by the last block of this rank: everything here has arrived, so tell the others and await the same of them. */
static void meet_ranks(ts_fiber* f, int32_t site) {
  ts_launch* L = f->launch;
  if (!L->team) return;
  int32_t me = ts_team_rank(L->team), size = ts_team_size(L->team);
  int64_t round = L->number << 32 | ++L->device_barriers;
  for (int32_t r = 0; r < size; r++) ts_touch(f, r, site);
  /* Release: this block has acquired all arrivals of its rank, so its store hands all of their work on. */
  atomic_store_explicit(ts_team_word(L->team, me, -1), round, memory_order_release);
  for (int32_t i = 1; i < size; i++) {
    int32_t r = (me + i) % size;
    f->peer = r;
    _Atomic int64_t* word = ts_team_word(L->team, r, -1);
    if (atomic_load_explicit(word, memory_order_acquire) < round) ts_block_on(f, word, round, 0, site, TS_WAIT_SYNC);
  }
}

/* ---- teams inside a kernel
 *
 * Members meet at the lowest of them. One word a block (and one for all blocks) in each rank's own slot: a member stores the team's name
 * there, and the lowest rank zero when all have come. So a word has one writer at a time, says with whom its rank means to meet, and is 0
 * whenever nobody meets: teams that overlap cannot take one another's arrivals, and no word is reset between launches.
 */
static int32_t among_count(const ts_among* t) { return t->ranks ? t->ranks : t->terms[1]; }
static int32_t among_rank(const ts_among* t, int32_t k) { return t->ranks ? t->terms[1 + k] : t->terms[0] + k * t->terms[2]; }

static void meet_among(ts_fiber* f, int32_t site) {
  const struct ts_team* team = f->launch->team;
  ts_among* t = f->among;
  if (!team) return;
  int32_t me = ts_team_rank(team), size = ts_team_size(team), n = 0;
  uint64_t who[TS_MAX_RANKS / 64] = {0};
  t->lowest = me;
  for (int32_t k = 0; k < among_count(t); k++) {
    int32_t r = among_rank(t, k);
    if (r < 0) continue;
    if (r >= size) ts_raise(f, site, "rank %d of a team of T.Scale is out of range: the launch has %d rank%s", r, size, size > 1 ? "s" : "");
    who[r / 64] |= (uint64_t)1 << r % 64;
    if (r < t->lowest) t->lowest = r;
    n++;
  }
  if (n < 2) return;
  uint64_t name = 1469598103934665603u; /* FNV-1a over words; never 0 */
  for (int32_t i = 0; i < TS_MAX_RANKS / 64; i++) name = (name ^ who[i]) * 1099511628211u, name ^= name >> 32;
  t->name = (int64_t)(name | 1);
  for (int32_t r = 0; r < size; r++)
    if (who[r / 64] >> r % 64 & 1) ts_touch(f, r, site);
  if (me != t->lowest) {
    _Atomic int64_t* mine = ts_among_word(team, me, t->block);
    /* Release what was done before; acquire, with the zero, what all members had released to the lowest rank before it stored that. */
    atomic_store_explicit(mine, t->name, memory_order_release);
    if (atomic_load_explicit(mine, memory_order_acquire)) ts_block_on(f, mine, 0, 1, site, TS_WAIT_AMONG);
    return;
  }
  for (int pass = 0; pass < 2; pass++)
    for (int32_t r = me + 1; r < size; r++) {
      if (!(who[r / 64] >> r % 64 & 1)) continue;
      _Atomic int64_t* its = ts_among_word(team, r, t->block);
      if (pass) atomic_store_explicit(its, 0, memory_order_release);
      else if (atomic_load_explicit(its, memory_order_acquire) != t->name) ts_block_on(f, its, t->name, 1, site, TS_WAIT_AMONG);
    }
}

int32_t ts_missing_of(const ts_fiber* f) {
  const ts_among* t = f->among;
  const struct ts_team* team = f->launch->team;
  for (int32_t k = 0; k < among_count(t); k++) {
    int32_t r = among_rank(t, k);
    if (r < 0 || r == t->lowest) continue;
    if (atomic_load_explicit(ts_among_word(team, r, t->block), memory_order_relaxed) != t->name) return r;
  }
  return t->lowest;
}

/* Members of a team inside the kernel meet: with `executors` 0 this block and the same block of the others, else all their blocks, of
 * which so many executors each call this. ranks, terms: as in ts_among. */
TS_API void ts_meet_among(void* ctx, int32_t executors, int32_t site, int32_t ranks, const int32_t* terms) {
  ts_fiber* f = ctx;
  ts_launch* L = f->launch;
  ts_among t = {.terms = terms, .ranks = ranks, .block = executors ? TS_MAX_RESIDENT : f->block};
  if (!executors && f->block >= TS_MAX_RESIDENT)
    ts_raise(f, site, "only the first %d blocks of a grid can meet the same block of other ranks", TS_MAX_RESIDENT);
  f->among = &t;
  if (executors) meet(f, &L->grid_barrier, L->nblocks * executors, site, meet_among);
  else meet_among(f, site);
  f->among = NULL;
}

TS_API void ts_barrier(void* ctx, int32_t scale, int32_t executors, int32_t site) {
  ts_fiber* f = ctx;
  ts_launch* L = f->launch;
  if (executors < 1) executors = 1;
  if (scale <= 3) {
    if (executors > 1) meet(f, f->block_barriers + (scale < 0 && scale > -TS_BLOCK_BARRIERS ? -scale : 0), executors, site, NULL);
  } else if (scale == 4) {
    /* Outside fibers a block is alone in its cluster, or the launch was refused. */
    int64_t of = (int64_t)L->kernel->cluster_size * executors;
    if (of > 1) meet(f, f->cluster ? &f->cluster->barrier : &L->grid_barrier, of, site, NULL);
  } else {
    meet(f, &L->grid_barrier, L->nblocks * executors, site, scale >= 6 ? meet_ranks : NULL);
  }
}

/* A barrier of some of a block's executors, in its own memory, which is zero when the block begins. */
TS_API void ts_barrier_at(void* ctx, void* barrier, int32_t executors, int32_t site) {
  if (executors > 1) meet(ctx, barrier, executors, site, NULL);
}

/* Comes to a block's barrier at which others wait by ts_barrier, and goes on. It releases as meet does; who arrives twice in one phase has
 * no order of its own to rely on. */
TS_API void ts_barrier_arrive(void* ctx, int32_t number, int32_t executors) {
  ts_fiber* f = ctx;
  if (executors < 2) return;
  ts_barrier_t* b = f->block_barriers + (number > 0 && number < TS_BLOCK_BARRIERS ? number : 0);
  /* It cannot move before this executor has arrived. */
  int64_t generation = atomic_load_explicit(&b->generation, memory_order_relaxed);
  if (atomic_fetch_add_explicit(&b->arrived, 1, memory_order_acq_rel) + 1 < executors) return;
  atomic_store_explicit(&b->arrived, 0, memory_order_relaxed);
  atomic_store_explicit(&b->generation, generation + 1, memory_order_release);
}

/* Arriving at the cluster's barrier and waiting there, apart; a barrier's orders (meet). */
TS_API void ts_cluster_arrive(void* ctx, int32_t executors) {
  ts_fiber* f = ctx;
  int64_t of = (int64_t)f->launch->kernel->cluster_size * executors;
  if (of < 2 || !f->cluster) return;
  ts_barrier_t* b = &f->cluster->barrier;
  /* It cannot move before this executor has arrived, which has awaited the phase before. */
  f->phase = atomic_load_explicit(&b->generation, memory_order_relaxed);
  if (atomic_fetch_add_explicit(&b->arrived, 1, memory_order_acq_rel) + 1 < of) return;
  atomic_store_explicit(&b->arrived, 0, memory_order_relaxed);
  atomic_store_explicit(&b->generation, f->phase + 1, memory_order_release);
}

TS_API void ts_cluster_wait(void* ctx, int32_t executors, int32_t site) {
  ts_fiber* f = ctx;
  int64_t of = (int64_t)f->launch->kernel->cluster_size * executors;
  if (of < 2 || !f->cluster) return;
  f->barrier = &f->cluster->barrier;
  f->of = (int32_t)of;
  if (atomic_load_explicit(&f->barrier->generation, memory_order_acquire) == f->phase)
    ts_block_on(f, &f->barrier->generation, f->phase, 3, site, TS_WAIT_BARRIER);
}

TS_API void ts_team_sync(void* ctx, int32_t site) {
  ts_fiber* f = ctx;
  ts_launch* L = f->launch;
  if (!L->team) return;
  int32_t me = ts_team_rank(L->team), size = ts_team_size(L->team);
  if (size == 1) return;
  if (f->block >= TS_MAX_RESIDENT)
    ts_raise(f, site, "only the first %d blocks of a grid can meet the same block of other ranks", TS_MAX_RESIDENT);
  for (int32_t r = 0; r < size; r++) ts_touch(f, r, site);
  /* Only this block writes its word; launches only grow, so words never need to be reset. */
  _Atomic int64_t* mine = ts_team_word(L->team, me, f->block);
  int64_t was = atomic_load_explicit(mine, memory_order_relaxed);
  int64_t round = was >> 32 == L->number ? was + 1 : (L->number << 32 | 1);
  /* Release what this block did; acquire what its twins did before they arrived. */
  atomic_store_explicit(mine, round, memory_order_release);
  for (int32_t i = 1; i < size; i++) {
    int32_t r = (me + i) % size;
    f->peer = r;
    _Atomic int64_t* word = ts_team_word(L->team, r, f->block);
    if (atomic_load_explicit(word, memory_order_acquire) < round) ts_block_on(f, word, round, 0, site, TS_WAIT_SYNC);
  }
}

TS_API void* ts_cluster_arena(void* ctx, int32_t index, int32_t site) {
  ts_fiber* f = ctx;
  int32_t n = f->launch->kernel->cluster_size;
  if (index < 0 || index >= n) ts_raise(f, site, "block %d of a cluster of %d blocks", index, n);
  if (!f->cluster) return f->arena; /* a cluster of one */
  int64_t stride = f->launch->kernel->arena_bytes > 64 ? f->launch->kernel->arena_bytes : 64;
  return f->cluster->slab + index * ((stride + 63) & ~(int64_t)63);
}

TS_API void ts_fork(void* ctx, int32_t region, int64_t* frame, int32_t n) {
  ts_fiber* f = ctx;
  ts_launch* L = f->launch;
  if (region < 0 || region >= L->kernel->nregions) ts_raise(f, -1, "region %d of %d", region, L->kernel->nregions);
  if (!ts_is_fiber(f)) { /* a kernel without waits: its regions do not wait for one another, so one after the other will do */
    for (int32_t i = 0; i < n; i++) {
      int32_t rc = L->kernel->regions[region](f, L->slots, f->arena, frame, i);
      if (rc) ts_raise(f, -1, "the kernel's code returned %d", rc);
    }
    return;
  }
  /* Children stay on the parent's thread: program order is all the order that start and end need. */
  atomic_store_explicit(&f->children, n, memory_order_relaxed);
  for (int32_t i = n - 1; i >= 0; i--) {
    ts_fiber* c = ts_spawn(L, f->worker);
    if (!c) ts_raise(f, -1, "no memory for the stack of one more executor");
    c->parent = f;
    c->region = region;
    c->index = i;
    c->frame = frame;
    c->block = f->block;
    for (int d = 0; d < 3; d++) c->xyz[d] = f->xyz[d];
    c->arena = f->arena;
    c->cluster = f->cluster;
    c->block_barriers = f->block_barriers;
  }
  if (n > 0) ts_block_on(f, &f->children, 0, 1, -1, TS_WAIT_CHILDREN);
}

TS_API void ts_fail(void* ctx, int32_t site) {
  ts_fiber* f = ctx;
  const ts_kernel* K = f->launch->kernel;
  int known = site >= 0 && site < K->nsites;
  ts_raise(f, site, "%s failed: %s", known ? K->sites[site].kind : "an assertion", known ? K->sites[site].text : "");
}
