/* Kernels made from Python, and their launches. */
#include "ts_rt.h"
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DESC_HEAD 13

static int32_t next_id;

int32_t ts_next_id(void) { return next_id++; }

void ts_kernel_free(void* p) {
  ts_kernel* K = p;
  if (K->handle) dlclose(K->handle);
  free(K->regions);
  free(K->name);
  free(K->label);
  free(K->site_text);
  free(K->sites);
  free(K->demands);
  free(K);
}

/* Cuts `kind|name|file|line|text` lines in place. Text may hold further bars. Lines of kind `param` name the parameters in
 * order; they come after the sites proper and count as sites, so that indices agree with the kernel's. In names \x1e and \x1f stand for
 * the end of a line and for a bar. */
int ts_parse_sites(ts_kernel* K, const char* text, size_t bytes) {
  K->site_text = malloc(bytes + 1);
  if (!K->site_text) return -1;
  memcpy(K->site_text, text, bytes);
  K->site_text[bytes] = 0;
  int32_t n = 0;
  for (size_t i = 0; i < bytes; i++) n += text[i] == '\n';
  K->sites = calloc((size_t)n + 1, sizeof *K->sites);
  if (!K->sites) return -1;
  int32_t param = 0;
  for (char* line = K->site_text; *line;) {
    char* end = line + strcspn(line, "\n");
    char* next = *end ? end + 1 : end;
    *end = 0;
    char* part[5] = {line, end, end, end, end};
    for (int k = 1; k < 5; k++) {
      char* bar = strchr(part[k - 1], '|');
      if (!bar) break;
      *bar = 0;
      part[k] = bar + 1;
    }
    for (char* c = part[1]; *c; c++) *c = *c == 0x1e ? '\n' : *c == 0x1f ? '|' : *c;
    K->sites[K->nsites++] = (ts_site){part[0], part[1], part[2], part[3], part[4]};
    if (!strcmp(part[0], "param") && param < K->nparams) K->params[param++].name = part[1];
    line = next;
  }
  return 0;
}

/* What another rank prints of this kernel: its name, then the names of its symmetric parameters. */
int ts_make_label(ts_kernel* K, const TVMFFIByteArray* name) {
  size_t room = name->size + 2 + (size_t)K->nparams * 72;
  K->name = malloc(name->size + 1);
  K->label = malloc(room);
  if (!K->name || !K->label) return -1;
  memcpy(K->name, name->data, name->size);
  K->name[name->size] = 0;
  size_t at = (size_t)snprintf(K->label, room, "%s\n", K->name);
  for (int32_t i = 0; i < K->nparams; i++) {
    if (K->params[i].kind < TS_KIND_SYMM) continue;
    if (K->params[i].name[0]) at += (size_t)snprintf(K->label + at, room - at, "%.63s,", K->params[i].name);
    else at += (size_t)snprintf(K->label + at, room - at, "argument %d,", i);
  }
  return 0;
}

static int parse_rules(const int64_t** d, const int64_t* end, ts_rule* out, int32_t n) {
  for (int32_t i = 0; i < n; i++) {
    if (*d + 2 > end) return -1;
    out[i] = (ts_rule){(*d)[0], (*d)[1]};
    *d += 2;
  }
  return 0;
}

/* Behind the parameters, where collectives ask for something: how many demands, and three words for each. */
static const char* parse_demands(ts_kernel* K, const int64_t* d, const int64_t* end, const uint8_t* defined) {
  const int64_t n = *d++;
  if (n < 1 || n > (end - d) / 3 || end - d != 3 * n) return "the description is longer than its parameters";
  K->demands = malloc((size_t)n * sizeof *K->demands);
  if (!K->demands) return "no memory";
  for (int64_t k = 0; k < n; k++, d += 3) {
    if (d[0] != TS_DEMAND_PARTS && d[0] != TS_DEMAND_ROOT) return "an unknown demand of a collective";
    if (d[1] != TS_HOW_VALUE && (d[1] != TS_HOW_SYMBOL || d[2] < 0 || d[2] >= K->nsyms || !defined[d[2]])) return "a demand of no value";
    K->demands[k] = (ts_demand){d[0], {d[1], d[2]}};
  }
  K->ndemands = n;
  return NULL;
}

const char* ts_parse_params(ts_kernel* K, const int64_t* d, const int64_t* end) {
  uint8_t defined[TS_MAX_SLOTS] = {0};
  for (int32_t i = 0; i < K->nparams; i++) {
    ts_param* p = &K->params[i];
    if (d + 5 > end) return "the description ends early";
    p->kind = (int32_t)d[0], p->code = (int32_t)d[1], p->bits = (int32_t)d[2], p->written = (int32_t)d[3], p->ndim = (int32_t)d[4];
    p->name = "";
    d += 5;
    if (p->ndim < 0 || p->ndim > TS_MAX_DIM) return "a tensor has more than 8 axes";
    if (p->kind < TS_KIND_TENSOR || p->kind > TS_KIND_DENSE) return "an unknown kind of parameter";
    if (parse_rules(&d, end, p->shape, p->ndim) || d >= end) return "the description ends early";
    p->strided = (int32_t)*d++;
    if (p->strided && parse_rules(&d, end, p->stride, p->ndim)) return "the description ends early";
    for (int32_t k = 0; k < (p->strided ? 2 : 1) * p->ndim; k++) {
      const ts_rule* r = k < p->ndim ? &p->shape[k] : &p->stride[k - p->ndim];
      if (r->how != TS_HOW_DEFINE && r->how != TS_HOW_SYMBOL && r->how != TS_HOW_MULTIPLE) continue;
      int64_t symbol = r->how == TS_HOW_MULTIPLE ? TS_SYMBOL_OF(r->value) : r->value;
      if (symbol < 0 || symbol >= K->nsyms || (r->how == TS_HOW_MULTIPLE && TS_MULTIPLE_OF(r->value) < 1)) return "a symbol out of range";
      if (r->how == TS_HOW_DEFINE || (r->how == TS_HOW_MULTIPLE && TS_MULTIPLE_OF(r->value) > 1))
        K->narrow[symbol / 64] |= UINT64_C(1) << symbol % 64;
      if (r->how != TS_HOW_SYMBOL) defined[symbol] = 1;
      else if (!defined[r->value]) return "a symbol is used before the parameter that defines it";
    }
    if (p->kind >= TS_KIND_SIGNAL) p->written = 1;
    if (p->kind >= TS_KIND_SYMM) K->nsymm++;
  }
  if (K->nsymm > TS_MAX_SYMM) return "more than 16 symmetric parameters";
  return d == end ? NULL : parse_demands(K, d, end, defined);
}

/* How many blocks the nominal device (132 SMs of 2,048 threads, 227 KiB, 32 blocks each) holds at once. */
static int64_t residency(const ts_kernel* K) {
  int64_t per_sm = 32, threads = K->threads > 0 ? K->threads : 1;
  if (2048 / threads < per_sm) per_sm = 2048 / threads;
  int64_t by_memory = (227 << 10) / (K->shared_bytes + 1024);
  if (by_memory < per_sm) per_sm = by_memory;
  int64_t n = 132 * per_sm;
  if (K->max_blocks > 0 && K->max_blocks < n) n = K->max_blocks;
  return n / K->cluster_size * K->cluster_size;
}

static const char* load_code(ts_kernel* K, const char* path) {
  K->handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!K->handle) return dlerror();
  K->block = (ts_block_fn)dlsym(K->handle, "ts_block");
  K->grid = (ts_grid_fn)dlsym(K->handle, "ts_grid");
  if (!K->block || !K->grid) return "ts_block or ts_grid is missing";
  K->regions = calloc((size_t)K->nregions + 1, sizeof *K->regions);
  if (!K->regions) return "no memory";
  for (int32_t r = 0; r < K->nregions; r++) {
    char name[32];
    snprintf(name, sizeof name, "ts_region_%d", r);
    K->regions[r] = (ts_region_fn)dlsym(K->handle, name);
    if (!K->regions[r]) return "a ts_region is missing";
  }
  return NULL;
}

int ts_bytes_of(const TVMFFIAny* a, TVMFFIByteArray* out) {
  switch (a->type_index) {
    case kTVMFFISmallStr: case kTVMFFISmallBytes: *out = (TVMFFIByteArray){a->v_bytes, a->small_str_len}; return 0;
    case kTVMFFIRawStr: *out = (TVMFFIByteArray){a->v_c_str, strlen(a->v_c_str)}; return 0;
    case kTVMFFIByteArrayPtr: *out = *(const TVMFFIByteArray*)a->v_ptr; return 0;
    case kTVMFFIStr: case kTVMFFIBytes:
      *out = *(const TVMFFIByteArray*)((const char*)a->v_obj + sizeof(TVMFFIObject));
      return 0;
    default: return -1;
  }
}

static int kernel_call(void* p, const TVMFFIAny* a, int32_t n, TVMFFIAny* ret);

/* make_kernel(path, desc, sites, name) -> function */
TS_API int __tvm_ffi_make_kernel(void* unused, const TVMFFIAny* a, int32_t n, TVMFFIAny* ret) {
  (void)unused;
  TVMFFIByteArray path, desc, sites, name;
  if (n != 4 || ts_bytes_of(a, &path) || ts_bytes_of(a + 1, &desc) || ts_bytes_of(a + 2, &sites) || ts_bytes_of(a + 3, &name))
    return ts_error("TypeError", "make_kernel(path: str, desc: bytes, sites: str, name: str)");
  const int64_t words = (int64_t)(desc.size / 8);
  int64_t* d = malloc(desc.size + 8); /* a copy: small byte strings are not aligned */
  if (!d) return ts_error("MemoryError", "no memory");
  memcpy(d, desc.data, desc.size);
  const char* wrong = NULL;
  ts_kernel* K = NULL;
  if (desc.size % 8 || words < DESC_HEAD || d[0] != 1) wrong = "the description has another version";
  else if (d[1] < 0 || d[1] > TS_MAX_PARAMS || d[2] < 0 || d[1] + 2 + d[2] > TS_MAX_SLOTS) wrong = "too many parameters or symbols";
  else if (!(K = calloc(1, sizeof *K + (size_t)d[1] * sizeof(ts_param)))) wrong = "no memory";
  if (!wrong) {
    K->nparams = (int32_t)d[1], K->nsyms = (int32_t)d[2], K->arena_bytes = d[3], K->threads = d[4], K->flags = (int32_t)d[5];
    K->max_blocks = d[9], K->shared_bytes = d[10], K->nregions = (int32_t)d[11], K->fingerprint = (uint64_t)d[12];
    for (int k = 0; k < 3; k++) K->cluster[k] = d[6 + k] > 0 ? (int32_t)d[6 + k] : 1;
    K->cluster_size = K->cluster[0] * K->cluster[1] * K->cluster[2];
    K->resident = residency(K);
    K->device = kDLCPU;
    K->id = ts_next_id();
    wrong = ts_parse_params(K, d + DESC_HEAD, d + words);
  }
  free(d);
  if (!wrong && (ts_parse_sites(K, sites.data, sites.size) || ts_make_label(K, &name))) wrong = "no memory";
  char file[4096];
  if (!wrong && path.size >= sizeof file) wrong = "the path is too long";
  if (!wrong) {
    memcpy(file, path.data, path.size);
    file[path.size] = 0;
    wrong = load_code(K, file);
  }
  if (wrong) {
    ts_error("RuntimeError", "make_kernel(%.*s): %s", (int)name.size, name.data, wrong);
    if (K) ts_kernel_free(K);
    return -1;
  }
  TVMFFIObjectHandle f;
  if (TVMFFIFunctionCreate(K, kernel_call, ts_kernel_free, &f)) {
    ts_kernel_free(K);
    return -1;
  }
  ret->type_index = kTVMFFIFunction;
  ret->zero_padding = 0;
  ret->v_obj = f;
  return 0;
}

/* retype(tensor, code, bits) -> the same memory under another dtype of the same size: for those that DLPack's producers cannot
 * name, such as NumPy's bfloat16. */
TS_API int __tvm_ffi_retype(void* unused, const TVMFFIAny* a, int32_t n, TVMFFIAny* ret) {
  (void)unused;
  if (n != 3 || a[0].type_index != kTVMFFITensor || a[1].type_index != kTVMFFIInt || a[2].type_index != kTVMFFIInt)
    return ts_error("TypeError", "retype(tensor, code: int, bits: int)");
  DLTensor t = *(const DLTensor*)((const char*)a[0].v_obj + sizeof(TVMFFIObject));
  if (t.dtype.bits != a[2].v_int64) return ts_error("ValueError", "retype: %d bits as %d", t.dtype.bits, (int)a[2].v_int64);
  t.dtype.code = (uint8_t)a[1].v_int64;
  TVMFFIObjectHandle view;
  if (TVMFFITensorCreateUnsafeView(a[0].v_obj, &t, &view)) return -1;
  ret->type_index = kTVMFFITensor;
  ret->zero_padding = 0;
  ret->v_obj = view;
  return 0;
}

/* The number that a kernel's events carry. */
TS_API int __tvm_ffi_last_kernel_id(void* unused, const TVMFFIAny* a, int32_t n, TVMFFIAny* ret) {
  (void)unused, (void)a, (void)n;
  ret->type_index = kTVMFFIInt;
  ret->zero_padding = 0;
  ret->v_int64 = next_id - 1;
  return 0;
}

static int plan_grid(ts_launch* L) {
  const ts_kernel* K = L->kernel;
  L->grid[0] = L->grid[1] = L->grid[2] = 1;
  if (TS_UNLIKELY(K->grid(L->slots, L->grid))) return ts_error("ValueError", "TS:grid:-1:-1:extents:the kernel refused");
  int64_t n = 1;
  for (int k = 0; k < 3; k++) {
    if (TS_UNLIKELY(L->grid[k] < 0 || L->grid[k] > INT32_MAX || (n *= L->grid[k]) > INT32_MAX))
      return ts_error("ValueError", "TS:grid:-1:%d:%d:%lld", k, INT32_MAX, (long long)L->grid[k]);
    if (TS_UNLIKELY(L->grid[k] % K->cluster[k]))
      return ts_error("ValueError", "TS:cluster:-1:%d:%d:%lld", k, K->cluster[k], (long long)L->grid[k]);
  }
  L->nblocks = n;
  L->nunits = n / K->cluster_size;
  L->as_fibers = (K->flags & TS_FLAG_WAITS) != 0 || ((K->flags & TS_FLAG_CLUSTER) && K->cluster_size > 1);
  if (TS_UNLIKELY((K->flags & TS_FLAG_WAITS) && !(K->flags & TS_FLAG_LOCAL) && n > K->resident))
    return ts_error("ValueError", "TS:resident:-1:-1:%lld:%lld", (long long)K->resident, (long long)n);
  return 0;
}

static int kernel_call(void* p, const TVMFFIAny* a, int32_t n, TVMFFIAny* ret) {
  const ts_kernel* K = p;
  int64_t slots[TS_MAX_SLOTS];
  ts_arg args[TS_MAX_PARAMS];
  if (TS_UNLIKELY(ts_check_args(K, a, n, slots, args))) return -1;
  ts_launch L;
  memset(&L, 0, offsetof(ts_launch, message));
  L.kernel = K;
  L.slots = slots;
  L.args = args;
  L.signal_waits = &L.own_signal_waits;
  if (K->nsymm || (K->flags & TS_FLAG_DEVICE)) {
    if (TS_UNLIKELY(ts_team_of_args(K, args, &L.team))) return -1;
  }
  /* A kernel that reaches no other rank may ask all the same who it is: of everyone. */
  slots[K->nparams] = L.team ? ts_team_rank(L.team) : ts_world_rank();
  slots[K->nparams + 1] = L.team ? ts_team_size(L.team) : ts_world_size();
  if (TS_UNLIKELY(plan_grid(&L))) return -1;
  if (TS_UNLIKELY(K->ndemands && L.nblocks > 0 && ts_check_demands(K, slots))) return -1;
  int32_t spoiled = ts_packets_spoiled(&L);
  if (TS_UNLIKELY(spoiled >= 0)) return ts_error("ValueError", "TS:spoiled:%d:-1::", spoiled);
  if (L.team) ts_team_enter(&L);
  if (TS_LIKELY(L.nblocks > 0) && !ts_failed(&L)) ts_pool_run(&L);
  ts_packets_count(&L);
  if (L.team) ts_team_leave(&L);
  ret->type_index = kTVMFFINone;
  ret->zero_padding = 0;
  ret->v_int64 = 0;
  if (TS_LIKELY(!atomic_load_explicit(&L.failed, memory_order_acquire))) return 0;
  ts_packets_spoil(&L);
  if (L.interrupted) return -2; /* to tvm-ffi: Python's own exception is set */
  return ts_error("RuntimeError", "TS:run:%d:%s", L.site, L.message);
}
