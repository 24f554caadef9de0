/* Atomic updates for kernels, one function a kind and dtype. All are sequentially consistent: a kernel's atomics also publish
   what their executor wrote before (T.atomic_store) and observe what the writer of the value published (T.atomic_load).
   Small floats have no atomic instruction of their own: a compare-and-swap loop over their bits. */
#include <math.h>
#include <stdint.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#define ORDER __ATOMIC_SEQ_CST

static float bits_to_float(uint32_t u) { float f; memcpy(&f, &u, 4); return f; }
static uint32_t float_to_bits(float f) { uint32_t u; memcpy(&u, &f, 4); return u; }

static float from_bfloat16(uint16_t h) { return bits_to_float((uint32_t)h << 16); }
static uint16_t to_bfloat16(float f) {
    uint32_t u = float_to_bits(f);
    if (f != f) return (uint16_t)((u >> 16) | 0x40); /* a quiet NaN stays one */
    return (uint16_t)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

static float from_float16(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = (h >> 10) & 31, fraction = h & 0x3ff;
    if (exponent == 31) return bits_to_float(sign | 0x7f800000 | fraction << 13);
    if (exponent == 0) { /* subnormal: fraction · 2^-24 */
        float f = (float)fraction * 0x1p-24f;
        return sign ? -f : f;
    }
    return bits_to_float(sign | (exponent + 112) << 23 | fraction << 13);
}
static uint16_t to_float16(float f) {
    uint32_t u = float_to_bits(f), sign = (u >> 16) & 0x8000, a = u & 0x7fffffff;
    if (a > 0x7f800000) return (uint16_t)(sign | 0x7e00);
    if (a >= 0x477ff000) return (uint16_t)(sign | 0x7c00); /* rounds beyond 65504 */
    if (a < 0x38800000) { /* subnormal: adding 0.5 aligns the last place of 2^-24 with the last place of the sum */
        float shifted = bits_to_float(a) + 0.5f;
        return (uint16_t)(sign | (float_to_bits(shifted) - 0x3f000000));
    }
    a += 0xfff + ((a >> 13) & 1);
    return (uint16_t)(sign | ((a - 0x38000000) >> 13));
}

#define PICK_add(a, b) ((a) + (b))
#define PICK_max(a, b) ((a) > (b) || (a) != (a) ? (a) : (b))
#define PICK_min(a, b) ((a) < (b) || (a) != (a) ? (a) : (b))
#define PICK_or(a, b) ((a) | (b))
#define PICK_and(a, b) ((a) & (b))
#define PICK_xor(a, b) ((a) ^ (b))

/* S: what lies in memory; V: what is computed with; IN, OUT: between them */
#define UPDATE(kind, name, S, V, IN, OUT)                                             \
    EXPORT S ts_atomic_##kind##_##name(S* p, S value) {                               \
        S seen, next;                                                                 \
        __atomic_load(p, &seen, ORDER);                                               \
        do {                                                                          \
            V a = IN(seen), b = IN(value);                                            \
            next = OUT(PICK_##kind(a, b));                                            \
        } while (!__atomic_compare_exchange(p, &seen, &next, 1, ORDER, ORDER));       \
        return seen;                                                                  \
    }
#define PLAIN(name, S)                                                                                     \
    EXPORT S ts_atomic_load_##name(S* p, S unused) { S v; (void)unused; __atomic_load(p, &v, ORDER); return v; } \
    EXPORT S ts_atomic_exch_##name(S* p, S value) { S v; __atomic_exchange(p, &value, &v, ORDER); return v; } \
    EXPORT S ts_atomic_store_##name(S* p, S value) { __atomic_store(p, &value, ORDER); return value; }
#define SAME(x) (x)
#define ALL(name, S, V, IN, OUT)            \
    UPDATE(add, name, S, V, IN, OUT)        \
    UPDATE(max, name, S, V, IN, OUT)        \
    UPDATE(min, name, S, V, IN, OUT)        \
    PLAIN(name, S)

#define BITS(name, S)                       \
    ALL(name, S, S, SAME, SAME)             \
    UPDATE(or, name, S, S, SAME, SAME)      \
    UPDATE(and, name, S, S, SAME, SAME)     \
    UPDATE(xor, name, S, S, SAME, SAME)

ALL(float32, float, float, SAME, SAME)
ALL(float64, double, double, SAME, SAME)
ALL(float16, uint16_t, float, from_float16, to_float16)
ALL(bfloat16, uint16_t, float, from_bfloat16, to_bfloat16)
BITS(int32, int32_t)
BITS(int64, int64_t)
BITS(uint32, uint32_t)
BITS(uint64, uint64_t)
