/* A call's arguments against the kernel's description.
 *
 * A refusal's text is `TS:<check>:<param index>:<axis>:<expected>:<got>` (-1 where there is no parameter or axis); the checks:
 *   nargs kind dtype device ndim shape stride multiple contig null align range overlap (axis: the other parameter)
 *   notsymm team (launch.c, team.c)   grid cluster resident (launch.c)
 *   parts (axis: which demand; expected: the ranks that launch; got: the parts, or the root)
 */
#include "ts_rt.h"
#include <stdio.h>
#include <string.h>

static int refuse(const char* kind, const char* check, int32_t param, int32_t axis, const char* expected, const char* got) {
  return ts_error(kind, "TS:%s:%d:%d:%s:%s", check, param, axis, expected, got);
}

static int refuse_n(const char* check, int32_t param, int32_t axis, int64_t expected, int64_t got) {
  return ts_error("ValueError", "TS:%s:%d:%d:%lld:%lld", check, param, axis, (long long)expected, (long long)got);
}

static const char* given(const TVMFFIAny* a) {
  switch (a->type_index) {
    case kTVMFFINone: return "None";
    case kTVMFFIInt: return "int";
    case kTVMFFIBool: return "bool";
    case kTVMFFIFloat: return "float";
    case kTVMFFIDLTensorPtr: case kTVMFFITensor: return "tensor";
    case kTVMFFIRawStr: case kTVMFFISmallStr: case kTVMFFIStr: return "str";
    default: return "object";
  }
}

static inline const DLTensor* tensor_of(const TVMFFIAny* a) {
  if (TS_LIKELY(a->type_index == kTVMFFITensor)) return (const DLTensor*)((const char*)a->v_obj + sizeof(TVMFFIObject));
  return a->type_index == kTVMFFIDLTensorPtr ? (const DLTensor*)a->v_ptr : NULL;
}

/* One extent or stride against its rule; symbols live behind the parameters and the two hidden slots. */
static inline int rule_ok(const ts_rule* r, int64_t v, int64_t* symbols, int64_t* expected) {
  switch (r->how) {
    case TS_HOW_VALUE: *expected = r->value; return v == r->value;
    case TS_HOW_DEFINE: symbols[r->value] = v; return 1;
    case TS_HOW_MULTIPLE:
      symbols[TS_SYMBOL_OF(r->value)] = v;
      *expected = TS_MULTIPLE_OF(r->value);
      return v % TS_MULTIPLE_OF(r->value) == 0;
    case TS_HOW_SYMBOL: *expected = symbols[r->value]; return v == symbols[r->value];
    default: return 1;
  }
}

static int check_tensor(const ts_kernel* K, const ts_param* p, int32_t i, const TVMFFIAny* any, int64_t* slot, int64_t* symbols, ts_arg* arg) {
  char want[32], got[32];
  const DLTensor* t = tensor_of(any);
  if (TS_UNLIKELY(!t)) return refuse("TypeError", "kind", i, -1, "tensor", given(any));
  if (TS_UNLIKELY(t->dtype.code != p->code || t->dtype.bits != p->bits || t->dtype.lanes != 1))
    return refuse("TypeError", "dtype", i, -1, ts_dtype_name(p->code, p->bits, want),
                  ts_dtype_name(t->dtype.code, t->dtype.bits, got));
  if (TS_UNLIKELY(t->device.device_type != K->device && !(K->device == kDLCPU && t->device.device_type == kDLCUDAHost))) {
    snprintf(want, sizeof want, "%d", K->device);
    snprintf(got, sizeof got, "%d", t->device.device_type);
    return refuse("TypeError", "device", i, -1, want, got);
  }
  if (TS_UNLIKELY(t->ndim != p->ndim)) return refuse_n("ndim", i, -1, p->ndim, t->ndim);
  char* data = (char*)t->data + t->byte_offset;
  int64_t size = p->bits >= 8 ? p->bits / 8 : 1, expected = 0, packed = 1, low = 0, high = 0;
  int empty = 0;
  for (int32_t d = p->ndim - 1; d >= 0; d--) {
    int64_t extent = t->shape[d];
    if (extent == 0) empty = 1;
    int64_t stride = t->strides ? t->strides[d] : packed;
    if (TS_UNLIKELY(!p->strided && extent > 1 && stride != packed && !empty)) {
      int any_empty = 0; /* an axis further out may still be empty, and then no stride matters */
      for (int32_t e = 0; e < d; e++) any_empty |= t->shape[e] == 0;
      if (!any_empty) return refuse_n("contig", i, d, packed, stride);
    }
    if (extent > 1) *(stride < 0 ? &low : &high) += (extent - 1) * stride;
    packed *= extent;
  }
  /* Axes in the order of the description, so that a symbol is defined before it is used. */
  for (int32_t d = 0; d < p->ndim; d++)
    if (TS_UNLIKELY(!rule_ok(&p->shape[d], t->shape[d], symbols, &expected)))
      return refuse_n(p->shape[d].how == TS_HOW_MULTIPLE ? "multiple" : "shape", i, d, expected, t->shape[d]);
  if (p->strided) {
    int64_t packed_stride[TS_MAX_DIM], n = 1;
    for (int32_t d = p->ndim - 1; d >= 0; d--) packed_stride[d] = n, n *= t->shape[d];
    for (int32_t d = 0; d < p->ndim; d++) {
      int64_t stride = t->strides ? t->strides[d] : packed_stride[d];
      if (TS_UNLIKELY(!rule_ok(&p->stride[d], stride, symbols, &expected)) && (t->shape[d] > 1 || p->stride[d].how != TS_HOW_VALUE))
        return refuse_n(p->stride[d].how == TS_HOW_MULTIPLE ? "multiple" : "stride", i, d, expected, stride);
    }
  }
  if (TS_UNLIKELY((uintptr_t)data < 65536) && !empty) /* nobody maps these: a view of no memory at all */
    return refuse_n("null", i, -1, 0, 0);
  int64_t align = p->align > size ? p->align : size;
  if (TS_UNLIKELY((uintptr_t)data & (uintptr_t)(align - 1)) && !empty)
    return refuse_n("align", i, -1, align, (int64_t)((uintptr_t)data & (uintptr_t)(align - 1)));
  *slot = (int64_t)(intptr_t)data;
  arg->tensor = t;
  arg->lo = data + low * size;
  arg->hi = empty ? arg->lo : data + (high + 1) * size;
  return 0;
}

static int check_int(const ts_param* p, int32_t i, const TVMFFIAny* a, int64_t* slot) {
  char want[32], got[32];
  if (TS_UNLIKELY(a->type_index != kTVMFFIInt && a->type_index != kTVMFFIBool))
    return refuse("TypeError", "kind", i, -1, "int", given(a));
  int64_t v = a->type_index == kTVMFFIBool ? (a->v_int64 & 1) : a->v_int64;
  int fits = p->code == kDLBool ? (v == 0 || v == 1)
             : p->code == kDLUInt ? v >= 0 && (p->bits >= 63 || v < (int64_t)1 << p->bits)
                                  : p->bits >= 64 || (v >= -((int64_t)1 << (p->bits - 1)) && v < (int64_t)1 << (p->bits - 1));
  if (TS_UNLIKELY(!fits)) {
    snprintf(got, sizeof got, "%lld", (long long)v);
    return refuse("ValueError", "range", i, -1, ts_dtype_name(p->code, p->bits, want), got);
  }
  *slot = v;
  return 0;
}

static int check_float(int32_t i, const TVMFFIAny* a, int64_t* slot) {
  double d;
  if (a->type_index == kTVMFFIFloat) d = a->v_float64;
  else if (a->type_index == kTVMFFIInt) d = (double)a->v_int64;
  else if (a->type_index == kTVMFFIBool) d = (double)(a->v_int64 & 1);
  else return refuse("TypeError", "kind", i, -1, "float", given(a));
  memcpy(slot, &d, sizeof d);
  return 0;
}

/* ---- overlap, exactly: do two strided sets of bytes share one? */

typedef struct axis { int64_t stride, a, b; } axis; /* a, b: this stride's extent in either tensor, 1 where it has none */

static int find_sum(const axis* x, int n, int64_t delta, int64_t low, int64_t high, int* budget) {
  /* Is there d_k in -(b_k - 1) … a_k - 1 with Σ d_k · stride_k = delta? low, high: what Σ can be over x[0 … n). */
  if (delta < low || delta > high) return 0;
  if (n == 0) return 1;
  if (--*budget < 0) return 1; /* too tangled to decide: take it as overlap */
  int64_t s = x->stride;
  low += (x->b - 1) * s;
  high -= (x->a - 1) * s;
  /* Only those d for which delta - d · s lies within what the remaining axes can reach. */
  int64_t from = -(x->b - 1), to = x->a - 1;
  int64_t need_low = delta - high, need_high = delta - low;
  int64_t first = need_low >= 0 ? (need_low + s - 1) / s : -((-need_low) / s);
  int64_t last = need_high >= 0 ? need_high / s : -((-need_high + s - 1) / s);
  if (first > from) from = first;
  if (last < to) to = last;
  for (int64_t d = from; d <= to; d++)
    if (find_sum(x + 1, n - 1, delta - d * s, low, high, budget)) return 1;
  return 0;
}

static int add_axes(axis* x, int n, const ts_param* p, const ts_arg* arg, int second) {
  int64_t size = p->bits >= 8 ? p->bits / 8 : 1, packed = size;
  for (int32_t d = p->ndim; d >= 0; d--) { /* the bytes of an element are the innermost axis */
    int64_t extent = d == p->ndim ? size : arg->tensor->shape[d];
    int64_t stride = d == p->ndim ? 1 : arg->tensor->strides ? arg->tensor->strides[d] * size : packed;
    if (d < p->ndim) packed *= extent;
    if (stride < 0) stride = -stride; /* lo is the lowest address already */
    if (extent <= 1 || stride == 0) continue;
    int k = 0;
    while (k < n && !(x[k].stride == stride && (second ? x[k].b : x[k].a) == 1)) k++;
    if (k == n) x[n++] = (axis){stride, 1, 1};
    *(second ? &x[k].b : &x[k].a) = extent;
  }
  return n;
}

static int share_bytes(const ts_kernel* K, int32_t i, int32_t j, const ts_arg* args) {
  axis x[2 * TS_MAX_DIM + 2];
  int n = add_axes(x, 0, &K->params[i], &args[i], 0), budget = 10000;
  n = add_axes(x, n, &K->params[j], &args[j], 1);
  for (int k = 1; k < n; k++) /* largest stride first */
    for (int m = k; m > 0 && x[m].stride > x[m - 1].stride; m--) {
      axis t = x[m];
      x[m] = x[m - 1];
      x[m - 1] = t;
    }
  int64_t low = 0, high = 0;
  for (int k = 0; k < n; k++) low -= (x[k].b - 1) * x[k].stride, high += (x[k].a - 1) * x[k].stride;
  return find_sum(x, n, args[j].lo - args[i].lo, low, high, &budget);
}

int ts_check_args(const ts_kernel* K, const TVMFFIAny* a, int32_t n, int64_t* slots, ts_arg* args) {
  if (TS_UNLIKELY(n != K->nparams)) return ts_error("TypeError", "TS:nargs:-1:-1:%d:%d", K->nparams, n);
  int64_t* symbols = slots + K->nparams + 2;
  for (int32_t i = 0; i < n; i++) {
    const ts_param* p = &K->params[i];
    int bad;
    args[i].tensor = NULL;
    if (p->kind == TS_KIND_INT) bad = check_int(p, i, a + i, slots + i);
    else if (p->kind == TS_KIND_FLOAT) bad = check_float(i, a + i, slots + i);
    else bad = check_tensor(K, p, i, a + i, slots + i, symbols, args + i);
    if (TS_UNLIKELY(bad)) return -1;
  }
  for (int32_t k = 0; k < K->nsyms; k++)
    if (TS_UNLIKELY(K->narrow[k / 64] >> k % 64 & 1 && symbols[k] > INT32_MAX))
      return ts_error("ValueError", "TS:symbol:-1:%d:%d:%lld", k, INT32_MAX, (long long)symbols[k]);
  for (int32_t j = 1; j < n; j++) {
    if (!args[j].tensor) continue;
    for (int32_t i = 0; i < j; i++) {
      if (!args[i].tensor || !(K->params[i].written | K->params[j].written)) continue;
      if (TS_LIKELY(args[i].hi <= args[j].lo || args[j].hi <= args[i].lo)) continue;
      if (share_bytes(K, i, j, args))
        return ts_error("ValueError", "TS:overlap:%d:%d:%s:%s", j, i, "disjoint memory", "the same memory");
    }
  }
  return 0;
}

int ts_check_demands(const ts_kernel* K, const int64_t* slots) {
  const int64_t ranks = slots[K->nparams + 1], *symbols = slots + K->nparams + 2;
  for (int64_t k = 0; k < K->ndemands; k++) {
    const ts_demand* d = &K->demands[k];
    const int64_t value = d->rule.how == TS_HOW_SYMBOL ? symbols[d->rule.value] : d->rule.value;
    if (TS_UNLIKELY(d->kind == TS_DEMAND_ROOT ? value >= ranks : value != ranks)) return refuse_n("parts", -1, (int32_t)k, ranks, value);
  }
  return 0;
}
