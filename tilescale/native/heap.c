/* Symmetric memory: one POSIX shared-memory segment a rank, all mapped by every rank into one contiguous range, so that a peer's
 * address is p + (r - me) * segment. At its head the control area (ts_heap.h). Here too: letters between hosts, the word
 * that stops the job, and who is still alive. Allocation is comm/'s business.
 */
#include "ts_heap.h"
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define MAGIC "TSHEAP1"

ts_heap ts_the_heap = {.fd = -1};
static char job_name[200];
static uint8_t mapped[TS_MAX_RANKS], named, counted;
static int64_t sent[TS_MAX_RANKS], received[TS_MAX_RANKS];
static int journal = -1;  /* comm/journal.py */
static int abort_fd = -1; /* where a process manager of MPI listens */
static pid_t abort_pid;

static void segment_path(int32_t rank, char out[256]) { snprintf(out, 256, "/dev/shm/ts-%s-%d", job_name, rank); }

/* When a process started, in ticks since boot, and whether it still runs; 0 where it does not, -1 where nobody may know. */
static int64_t process_start(int32_t pid) {
  char path[64], text[512];
  if (pid <= 0) return 0;
  snprintf(path, sizeof path, "/proc/%d/stat", pid);
  int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return kill(pid, 0) && errno == ESRCH ? 0 : -1;
  ssize_t n = read(fd, text, sizeof text - 1);
  close(fd);
  if (n <= 0) return 0;
  text[n] = 0;
  const char* p = strrchr(text, ')'); /* the command's name may hold anything, this too */
  if (!p || p[1] != ' ') return -1;
  if (p[2] == 'Z' || p[2] == 'X') return 0;
  int field = 3;
  for (p += 2; *p && field < 22; p++) field += *p == ' ';
  return atoll(p);
}

/* Of a wait of the host's, over all its slices: how often it has looked, and when it last asked who is still alive, which takes a
 * file of /proc a rank. */
enum { ASK_NS = 20000000 };
static int64_t rounds, asked;

static int is_time_to_ask(void) {
  int64_t now = ts_now();
  if (now - asked < ASK_NS) return 0;
  asked = now;
  return 1;
}

static int wrong(char* err, int n, const char* format, ...) __attribute__((format(printf, 3, 4)));
static int wrong(char* err, int n, const char* format, ...) {
  va_list v;
  va_start(v, format);
  vsnprintf(err, (size_t)n, format, v);
  va_end(v);
  return -1;
}

/* Written before any other rank can see what it says, so that the launcher reads causes before their consequences. */
static void note(const char* what) {
  char line[32];
  int n = snprintf(line, sizeof line, "%s %d\n", what, ts_the_heap.rank);
  if (journal >= 0 && write(journal, line, (size_t)n) != n) return; /* then the launcher goes by who ends first */
}

static void open_journal(void) {
  char path[256];
  struct stat s;
  snprintf(path, sizeof path, "/dev/shm/ts-%s-log", job_name);
  journal = open(path, O_WRONLY | O_APPEND | O_CLOEXEC | O_NOFOLLOW);
  if (journal >= 0 && (fstat(journal, &s) || s.st_uid != geteuid())) close(journal), journal = -1;
}

static void close_journal(void) {
  if (journal >= 0) close(journal);
  journal = -1;
}

/* MPICH's process manager ends a job when a rank is killed, but not when one exits with a code: a line of its protocol (PMI-1,
 * "abort") asks for that, with the code. on_exit(3) and not atexit(3): only the former knows the code. */
static void tell_manager(int status, void* unused) {
  char line[48];
  (void)unused;
  if (status == 0 || abort_fd < 0 || getpid() != abort_pid) return;
  int n = snprintf(line, sizeof line, "cmd=abort exitcode=%d\n", status & 255);
  if (write(abort_fd, line, (size_t)n) == n) {
    struct timespec t = {2, 0};
    nanosleep(&t, NULL); /* the manager ends this process too, and then says this code and not that of a signal */
  }
}

/* From now on a failing exit of this process ends the whole job through the manager that listens at `fd`. */
TS_API void ts_exit_ends_job(int32_t fd) {
  static int hooked;
  abort_fd = fd;
  abort_pid = getpid();
#ifdef __GLIBC__
  if (!hooked) on_exit(tell_manager, NULL);
#endif
  hooked = 1;
}

static pthread_t watcher;
static _Atomic int watching;

static void after_fork_in_child(void) {
  atomic_store(&watching, 0); /* the thread is the parent's */
  /* A child is no rank: it must neither speak for its parent nor take the memory for symmetric. */
  ts_the_heap.base = NULL;
  ts_the_heap.fd = -1;
  named = 0;
  close_journal();
}
__attribute__((constructor)) static void heap_load(void) { pthread_atfork(NULL, NULL, after_fork_in_child); }

TS_API int64_t ts_heap_control_bytes(void) { return ((int64_t)sizeof(ts_control) + TS_PAGE - 1) / TS_PAGE * TS_PAGE; }

/* Gives pages of this rank's segment real memory, now, so that a full /dev/shm is an error and not a SIGBUS later. */
TS_API int32_t ts_heap_back(int64_t offset, int64_t bytes) {
  int rc;
  do rc = posix_fallocate(ts_the_heap.fd, offset, bytes);
  while (rc == EINTR);
  return rc;
}

static int64_t slot_end(int32_t slot) { return (int64_t)offsetof(ts_control, slots) + (slot + 1) * (int64_t)sizeof(ts_slot); }

int32_t ts_heap_back_slot(int32_t slot) { return ts_heap_back(slot_end(slot - 1), (int64_t)sizeof(ts_slot)); }

/* Makes this rank's segment and gives it its name. -1 and a text on failure. */
TS_API int32_t ts_heap_create(const char* job, int32_t rank, int32_t world, int64_t segment, char* err, int32_t n) {
  ts_heap* h = &ts_the_heap;
  char path[256], aside[264];
  if (world < 1 || world > TS_MAX_RANKS) return wrong(err, n, "%d ranks on one machine; at most %d are possible", world, TS_MAX_RANKS);
  snprintf(job_name, sizeof job_name, "%s", job);
  segment_path(rank, path);
  snprintf(aside, sizeof aside, "%s~", path);
  unlink(aside);
  int fd = open(aside, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (fd < 0) return wrong(err, n, "cannot create %s: %s", aside, strerror(errno));
  h->fd = fd;
  h->segment = segment;
  h->control = ts_heap_control_bytes();
  h->rank = rank;
  h->world = world;
  memset(mapped, 0, sizeof mapped);
  memset(sent, 0, sizeof sent);
  memset(received, 0, sizeof received);
  counted = 0;
  rounds = 0;
  int rc = ftruncate(fd, segment) ? errno : ts_heap_back(0, slot_end(0));
  void* base = rc ? MAP_FAILED
                  : mmap(NULL, (size_t)(segment * world), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  h->tags = calloc((size_t)(segment / TS_PAGE) + 1, 1);
  if (!rc && (base == MAP_FAILED || !h->tags)) rc = ENOMEM;
  if (!rc && mmap((char*)base + rank * segment, (size_t)segment, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED)
    rc = errno;
  if (rc) {
    unlink(aside);
    close(fd);
    h->fd = -1;
    return wrong(err, n, "cannot set up a segment of %lld bytes in /dev/shm: %s", (long long)segment, strerror(rc));
  }
  h->base = base;
  mapped[rank] = 1;
  ts_control* c = ts_control_of(rank);
  c->version = TS_HEAP_VERSION;
  c->rank = rank;
  c->world = world;
  c->pid = (int32_t)getpid();
  c->started = process_start(c->pid);
  c->segment = segment;
  atomic_store(&c->state, TS_STATE_ALIVE);
  memcpy(c->magic, MAGIC, sizeof c->magic);
  /* The name appears with the header complete; a file that a killed job of the same name left is replaced. */
  if (rename(aside, path)) {
    rc = errno;
    unlink(aside);
    return wrong(err, n, "cannot create %s: %s", path, strerror(rc));
  }
  named = 1;
  open_journal();
  return 0;
}

/* 1: mapped; 0: not there yet; -1: it does not fit. */
static int map_peer(int32_t r, char* err, int n) {
  ts_heap* h = &ts_the_heap;
  char path[256];
  ts_control head;
  segment_path(r, path);
  int fd = open(path, O_RDWR | O_CLOEXEC | O_NOFOLLOW);
  if (fd < 0) return errno == ENOENT ? 0 : wrong(err, n, "cannot open %s: %s", path, strerror(errno));
  struct stat s;
  if (fstat(fd, &s) || s.st_uid != geteuid() || (s.st_mode & 077)) { /* another user could change, or end, what this rank computes */
    close(fd);
    return wrong(err, n, "%s is not this user's alone (user %d, mode %o)", path, (int)s.st_uid, (int)(s.st_mode & 0777));
  }
  ssize_t got = pread(fd, &head, offsetof(ts_control, state), 0);
  int rc = 0;
  int64_t start = got < (ssize_t)offsetof(ts_control, state) || memcmp(head.magic, MAGIC, sizeof head.magic) ? 0 : process_start(head.pid);
  if (start == 0 || (start > 0 && head.started > 0 && start != head.started)) {
    rc = 0; /* what a killed job left: its owner replaces it */
  } else if (head.failed[0]) {
    rc = wrong(err, n, "rank %d gave up: %s", r, head.failed);
  } else if (head.version != TS_HEAP_VERSION || head.world != h->world || head.segment != h->segment) {
    rc = wrong(err, n, "rank %d has %d ranks and segments of %lld bytes (version %d), rank %d has %d and %lld (version %d); set "
               "TILESCALE_HEAP_SIZE alike on all ranks", h->rank, h->world, (long long)h->segment, TS_HEAP_VERSION, r, head.world,
               (long long)head.segment, head.version);
  } else if (mmap(h->base + r * h->segment, (size_t)h->segment, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) {
    rc = wrong(err, n, "cannot map the segment of rank %d: %s", r, strerror(errno));
  } else {
    mapped[r] = 1;
    rc = 1;
  }
  close(fd);
  return rc;
}

/* The longer the wait, the longer the naps, up to 2 ms: many ranks that share few processors would else only look around. */
static void nap(void) {
  int64_t slept = ++rounds - 200;
  if (slept < 0) {
    sched_yield();
    return;
  }
  struct timespec t = {0, slept < 20 ? 100000 : slept < 380 ? 5000 * slept : 2000000};
  nanosleep(&t, NULL);
}

static void unlink_name(void) {
  char path[256];
  if (!named) return;
  segment_path(ts_the_heap.rank, path);
  unlink(path);
  named = 0;
}

/* Maps the others' segments, for at most `slice_ns`. 1: all ranks have mapped all, and the names are gone; 0: call again. */
TS_API int32_t ts_heap_join(int64_t slice_ns, char* err, int32_t n) {
  ts_heap* h = &ts_the_heap;
  int64_t until = ts_now() + slice_ns;
  for (;;) {
    int missing = 0;
    for (int32_t r = 0; r < h->world; r++) {
      if (mapped[r]) continue;
      int rc = map_peer(r, err, n);
      if (rc < 0) return -1;
      missing += rc == 0;
    }
    if (!missing) {
      /* The count orders nothing but itself: headers were complete before their names appeared. */
      if (!counted) atomic_fetch_add(&ts_control_of(0)->mapped, 1), counted = 1;
      if (atomic_load(&ts_control_of(0)->mapped) >= h->world) {
        unlink_name();
        return 1;
      }
    }
    for (int32_t r = 0, ask = is_time_to_ask(); ask && r < h->world; r++) /* who ends after all have mapped has not failed: the
                                                                             count is looked at again */
      if (mapped[r] && ts_rank_gone(r, err, (size_t)n) && !(counted && atomic_load(&ts_control_of(0)->mapped) >= h->world)) return -1;
    if (ts_now() > until) return 0;
    nap();
  }
}

/* For a message after a time limit: the ranks that have not come. */
TS_API void ts_heap_missing(uint8_t out[TS_MAX_RANKS]) {
  for (int32_t r = 0; r < TS_MAX_RANKS; r++) out[r] = r < ts_the_heap.world && !mapped[r];
}

/* This rank gives up in init(): those who look for it find out why. The name stays until ts_heap_close. */
TS_API void ts_heap_give_up(const char* why) {
  note("stop");
  if (ts_the_heap.base) snprintf(ts_control_of(ts_the_heap.rank)->failed, sizeof ((ts_control*)0)->failed, "%s", why);
}

TS_API int64_t ts_heap_base(void) { return (int64_t)(intptr_t)ts_the_heap.base; }

TS_API void ts_heap_tag(int64_t offset, int64_t bytes, int32_t tag) {
  memset(ts_the_heap.tags + offset / TS_PAGE, tag, (size_t)((bytes + TS_PAGE - 1) / TS_PAGE));
}

/* To be called before ts_heap_close where others may still count on this rank: its process ends. */
TS_API void ts_heap_announce(void) {
  if (ts_the_heap.base) note("left");
}

/* unmap: only when nothing in this process points into the heap any more. */
TS_API void ts_heap_close(int32_t unmap) {
  ts_heap* h = &ts_the_heap;
  if (!h->base) return;
  if (atomic_exchange(&watching, 0)) pthread_join(watcher, NULL);
  unlink_name();
  close_journal();
  atomic_store_explicit(&ts_control_of(h->rank)->state, TS_STATE_LEFT, memory_order_release);
  if (unmap) munmap(h->base, (size_t)(h->segment * h->world));
  close(h->fd);
  free(h->tags);
  *h = (ts_heap){.fd = -1};
  ts_teams_forget();
}

/* ---- who is there, and who has stopped the job */

int32_t ts_world_rank(void) { return ts_the_heap.base ? ts_the_heap.rank : 0; }
int32_t ts_world_size(void) { return ts_the_heap.base ? ts_the_heap.world : 1; }

int ts_rank_gone(int32_t r, char* out, size_t bytes) {
  ts_heap* h = &ts_the_heap;
  if (!h->base || r == h->rank || !mapped[r]) return 0;
  ts_control* c = ts_control_of(r);
  if (atomic_load_explicit(&c->state, memory_order_acquire) == TS_STATE_LEFT || c->failed[0]) {
    snprintf(out, bytes, c->failed[0] ? "rank %d gave up: %s" : "rank %d has ended", r, c->failed);
    return 1;
  }
  int64_t start = process_start(c->pid);
  if (start == 0 || (start > 0 && c->started > 0 && start != c->started)) {
    if (atomic_load_explicit(&c->state, memory_order_acquire) == TS_STATE_LEFT) snprintf(out, bytes, "rank %d has ended", r);
    else snprintf(out, bytes, "rank %d (process %d) has died", r, c->pid);
    return 1;
  }
  return 0;
}

int ts_others_failed(char* out, size_t bytes) {
  ts_heap* h = &ts_the_heap;
  if (!h->base || h->world == 1 || !mapped[0]) return 0;
  /* Acquire pairs with the release in ts_stop_others: the reason is complete. */
  int32_t who = atomic_load_explicit(&ts_control_of(0)->stop, memory_order_acquire);
  if (!who) return 0;
  snprintf(out, bytes, "rank %d stopped the job: %.1900s", who - 1, mapped[who - 1] ? ts_control_of(who - 1)->reason : "");
  return 1;
}

/* Tells all ranks to stop waiting. Only the first to call it is heard. */
TS_API void ts_stop_others(const char* why) {
  ts_heap* h = &ts_the_heap;
  if (!h->base || h->world == 1 || !mapped[0]) return;
  _Atomic int32_t* stop = &ts_control_of(0)->stop;
  if (atomic_load(stop)) return;
  ts_control* mine = ts_control_of(h->rank);
  snprintf(mine->reason, sizeof mine->reason, "%s", why);
  note("stop");
  int32_t zero = 0;
  atomic_compare_exchange_strong_explicit(stop, &zero, h->rank + 1, memory_order_release, memory_order_relaxed);
}

/* ---- going on without ranks that have died (comm.init(recover=True)) */

/* Stops the job where a rank has died without leaving it. */
TS_API void ts_heap_look(void) {
  char why[TS_MESSAGE];
  ts_heap* h = &ts_the_heap;
  for (int32_t r = 0; r < h->world; r++)
    if (ts_rank_gone(r, why, sizeof why) && atomic_load_explicit(&ts_control_of(r)->state, memory_order_acquire) != TS_STATE_LEFT &&
        !atomic_load(&ts_control_of(r)->remains)) {
      ts_stop_others(why);
      return;
    }
}

static void* watch(void* unused) {
  (void)unused;
  while (atomic_load(&watching)) {
    ts_heap_look();
    struct timespec t = {0, 100000000};
    nanosleep(&t, NULL);
  }
  return NULL;
}

/* From now on a thread looks ten times a second who has died: a host may stand in a call of the driver's that ends with a launch, which
 * waits for the one that has died. Not 0 where there is no thread to be had. */
TS_API int32_t ts_heap_watch(void) {
  if (ts_the_heap.world == 1 || atomic_exchange(&watching, 1)) return 0;
  int rc = pthread_create(&watcher, NULL, watch, NULL);
  if (rc) atomic_store(&watching, 0);
  return rc;
}

/* Who goes on: all say so here, and await the same, or the end, of everyone else. 1: `out` says who; 0: call again. A rank that has said so
 * counts even where it has ended since: all who look must see the same ranks. */
TS_API int32_t ts_heap_remaining(int64_t slice_ns, uint8_t out[TS_MAX_RANKS]) {
  ts_heap* h = &ts_the_heap;
  int64_t until = ts_now() + slice_ns;
  atomic_store(&ts_control_of(h->rank)->remains, 1);
  for (;;) {
    int open = 0;
    char why[TS_MESSAGE];
    for (int32_t r = 0; r < h->world; r++) {
      /* Its end is asked first, its word looked at afterwards: what it wrote before it ended counts. */
      int gone = r != h->rank && ts_rank_gone(r, why, sizeof why);
      out[r] = atomic_load(&ts_control_of(r)->remains) != 0;
      open += !out[r] && !gone;
    }
    if (!open) return 1;
    if (ts_now() > until) return 0;
    nap();
  }
}

/* 1 and the reason when the job has been stopped. */
TS_API int32_t ts_stopped(char* out, int32_t n) { return ts_others_failed(out, (size_t)n); }

/* ---- letters: each member of a set of ranks gives TS_MAIL bytes and gets everybody's. Any set will do, no team is needed:
 * counts go by pairs, and two ranks agree on the order of the exchanges that both take part in. */

TS_API void ts_mail_post(int32_t n, const int32_t* members, const void* letter) {
  int32_t me = ts_the_heap.rank;
  rounds = 0;
  for (int32_t i = 0; i < n; i++) {
    int32_t r = members[i];
    if (r == me) continue;
    ts_mailbox* box = &ts_control_of(r)->mail[me];
    int64_t count = ++sent[r];
    memcpy(box->letter[count & 1], letter, TS_MAIL);
    /* Release: the letter, and all that this rank did before, is visible to whoever acquires the count. */
    atomic_store_explicit(&box->count, count, memory_order_release);
  }
}

/* 1: all letters are in `out` (members in order; one's own place is left alone); 0: call again; -1: one will never come. */
TS_API int32_t ts_mail_wait(int32_t n, const int32_t* members, char* out, int64_t slice_ns, char* err, int32_t errn) {
  ts_heap* h = &ts_the_heap;
  int64_t until = ts_now() + slice_ns;
  for (;;) {
    int32_t missing = -1;
    for (int32_t i = 0; i < n && missing < 0; i++) {
      int32_t r = members[i];
      /* Acquire pairs with ts_mail_post's release. */
      if (r != h->rank &&
          atomic_load_explicit(&ts_control_of(h->rank)->mail[r].count, memory_order_acquire) <= received[r]) missing = r;
    }
    if (missing < 0) break;
    nap();
    if ((rounds & 7) == 0) {
      if (ts_others_failed(err, (size_t)errn)) return -1;
      /* Its end is asked first, its letter looked at afterwards: what it wrote before it ended counts. */
      if (is_time_to_ask() && ts_rank_gone(missing, err, (size_t)errn) &&
          atomic_load_explicit(&ts_control_of(h->rank)->mail[missing].count, memory_order_acquire) <= received[missing]) {
        ts_others_failed(err, (size_t)errn); /* it may have said why just before */
        return -1;
      }
      if (ts_now() > until) return 0;
    }
  }
  for (int32_t i = 0; i < n; i++) {
    int32_t r = members[i];
    if (r == h->rank) continue;
    int64_t count = ++received[r];
    memcpy(out + (int64_t)i * TS_MAIL, ts_control_of(h->rank)->mail[r].letter[count & 1], TS_MAIL);
  }
  return 1;
}

/* For a message after a time limit: 1 for each member whose letter has not come. */
TS_API void ts_mail_missing(int32_t n, const int32_t* members, uint8_t* out) {
  for (int32_t i = 0; i < n; i++) {
    int32_t r = members[i];
    out[i] = r != ts_the_heap.rank && atomic_load(&ts_control_of(ts_the_heap.rank)->mail[r].count) <= received[r];
  }
}
