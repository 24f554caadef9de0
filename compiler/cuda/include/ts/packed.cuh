// Two 16-bit floats at once, each result rounded to nearest even. `.rn` keeps ptxas from contracting a sum and a product into one.
#pragma once
#include <ts/types.cuh>

namespace ts {

#define TS_PACKED(name, text)                                                             \
  __device__ __forceinline__ void name(void* to, const void* first, const void* second) { \
    uint32_t a, b, d;                                                                     \
    memcpy(&a, first, 4);                                                                 \
    memcpy(&b, second, 4);                                                                \
    asm(text : "=r"(d) : "r"(a), "r"(b));                                                 \
    memcpy(to, &d, 4);                                                                    \
  }

TS_PACKED(add2_f16, "add.rn.f16x2 %0, %1, %2;")
TS_PACKED(sub2_f16, "sub.rn.f16x2 %0, %1, %2;")
TS_PACKED(mul2_f16, "mul.rn.f16x2 %0, %1, %2;")
#if __CUDA_ARCH__ >= 900
TS_PACKED(add2_bf16, "add.rn.bf16x2 %0, %1, %2;")
TS_PACKED(sub2_bf16, "sub.rn.bf16x2 %0, %1, %2;")
TS_PACKED(mul2_bf16, "mul.rn.bf16x2 %0, %1, %2;")
#else  // a · 1 + b, b · -1 + a, a · b + -0
TS_PACKED(add2_bf16, "{ .reg .b32 c; mov.b32 c, 0x3f803f80; fma.rn.bf16x2 %0, %1, c, %2; }")
TS_PACKED(sub2_bf16, "{ .reg .b32 c; mov.b32 c, 0xbf80bf80; fma.rn.bf16x2 %0, %2, c, %1; }")
TS_PACKED(mul2_bf16, "{ .reg .b32 c; mov.b32 c, 0x80008000; fma.rn.bf16x2 %0, %1, %2, c; }")
#endif
#undef TS_PACKED

}  // namespace ts
