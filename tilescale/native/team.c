/* Teams, and the protocol of a launch on one: entry flags with fingerprints, peers' addresses, exit flags.
 *
 * Host order numbers the launches of a team 1, 2, … on every rank alike. Launch k of rank r:
 *   1. r writes what it launches and stores entry = k with release. Whatever r's host and earlier kernels did, its zeroed signals
 *      included, comes before that store.
 *   2. Before its first access to rank q, a block awaits q's entry >= k with acquire, and compares what q launches.
 *   3. When all its blocks have ended (so all its stores to peers are done), and all ranks have entered, r stores
 *      exit = k with release, awaits exit >= k of every rank with acquire, zeroes its signals and returns.
 * q reads r's description only between r's entry k and q's own exit k, and r writes the next one only after q's exit k: no lock.
 */
#include "ts_heap.h"
#include <stdio.h>
#include <string.h>

typedef struct ts_team {
  int32_t size, rank, slot;
  int32_t members[TS_MAX_RANKS];
  ts_slot* slots[TS_MAX_RANKS]; /* each member's, in its own control area */
  uint64_t hash;
  int64_t launches;
  uint64_t calls; /* of collectives, that this rank's host has said */
  int32_t label_of; /* the kernel whose label stands in this rank's slot, -1 none */
} ts_team;

static ts_team teams[TS_MAX_TEAMS];

int32_t ts_team_rank(const ts_team* team) { return team->rank; }
int32_t ts_team_size(const ts_team* team) { return team->size; }
const ts_team* ts_team_at(int32_t index) { return &teams[index]; }
int32_t ts_team_index(const ts_team* team) { return team->slot; }
ts_slot* ts_team_slot(const ts_team* team, int32_t rank) { return team->slots[rank]; }
int32_t ts_team_member(const ts_team* team, int32_t rank) { return team ? team->members[rank] : rank; }

void ts_teams_forget(void) { memset(teams, 0, sizeof teams); }

/* Team `slot` of this rank; each member tells which of its own slots it uses for it. 0, or the errno of its memory. */
TS_API int32_t ts_team_make(int32_t slot, int32_t n, const int32_t* members, const int32_t* slots) {
  ts_team* t = &teams[slot];
  memset(t, 0, sizeof *t);
  t->size = n;
  t->slot = slot;
  t->label_of = -1;
  t->hash = 1469598103934665603u; /* FNV-1a */
  for (int32_t i = 0; i < n; i++) {
    t->members[i] = members[i];
    t->slots[i] = &ts_control_of(members[i])->slots[slots[i]];
    t->hash = (t->hash ^ (uint64_t)(members[i] + 1)) * 1099511628211u;
    if (members[i] == ts_the_heap.rank) t->rank = i;
  }
  return slot ? ts_heap_back_slot(slot) : 0;
}

_Atomic int64_t* ts_team_word(const ts_team* team, int32_t rank, int32_t block) {
  return block < 0 ? &team->slots[rank]->device : &team->slots[rank]->sync[block];
}

_Atomic int64_t* ts_among_word(const ts_team* team, int32_t rank, int32_t block) { return &team->slots[rank]->among[block]; }

static void list_members(const ts_team* t, char* out, size_t bytes) {
  size_t n = (size_t)snprintf(out, bytes, "ranks ");
  for (int32_t i = 0; i < t->size && n < bytes; i++) n += (size_t)snprintf(out + n, bytes - n, i ? " %d" : "%d", t->members[i]);
}

static int in_heap(const char* p) {
  const ts_heap* h = &ts_the_heap;
  return p >= h->base && p < h->base + h->segment * h->world;
}

static ts_arena host_arena(void) {
  const ts_heap* h = &ts_the_heap;
  return (ts_arena){h->base ? h->base + h->rank * h->segment : NULL, h->control, h->segment, h->tags, in_heap};
}

/* Which team a launch is of: that of its symmetric arguments, which must be one; without any, everyone. */
int ts_team_of_args(const ts_kernel* K, const ts_arg* args, ts_team** team) {
  const ts_arena m = K->device == kDLCPU ? host_arena() : ts_gpu_arena();
  int32_t tag = 0;
  for (int32_t i = 0; i < K->nparams; i++) {
    if (K->params[i].kind < TS_KIND_SYMM || args[i].lo == args[i].hi) continue; /* an empty tensor lies nowhere */
    if (!m.start || args[i].lo < m.start + m.control || args[i].hi > m.start + m.segment) {
      int peers = m.start && m.is_peers(args[i].lo);
      return ts_error("TypeError", "TS:notsymm:%d:-1:symmetric memory of this rank:%s", i,
                      peers ? "a view of another rank's memory" : "an ordinary tensor");
    }
    int32_t its = m.tags[(args[i].lo - m.start) / TS_PAGE];
    if (!its) return ts_error("TypeError", "TS:notsymm:%d:-1:symmetric memory of this rank:memory that was freed", i);
    if (tag && its != tag) {
      char a[640], b[640];
      list_members(&teams[tag - 1], a, sizeof a);
      list_members(&teams[its - 1], b, sizeof b);
      return ts_error("ValueError", "TS:team:%d:-1:%s:%s", i, a, b);
    }
    tag = its;
  }
  *team = tag ? &teams[tag - 1] : m.start ? &teams[0] : NULL;
  return 0;
}

void ts_put_description(const ts_kernel* K, const ts_arg* args, const ts_team* team, const char* start, ts_description* s) {
  s->fingerprint = K->fingerprint;
  s->members = team->hash;
  int32_t n = 0;
  for (int32_t i = 0; i < K->nparams; i++) {
    if (K->params[i].kind < TS_KIND_SYMM) continue;
    ts_symm* y = &s->symm[n++];
    const ts_arg* a = &args[i];
    y->offset = a->lo == a->hi ? -1 : a->lo - start;
    y->ndim = K->params[i].ndim;
    y->code = K->params[i].code;
    y->bits = K->params[i].bits;
    for (int32_t d = 0; d < y->ndim; d++) y->shape[d] = a->tensor->shape[d];
  }
  s->nsymm = n;
}

static void put_description(const ts_launch* L, ts_slot* s) {
  ts_put_description(L->kernel, L->args, L->team, ts_the_heap.base + ts_the_heap.rank * ts_the_heap.segment, &s->what);
  if (L->team->label_of == L->kernel->id) return;
  snprintf(s->what.label, sizeof s->what.label, "%s", L->kernel->label);
  L->team->label_of = L->kernel->id;
}

void ts_team_enter(ts_launch* L) {
  ts_team* t = L->team;
  const ts_kernel* K = L->kernel;
  char why[TS_MESSAGE];
  if (!(K->flags & TS_FLAG_DEVICE)) return;
  L->number = ++t->launches;
  if (t->size == 1) return;
  ts_control* mine = ts_control_of(ts_the_heap.rank); /* two words for messages only, hence without order */
  atomic_store_explicit(&mine->in_slot, t->slot + 1, memory_order_relaxed);
  atomic_store_explicit(&mine->signal_waits, 0, memory_order_relaxed);
  L->signal_waits = &mine->signal_waits;
  if (ts_others_failed(why, sizeof why)) {
    L->quiet = 1;
    ts_launch_fail(L, -1, "%s", why);
    return;
  }
  if (K->flags & TS_FLAG_UNORDERED) {
    for (int32_t r = 0; r < t->size; r++) atomic_store_explicit(&L->touched[r], 1, memory_order_relaxed);
    return;
  }
  atomic_store_explicit(&L->touched[t->rank], 1, memory_order_relaxed);
  put_description(L, t->slots[t->rank]);
  atomic_store_explicit(&t->slots[t->rank]->entry, L->number, memory_order_release); /* step 1 above */
}

/* ---- what differs, in words */

static size_t put_shape(const ts_symm* y, char* out, size_t room) {
  size_t n = (size_t)snprintf(out, room, "(");
  for (int32_t d = 0; d < y->ndim && n < room; d++) n += (size_t)snprintf(out + n, room - n, d ? ", %lld" : "%lld", (long long)y->shape[d]);
  if (n < room) n += (size_t)snprintf(out + n, room - n, y->ndim == 1 ? ",)" : ")");
  return n;
}

void ts_put_words(const ts_description* s, char* out, size_t room) {
  char dtype[32];
  const char* names = strchr(s->label, '\n');
  size_t n = (size_t)snprintf(out, room, "%.*s", names ? (int)(names - s->label) : 200, s->label);
  names = names ? names + 1 : "";
  for (int32_t i = 0; i < s->nsymm && i < TS_MAX_SYMM && n < room; i++) {
    const ts_symm* y = &s->symm[i];
    int width = (int)strcspn(names, ",");
    n += (size_t)snprintf(out + n, room - n, "; %.*s %s", width, names, ts_dtype_name(y->code, y->bits, dtype));
    if (n < room) n += put_shape(y, out + n, room - n);
    if (n < room) n += (size_t)snprintf(out + n, room - n, " at heap offset %lld", (long long)y->offset);
    names += width + (names[width] == ',');
  }
}

const char* ts_difference(const ts_description* a, const ts_description* b) {
  size_t na = strcspn(a->label, "(\n"), nb = strcspn(b->label, "(\n");
  if (na != nb || strncmp(a->label, b->label, na)) return "different kernels";
  if (a->fingerprint != b->fingerprint) return "the same kernel with different code or constants";
  if (a->members != b->members) return "the same kernel on different teams";
  for (int32_t i = 0; i < a->nsymm; i++) {
    if (a->symm[i].ndim != b->symm[i].ndim || memcmp(a->symm[i].shape, b->symm[i].shape, 8 * (size_t)a->symm[i].ndim))
      return "the same kernel with different shapes of symmetric arguments";
    if (a->symm[i].offset != b->symm[i].offset) return "the same kernel with symmetric arguments at different heap offsets";
  }
  return NULL;
}

void ts_touch(ts_fiber* f, int32_t rank, int32_t site) {
  ts_launch* L = f->launch;
  /* Acquire pairs with the release below: another block's look at that rank's entry serves this one. */
  if (TS_LIKELY(atomic_load_explicit(&L->touched[rank], memory_order_acquire)) || rank == L->team->rank) return;
  if (!(L->kernel->flags & TS_FLAG_DEVICE)) ts_raise(f, site, "a kernel that was not compiled to touch peers touches rank %d", rank);
  const ts_slot *mine = L->team->slots[L->team->rank], *its = L->team->slots[rank];
  _Atomic int64_t* entry = &L->team->slots[rank]->entry;
  f->peer = rank;
  if (atomic_load_explicit(entry, memory_order_acquire) < L->number) ts_block_on(f, entry, L->number, 0, site, TS_WAIT_ENTRY);
  int ahead = atomic_load_explicit(entry, memory_order_relaxed) > L->number;
  const char* what = ahead ? "different kernels" : ts_difference(&mine->what, &its->what);
  if (what) {
    char a[900], b[900];
    int32_t me = L->team->members[L->team->rank], it = L->team->members[rank];
    ts_put_words(&mine->what, a, sizeof a);
    ts_put_words(&its->what, b, sizeof b);
    ts_launch_fail(L, site, "in launch %lld of their team ranks %d and %d launched %s: rank %d: %s | rank %d: %s", (long long)L->number,
                   me, it, what, me, a, it, b);
    ts_leave(f);
  }
  atomic_store_explicit(&L->touched[rank], 1, memory_order_release);
}

TS_API void* ts_peer(void* ctx, void* p, int32_t rank, int32_t site) {
  ts_fiber* f = ctx;
  const ts_team* t = f->launch->team;
  const ts_heap* h = &ts_the_heap;
  if (TS_UNLIKELY(TS_IS_OUTSIDE(rank))) ts_raise(f, site, "rank %d is out of range of the team of its T.Scale", (int16_t)(rank - TS_OUTSIDE));
  if (TS_UNLIKELY(rank < 0 || rank >= (t ? t->size : 1)))
    ts_raise(f, site, "rank %d is out of range: the team has %d rank%s", rank, t ? t->size : 1, t && t->size > 1 ? "s" : "");
  if (!t || rank == t->rank) return p;
  int64_t offset = (char*)p - (h->base + h->rank * h->segment);
  if (TS_UNLIKELY(offset < h->control || offset >= h->segment)) ts_raise(f, site, "this address has no twin: it is not in symmetric memory");
  ts_touch(f, rank, site);
  return h->base + t->members[rank] * h->segment + offset;
}

int ts_rank_waits(const ts_launch* L, int32_t rank) {
  return atomic_load_explicit(&ts_control_of(ts_team_member(L->team, rank))->signal_waits, memory_order_relaxed) > 0;
}

/* 1, and who, where a rank has ended without finishing this launch: an ordered launch cannot be complete without it. Only whether it has said
 * so is asked: a rank that dies is its launcher's business. */
int ts_cannot_complete(const ts_launch* L, char* out, size_t bytes) {
  const ts_team* t = L->team;
  int32_t flags = L->kernel->flags;
  if (!t || !(flags & TS_FLAG_DEVICE) || (flags & TS_FLAG_UNORDERED)) return 0;
  for (int32_t i = 1; i < t->size; i++) {
    int32_t rank = (t->rank + i) % t->size, r = t->members[rank];
    if (atomic_load_explicit(&ts_control_of(r)->state, memory_order_acquire) != TS_STATE_LEFT) continue;
    if (atomic_load_explicit(&t->slots[rank]->exit, memory_order_acquire) >= L->number) continue;
    snprintf(out, bytes, "rank %d has ended", r);
    return 1;
  }
  return 0;
}

/* What a rank that is waited for does instead: read without order, for a message only. */
void ts_describe_launch(const ts_launch* L, int32_t rank, char* out, size_t bytes) {
  int32_t r = ts_team_member(L->team, rank);
  const ts_control* c = ts_control_of(r);
  int32_t in = atomic_load_explicit(&c->in_slot, memory_order_relaxed);
  const ts_slot* s = in ? &c->slots[in - 1] : L->team->slots[rank];
  char text[500];
  int64_t k = atomic_load_explicit(&s->entry, memory_order_acquire);
  ts_put_words(&s->what, text, sizeof text);
  if (in && s != L->team->slots[rank]) snprintf(out, bytes, "rank %d is in launch %lld of another team: %s", r, (long long)k, text);
  else if (in) snprintf(out, bytes, "rank %d is in launch %lld: %s", r, (long long)k, text);
  else if (k) snprintf(out, bytes, "rank %d is in no launch; its last one here was %lld: %s", r, (long long)k, text);
  else snprintf(out, bytes, "rank %d has launched nothing on this team", r);
}

static void zero_signals(const ts_launch* L) {
  /* Before the next entry's release, so a rank that acquires that entry sees zeros and its signals are not lost. */
  for (int32_t i = 0; i < L->kernel->nparams; i++)
    if (L->kernel->params[i].kind == TS_KIND_SIGNAL) memset(L->args[i].lo, 0, (size_t)(L->args[i].hi - L->args[i].lo));
}

static void meet_at_exit(ts_launch* L) {
  ts_team* t = L->team;
  ts_worker* W = ts_self();
  ts_fiber* f = &W->plain;
  memset(f, 0, sizeof *f);
  f->launch = L;
  f->worker = W;
  f->block = -1;
  W->index = 0;
  if (setjmp(W->leave)) return;
  /* Whoever has not been touched may have launched something else; after the exit flags its description may be overwritten. */
  for (int32_t i = 1; i < t->size; i++) ts_touch(f, (t->rank + i) % t->size, -1);
  /* Step 3: the pool has joined, so this release covers the stores of all blocks. */
  atomic_store_explicit(&t->slots[t->rank]->exit, L->number, memory_order_release);
  for (int32_t i = 1; i < t->size; i++) {
    f->peer = (t->rank + i) % t->size;
    _Atomic int64_t* word = &t->slots[f->peer]->exit;
    if (atomic_load_explicit(word, memory_order_acquire) < L->number) ts_block_on(f, word, L->number, 0, -1, TS_WAIT_EXIT);
  }
}

void ts_team_leave(ts_launch* L) {
  const ts_team* t = L->team;
  int32_t flags = L->kernel->flags;
  if (t->size > 1 && (flags & TS_FLAG_DEVICE)) {
    if (!ts_failed(L) && !(flags & TS_FLAG_UNORDERED)) meet_at_exit(L);
    if (atomic_load_explicit(&L->failed, memory_order_acquire)) {
      if (!L->quiet) ts_stop_others(L->message);
      return;
    }
    atomic_store_explicit(&ts_control_of(ts_the_heap.rank)->in_slot, 0, memory_order_relaxed);
    if (flags & TS_FLAG_UNORDERED) return; /* others may be signalling for the next launch already: theirs to count on */
  }
  zero_signals(L);
}

/* ---- calls of collectives, as hosts compare them */

static void put_said(const ts_slot* s, uint64_t call, char* out, size_t room) {
  const ts_words* w = &s->words[call % TS_WORDS];
  snprintf(out, room, "%.119s", w->text);
  atomic_thread_fence(memory_order_acquire);
  if (atomic_load_explicit(&w->call, memory_order_relaxed) != call) snprintf(out, room, "something that it has forgotten");
}

/* This rank's host makes its next call of a collective on a team, which `text` names; `mark` is a hash of it. Nobody waits: 0 where no rank
 * that has come to this call makes another one, else 1 and who makes which, which all ranks are told that wait.
 *
 * Which rank finds a difference: each stores its word, then loads the others', all in one order (memory_order_seq_cst), so of two ranks the
 * one whose store comes second sees the first. The words of a call are written before its mark is released by that store. */
TS_API int32_t ts_team_say(int32_t slot, uint32_t mark, const char* text, char* out, int32_t bytes) {
  ts_team* t = &teams[slot];
  if (t->size < 2) return 0;
  uint64_t call = ++t->calls, word = call << 32 | mark;
  ts_slot* mine = t->slots[t->rank];
  ts_words* words = &mine->words[call % TS_WORDS];
  atomic_store_explicit(&words->call, 0, memory_order_relaxed);
  atomic_thread_fence(memory_order_release); /* who reads the new text does not find the old number behind it */
  snprintf(words->text, sizeof words->text, "%s", text);
  atomic_store_explicit(&words->call, call, memory_order_release);
  atomic_store_explicit(&mine->said[call % TS_SAID], word, memory_order_seq_cst);
  for (int32_t i = 1; i < t->size; i++) {
    int32_t rank = (t->rank + i) % t->size;
    uint64_t its = atomic_load_explicit(&t->slots[rank]->said[call % TS_SAID], memory_order_seq_cst);
    if (its == word || its >> 32 != (uint32_t)call) continue;
    char theirs[160];
    put_said(t->slots[rank], call, theirs, sizeof theirs);
    snprintf(out, (size_t)bytes, "in collective call %llu of their team ranks %d and %d call different things: rank %d: %s | rank %d: %s",
             (unsigned long long)call, t->members[t->rank], t->members[rank], t->members[t->rank], text, t->members[rank], theirs);
    ts_stop_others(out); /* as a launch that differs does: they wait for what this rank will not send */
    return 1;
  }
  return 0;
}
