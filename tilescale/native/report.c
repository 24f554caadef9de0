/* What people read: failures of a running launch, prints, and the log of an instrumented kernel. */
#include "ts_rt.h"
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

int64_t ts_now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000LL + t.tv_nsec;
}

int64_t ts_about(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC_COARSE, &t);
  return t.tv_sec * 1000000000LL + t.tv_nsec;
}

int ts_error(const char* kind, const char* format, ...) {
  char text[TS_MESSAGE + 64];
  va_list v;
  va_start(v, format);
  vsnprintf(text, sizeof text, format, v);
  va_end(v);
  /* Made by hand with an empty C backtrace: taking one reads the debug tables of every loaded library the first time, which
   * takes a second where torch is loaded, and tells users nothing. */
  TVMFFIByteArray k = {kind, strlen(kind)}, m = {text, strlen(text)}, none = {"", 0};
  TVMFFIObjectHandle error;
  if (TVMFFIErrorCreate(&k, &m, &none, &error)) {
    TVMFFIErrorSetRaisedFromCStr(kind, text);
    return -1;
  }
  TVMFFIErrorSetRaised(error); /* takes a reference of its own */
  TVMFFIObjectDecRef(error);
  return -1;
}

static void fail_v(ts_launch* L, int32_t site, const char* format, va_list v) {
  int32_t zero = 0;
  /* The first failure is the one that is told: later ones are its echoes. */
  if (!atomic_compare_exchange_strong(&L->failed, &zero, 1)) return;
  L->site = site;
  int n = vsnprintf(L->message, sizeof L->message, format, v);
  const ts_kernel* K = L->kernel;
  if (n >= 0 && n < (int)sizeof L->message && site >= 0 && site < K->nsites && K->sites[site].file[0])
    snprintf(L->message + n, sizeof L->message - (size_t)n, " (%s:%s)", K->sites[site].file, K->sites[site].line);
  atomic_store_explicit(&L->failed, 2, memory_order_release); /* whoever acquires the 2 may read the message */
}

void ts_launch_fail(ts_launch* L, int32_t site, const char* format, ...) {
  va_list v;
  va_start(v, format);
  fail_v(L, site, format, v);
  va_end(v);
}

void ts_who(const ts_fiber* f, char out[96]) {
  int n = snprintf(out, 96, "rank %d", ts_world_rank());
  if (f->block >= 0) snprintf(out + n, 96 - (size_t)n, ", block (%d, %d, %d)", f->xyz[0], f->xyz[1], f->xyz[2]);
}

void ts_raise(ts_fiber* f, int32_t site, const char* format, ...) {
  char text[TS_MESSAGE], who[96];
  va_list v;
  va_start(v, format);
  vsnprintf(text, sizeof text, format, v);
  va_end(v);
  ts_who(f, who);
  ts_launch_fail(f->launch, site, "%s: %s", who, text);
  ts_leave(f);
}

/* The name of a flag: the signal's, with its index when the flag lies in a signal or tensor argument. */
static void flag_name(const ts_fiber* f, char* out, size_t bytes) {
  const ts_kernel* K = f->launch->kernel;
  const char* name = f->site >= 0 && f->site < K->nsites && K->sites[f->site].name[0] ? K->sites[f->site].name : "a flag";
  const char* p = (const char*)f->flag;
  for (int32_t i = 0; i < K->nparams; i++) {
    const ts_arg* a = &f->launch->args[i];
    if (!a->tensor || p < a->lo || p >= a->hi) continue;
    int64_t at = (p - a->lo) / (K->params[i].bits >= 8 ? K->params[i].bits / 8 : 1), index[TS_MAX_DIM];
    for (int32_t d = K->params[i].ndim - 1; d >= 0; d--) { /* signals are row-major */
      int64_t extent = a->tensor->shape[d] > 0 ? a->tensor->shape[d] : 1;
      index[d] = at % extent;
      at /= extent;
    }
    size_t n = (size_t)snprintf(out, bytes, "%s", name);
    for (int32_t d = 0; d < K->params[i].ndim && n < bytes; d++)
      n += (size_t)snprintf(out + n, bytes - n, "%s%lld%s", d ? ", " : "[", (long long)index[d],
                            d + 1 == K->params[i].ndim ? "]" : "");
    return;
  }
  snprintf(out, bytes, "%s", name);
}

/* A wait for a counter ends with the launch: after so many seconds (0: at once), with what is known of other ranks. */
void ts_report_signal(ts_fiber* f, double limit, const char* known) {
  static const char* const sign[] = {">=", "==", ">", "!=", "<=", "<"};
  char who[96], name[160], time[32] = "";
  ts_who(f, who);
  if (limit > 0) snprintf(time, sizeof time, " %g s", limit);
  if (f->why == TS_WAIT_PACKETS) {
    int64_t seen = (int64_t)((uint64_t)atomic_load_explicit(f->flag, memory_order_relaxed) >> 32);
    int64_t number = f->cmp == TS_CMP_NOT ? f->of : f->value;
    char last[64] = "none came before";
    if (f->cmp == TS_CMP_NOT) snprintf(last, sizeof last, "they have not come");
    else if (seen) snprintf(last, sizeof last, "those of launch %lld came last", (long long)seen);
    ts_launch_fail(f->launch, f->site, "%s: waited%s for packets of %s in launch %lld of those that use it: %s%s%s", who, time,
                   f->launch->kernel->sites[f->site].name, (long long)number, last, *known ? ", and " : "", known);
    return;
  }
  flag_name(f, name, sizeof name);
  ts_launch_fail(f->launch, f->site, "%s: waited%s for %s: expected %s %lld, the value is %lld%s%s", who, time, name,
                 sign[f->cmp < 0 || f->cmp > 5 ? 5 : f->cmp], (long long)f->value,
                 (long long)atomic_load_explicit(f->flag, memory_order_relaxed), *known ? ", and " : "", known);
}

/* Those of the launch's ranks that have ended, and how. */
static void put_gone(const ts_launch* L, char* out, size_t bytes) {
  char one[600];
  size_t n = 0;
  out[0] = 0;
  for (int32_t k = 0; L->team && k < ts_team_size(L->team) && n < bytes; k++)
    if (ts_rank_gone(ts_team_member(L->team, k), one, sizeof one)) n += (size_t)snprintf(out + n, bytes - n, "%s%s", n ? ", " : "", one);
}

void ts_report_timeout(ts_fiber* f) {
  ts_launch* L = f->launch;
  char who[96], other[640];
  double limit = (double)ts_time_limit * 1e-9;
  ts_who(f, who);
  switch (f->why) {
    case TS_WAIT_SIGNAL:
    case TS_WAIT_PACKETS:
      put_gone(L, other, sizeof other);
      ts_report_signal(f, limit, other);
      break;
    case TS_WAIT_BARRIER:
      ts_launch_fail(L, f->site, "%s: waited %g s at a barrier: %lld of %d have arrived", who, limit,
                     (long long)atomic_load_explicit(&f->barrier->arrived, memory_order_relaxed), f->of);
      break;
    default:
      ts_describe_launch(L, f->peer, other, sizeof other);
      ts_launch_fail(L, f->site, "%s: waited %g s for rank %d to %s launch %lld of their team (%s); %s", who, limit,
                     ts_team_member(L->team, f->peer),
                     f->why == TS_WAIT_ENTRY ? "reach" : f->why == TS_WAIT_EXIT ? "finish" : "arrive at the barrier of", (long long)L->number, L->kernel->name, other);
  }
}

const char* ts_dtype_name(int32_t code, int32_t bits, char out[32]) {
  static const char* const fp8[] = {"e3m4", "e4m3", "e4m3b11fnuz", "e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu"};
  if (code == kDLInt) snprintf(out, 32, "int%d", bits);
  else if (code == kDLUInt) snprintf(out, 32, "uint%d", bits);
  else if (code == kDLFloat) snprintf(out, 32, "float%d", bits);
  else if (code == kDLBfloat) snprintf(out, 32, "bfloat%d", bits);
  else if (code == kDLBool) snprintf(out, 32, "bool");
  else if (code >= kDLFloat8_e3m4 && code <= kDLFloat8_e8m0fnu) snprintf(out, 32, "float8_%s", fp8[code - kDLFloat8_e3m4]);
  else snprintf(out, 32, "dtype(%d, %d)", code, bits);
  return out;
}

/* ---- prints: one write a print, so that lines of many blocks do not mix */

typedef struct text { char* p; size_t n, room; } text;

static void put(text* t, const char* format, ...) __attribute__((format(printf, 2, 3)));
static void put(text* t, const char* format, ...) {
  for (int again = 0; again < 2; again++) {
    va_list v;
    va_start(v, format);
    int n = vsnprintf(t->p ? t->p + t->n : NULL, t->room - t->n, format, v);
    va_end(v);
    if (n < 0) return;
    if (t->p && t->n + (size_t)n < t->room) {
      t->n += (size_t)n;
      return;
    }
    size_t room = (t->n + (size_t)n + 64) * 2;
    char* p = realloc(t->p, room);
    if (!p) return;
    t->p = p;
    t->room = room;
  }
}

static void put_head(text* t, const ts_fiber* f, int32_t site) {
  const ts_kernel* K = f->launch->kernel;
  if (f->launch->team && ts_team_size(f->launch->team) > 1) put(t, "rank %d ", ts_team_rank(f->launch->team));
  put(t, "block (%d, %d, %d) ", f->xyz[0], f->xyz[1], f->xyz[2]);
  if (site >= 0 && site < K->nsites) {
    const ts_site* s = &K->sites[site];
    put(t, "%s:%s: ", s->file, s->line);
    if (s->name[0]) put(t, strcmp(s->kind, "text") ? "%s = " : "%s", s->name); /* a text is its own value */
  }
}

static void put_out(text* t) {
  put(t, "\n");
  for (size_t at = 0; t->p && at < t->n;) {
    ssize_t n = write(STDOUT_FILENO, t->p + at, t->n - at);
    if (n <= 0) break;
    at += (size_t)n;
  }
  free(t->p);
}

TS_API void ts_print_i64(void* ctx, int32_t site, int64_t v) {
  text t = {0};
  put_head(&t, ctx, site);
  const ts_kernel* K = ((const ts_fiber*)ctx)->launch->kernel;
  if (site < 0 || site >= K->nsites || strcmp(K->sites[site].kind, "text")) put(&t, "%lld", (long long)v);
  put_out(&t);
}

TS_API void ts_print_f64(void* ctx, int32_t site, double v) {
  text t = {0};
  put_head(&t, ctx, site);
  put(&t, "%.9g", v);
  put_out(&t);
}

static double bits_float(uint32_t u) {
  float x;
  memcpy(&x, &u, 4);
  return x;
}

/* A small binary float: sign, `e` exponent bits, `m` fraction bits. `finite` kinds have no infinity: only the top code is NaN. */
static double small_float(uint32_t u, int e, int m, int finite) {
  int sign = (int)(u >> (e + m)) & 1, x = (int)(u >> m) & ((1 << e) - 1), frac = (int)(u & ((1u << m) - 1));
  int bias = (1 << (e - 1)) - 1, top = (1 << e) - 1;
  double v;
  if (x == top && (!finite || frac == (1 << m) - 1)) v = frac ? __builtin_nan("") : __builtin_inf();
  else v = __builtin_ldexp(x ? (1 << m) + frac : frac, (x ? x : 1) - bias - m);
  return sign ? -v : v;
}

static void put_element(text* t, const char* p, int32_t code, int32_t bits) {
  uint64_t u = 0;
  memcpy(&u, p, (size_t)(bits >= 8 ? bits / 8 : 1));
  if (code == kDLInt) put(t, "%lld", (long long)((int64_t)(u << (64 - bits)) >> (64 - bits)));
  else if (code == kDLUInt) put(t, "%llu", (unsigned long long)u);
  else if (code == kDLBool) put(t, "%s", u ? "True" : "False");
  else if (code == kDLBfloat) put(t, "%.4g", bits_float((uint32_t)u << 16));
  else if (code == kDLFloat && bits == 64) { double d; memcpy(&d, p, 8); put(t, "%.10g", d); }
  else if (code == kDLFloat && bits == 32) put(t, "%.6g", bits_float((uint32_t)u));
  else if (code == kDLFloat && bits == 16) put(t, "%.5g", small_float((uint32_t)u, 5, 10, 0));
  else if (code == kDLFloat8_e4m3fn) put(t, "%.4g", small_float((uint32_t)u, 4, 3, 1));
  else if (code == kDLFloat8_e5m2) put(t, "%.4g", small_float((uint32_t)u, 5, 2, 0));
  else put(t, "0x%llx", (unsigned long long)u);
}

static void put_axis(text* t, const char* p, int32_t code, int32_t bits, int32_t d, int32_t ndim, const int64_t* shape,
                     const int64_t* strides, int brief) {
  if (d == ndim) {
    put_element(t, p, code, bits);
    return;
  }
  put(t, "[");
  for (int64_t i = 0; i < shape[d]; i++) {
    if (i) put(t, d + 1 == ndim ? ", " : ",\n%*s", d + 1, "");
    if (brief && shape[d] > 8 && i == 3) {
      put(t, d + 1 == ndim ? "..., " : "...,\n%*s", d + 1, "");
      i = shape[d] - 3;
    }
    put_axis(t, p + i * strides[d] * (bits >= 8 ? bits / 8 : 1), code, bits, d + 1, ndim, shape, strides, brief);
  }
  put(t, "]");
}

/* dtype: DLPack's code << 8 | bits. Strides in elements. More than 1,000 elements are shown by their edges. */
TS_API void ts_print_buf(void* ctx, int32_t site, const void* p, int32_t dtype, int32_t ndim, const int64_t* shape,
                         const int64_t* strides) {
  text t = {0};
  char name[32];
  int64_t n = 1;
  put_head(&t, ctx, site);
  put(&t, "%s(", ts_dtype_name(dtype >> 8, dtype & 255, name));
  for (int32_t d = 0; d < ndim; d++) {
    put(&t, d ? ", %lld" : "%lld", (long long)shape[d]);
    n *= shape[d];
  }
  put(&t, ")\n");
  put_axis(&t, p, dtype >> 8, dtype & 255, 0, ndim, shape, strides, n > 1000);
  put_out(&t);
}

/* ---- the log of instrumented kernels, and what they moved to and from each rank */

typedef struct ts_event_t { int64_t ns, bytes; int32_t kernel, block, site, phase, rank, worker; } ts_event_t;

enum { EVENTS = 1 << 20 };
static ts_event_t* events;
static _Atomic int64_t nevents, moved[TS_MAX_RANKS][2];

__attribute__((constructor)) static void events_load(void) {
  /* Reserved, not touched: costs nothing to those who never instrument. */
  events = (ts_event_t*)(void*)ts_memory((int64_t)EVENTS * (int64_t)sizeof(ts_event_t));
}

TS_API void ts_event(void* ctx, int32_t site, int32_t phase, int32_t rank, int64_t bytes) {
  const ts_fiber* f = ctx;
  const struct ts_team* team = f->launch->team;
  int32_t world = rank < 0 ? -1 : team && rank < ts_team_size(team) ? ts_team_member(team, rank) : rank;
  if (phase != 1 && world >= 0 && world < TS_MAX_RANKS) {
    atomic_fetch_add_explicit(&moved[world][0], bytes, memory_order_relaxed);
    atomic_fetch_add_explicit(&moved[world][1], 1, memory_order_relaxed);
  }
  /* A counter hands each event a place of its own; readers come after the launch, which orders all of it. */
  int64_t at = atomic_fetch_add_explicit(&nevents, 1, memory_order_relaxed);
  if (!events || at >= EVENTS) return;
  events[at] = (ts_event_t){ts_now(), bytes, f->launch->kernel->id, f->block, site, phase, world, f->worker->index};
}

/* The events so far (at most EVENTS are kept; *count may be larger), and for each world rank bytes and messages. */
TS_API const ts_event_t* ts_events(int64_t* count, int64_t* kept, int64_t moved_out[TS_MAX_RANKS * 2]) {
  *count = atomic_load(&nevents);
  *kept = *count < EVENTS ? *count : EVENTS;
  for (int i = 0; i < TS_MAX_RANKS; i++)
    for (int j = 0; j < 2; j++) moved_out[2 * i + j] = atomic_load(&moved[i][j]);
  return events;
}

TS_API void ts_events_clear(void) {
  atomic_store(&nevents, 0);
  for (int i = 0; i < TS_MAX_RANKS; i++)
    for (int j = 0; j < 2; j++) atomic_store(&moved[i][j], 0);
}
