/* What lies in symmetric memory before the user's tensors: each rank's control area, at the head of its segment. */
#ifndef TS_HEAP_H
#define TS_HEAP_H
#include "ts_rt.h"

#define TS_PAGE 4096
#define TS_HEAP_VERSION 5

/* One rank's letter box for the letters of another; two places, because a sender can be one message ahead of its reader and
 * never two: it sends message n + 1 only after it has received the reader's message n, which the reader sends after reading
 * message n - 1. */
typedef struct ts_mailbox {
  _Alignas(64) _Atomic int64_t count;
  char letter[2][TS_MAIL];
} ts_mailbox;

typedef struct ts_symm { int64_t offset, shape[TS_MAX_DIM]; int32_t ndim, code, bits; } ts_symm;

/* What a rank launches, as ranks compare it. */
typedef struct ts_description {
  uint64_t fingerprint, members;
  int32_t nsymm;
  char label[1024];
  ts_symm symm[TS_MAX_SYMM];
} ts_description;

/* What a rank launched on its GPU, by the hash that GPUs compare: for people, when those differ. */
enum { TS_LAUNCHED = 8 };
typedef struct ts_launched { _Atomic uint64_t hash; ts_description what; } ts_launched;

/* Which call of a collective this rank's host has made, in words, and a mark of those words: call k at k % TS_SAID and k % TS_WORDS. A host is
 * as many calls ahead of another one as its GPU's queue is long, some thousand. */
enum { TS_SAID = 2048, TS_WORDS = 32 };
typedef struct ts_words { _Atomic uint64_t call; char text[120]; } ts_words;

/* One team as one rank takes part in it: written by that rank alone, read by the others. */
typedef struct ts_slot {
  _Alignas(128) _Atomic int64_t entry; /* the last launch entered; what follows describes it */
  ts_description what;
  _Alignas(128) _Atomic int64_t exit;   /* the last launch whose blocks have ended */
  _Alignas(128) _Atomic int64_t device; /* launch << 32 | barriers of all blocks of all ranks passed in it */
  _Alignas(128) _Atomic int64_t sync[TS_MAX_RESIDENT]; /* for each block: launch << 32 | meetings with its twins */
  _Alignas(128) _Atomic int64_t among[TS_MAX_RESIDENT + 1]; /* for each block, then for all: the team that it waits to meet, 0 none */
  _Atomic uint64_t last; /* the hash of what this rank launched on its GPU last */
  ts_launched launched[TS_LAUNCHED]; /* hash h at h % TS_LAUNCHED */
  _Atomic uint64_t said[TS_SAID];    /* the low half of the call's number << 32 | mark; 0: none */
  ts_words words[TS_WORDS];
} ts_slot;

enum { TS_STATE_NONE, TS_STATE_ALIVE, TS_STATE_LEFT };

typedef struct ts_control {
  char magic[8];
  char failed[512]; /* why this rank gave up in init(); "" while it has not */
  int32_t version, rank, world, pid;
  int64_t started, segment; /* when the process started, in the kernel's ticks: a process id alone may be used again */
  _Alignas(128) _Atomic int32_t state;
  _Atomic int32_t in_slot; /* 1 + the team whose launch this rank is in; 0 outside launches */
  _Atomic int32_t remains; /* this rank goes on without those that have died: it leaves the job, and joins one of those that remain */
  _Atomic int32_t signal_waits; /* how many of this rank's executors wait for signals */
  char reason[TS_MESSAGE]; /* why this rank stopped the job */
  _Alignas(128) _Atomic int32_t mapped; /* rank 0's counts the ranks that have mapped all segments */
  _Alignas(128) _Atomic int32_t stop;   /* rank 0's: 1 + the rank that stopped the job, 0 while it runs */
  ts_mailbox mail[TS_MAX_RANKS];
  ts_slot slots[TS_MAX_TEAMS];
} ts_control;

typedef struct ts_heap {
  char* base; /* of the range that holds all segments in rank order; null: no heap */
  int64_t segment, control; /* bytes */
  int32_t rank, world, fd;
  uint8_t* tags; /* for each page of a segment: 1 + the team that it was allocated for, 0 where it is free */
} ts_heap;

extern ts_heap ts_the_heap;

/* Where symmetric arguments of a kernel may lie: this rank's own part, and whether an address is a peer's. */
typedef struct ts_arena { const char* start; int64_t control, segment; const uint8_t* tags; int (*is_peers)(const char*); } ts_arena;
ts_arena ts_gpu_arena(void); /* start null: there is none */
ts_slot* ts_team_slot(const struct ts_team* team, int32_t rank);
const struct ts_team* ts_team_at(int32_t index);
int32_t ts_team_index(const struct ts_team* team); /* this rank's number for it */
void ts_put_description(const ts_kernel* K, const ts_arg* args, const struct ts_team* team, const char* start, ts_description* s);
void ts_put_words(const ts_description* s, char* out, size_t room);
const char* ts_difference(const ts_description* a, const ts_description* b);

static inline ts_control* ts_control_of(int32_t world_rank) {
  return (ts_control*)(void*)(ts_the_heap.base + world_rank * ts_the_heap.segment);
}
#endif
