/* Packets: data and the launch's number in one word, by which its receiver knows that they are there (tilescale/packets.py).
 *
 * Nobody releases or acquires: a word is stored and loaded whole, and says nothing of any other. The number of a launch is that of those
 * before it that used the box, and one; each rank counts its own, and all launch alike.
 */
#include "ts_rt.h"
#include <string.h>

enum { HEAD = 16, SHIFT = 32, DATA = 8, WORDS = 2, FAILED = 1 };

static uint32_t number_of(const int64_t* box) { return (uint32_t)((box[0] >> SHIFT) + 1); }

/* The words of packet `first` of this launch; size: words of a half. */
static _Atomic uint64_t* at(int64_t* box, uint32_t number, int64_t size, int64_t first) {
  return (_Atomic uint64_t*)box + HEAD + number % 2 * size + WORDS * first;
}

/* Packets into a box, `there` in the memory of whose rank it is; box: the own one. */
TS_API void ts_put_packets(void* ctx, int64_t* box, int64_t* there, int64_t size, int64_t first, const void* from, int64_t count) {
  (void)ctx;
  uint32_t number = number_of(box), data;
  _Atomic uint64_t* to = at(there, number, size, first);
  for (int64_t k = 0; k < WORDS * count; k++) {
    memcpy(&data, (const char*)from + sizeof data * k, sizeof data);
    atomic_store_explicit(to + k, (uint64_t)number << SHIFT | data, memory_order_relaxed);
  }
}

/* Their data, once they have come. */
TS_API void ts_get_packets(void* ctx, int64_t* box, int64_t size, int64_t first, void* to, int64_t count, int32_t site) {
  uint32_t number = number_of(box);
  _Atomic uint64_t* from = at(box, number, size, first);
  for (int64_t k = 0; k < WORDS * count; k++) {
    uint64_t word = atomic_load_explicit(from + k, memory_order_relaxed);
    if ((uint32_t)(word >> SHIFT) != number) {
      ts_block_on(ctx, (_Atomic int64_t*)(from + k), number, TS_CMP_NUMBER, site, TS_WAIT_PACKETS);
      word = atomic_load_explicit(from + k, memory_order_relaxed);
    }
    uint32_t data = (uint32_t)word;
    memcpy((char*)to + sizeof data * k, &data, sizeof data);
  }
}

/* ---- dense boxes: a word is data alone, whose complement is stored; zero: there is no packet */

static _Atomic uint64_t* dense_at(int64_t* box, uint32_t number, int64_t size, int64_t first) {
  return (_Atomic uint64_t*)box + HEAD + number % 2 * size + first;
}

/* The place is empty (compiler/passes/packets.py). Where it is not, a packet has not been taken, or two launches overlap. */
TS_API void ts_put_dense(void* ctx, int64_t* box, int64_t* there, int64_t size, int64_t first, const void* from, int64_t count,
                         int32_t site) {
  ts_fiber* f = ctx;
  _Atomic uint64_t* to = dense_at(there, number_of(box), size, first);
  for (int64_t k = 0; k < count; k++) {
    uint64_t data;
    memcpy(&data, (const char*)from + DATA * k, DATA);
    if (atomic_load_explicit(to + k, memory_order_relaxed))
      ts_raise(f, site, "a packet is put into %s where one lies that has not been taken", f->launch->kernel->sites[site].name);
    atomic_store_explicit(to + k, ~data ? ~data : 1, memory_order_relaxed);
  }
}

/* Their data, once they have come; each place is empty again for the launch after the next. */
TS_API void ts_get_dense(void* ctx, int64_t* box, int64_t size, int64_t first, void* to, int64_t count, int32_t site) {
  ts_fiber* f = ctx;
  uint32_t number = number_of(box);
  _Atomic uint64_t* from = dense_at(box, number, size, first);
  for (int64_t k = 0; k < count; k++) {
    uint64_t word = atomic_load_explicit(from + k, memory_order_relaxed);
    if (!word) {
      f->of = (int32_t)number; /* for the report */
      ts_block_on(f, (_Atomic int64_t*)(from + k), 0, TS_CMP_NOT, site, TS_WAIT_PACKETS);
      word = atomic_load_explicit(from + k, memory_order_relaxed);
    }
    atomic_store_explicit(from + k, 0, memory_order_relaxed);
    word = ~word;
    memcpy((char*)to + DATA * k, &word, DATA);
  }
}

/* ---- launches */

void ts_packets_count(const ts_launch* L) {
  if (L->kernel->flags & TS_FLAG_BARE && L->nblocks == 0) return;
  for (int32_t i = 0; i < L->kernel->nparams; i++)
    if (ts_is_box(L->kernel->params[i].kind)) *(int64_t*)(void*)L->args[i].lo += (int64_t)1 << SHIFT;
}

/* What a launch that failed has not taken, or gets after its end, lies in a dense box for good. */
void ts_packets_spoil(const ts_launch* L) {
  for (int32_t i = 0; i < L->kernel->nparams; i++)
    if (L->kernel->params[i].kind == TS_KIND_DENSE) ((int64_t*)(void*)L->args[i].lo)[FAILED] = 1;
}

int32_t ts_packets_spoiled(const ts_launch* L) {
  for (int32_t i = 0; i < L->kernel->nparams; i++)
    if (L->kernel->params[i].kind == TS_KIND_DENSE && ((const int64_t*)(const void*)L->args[i].lo)[FAILED]) return i;
  return -1;
}
