// Neighbours of global memory, each added atomically by one instruction, which rounds once (PTX ISA 9.0, "red"; vectors and pairs of
// bfloat16 from sm_90 on). `at` is aligned to all that is added.
#pragma once
#include <ts/types.cuh>

namespace ts {

#define TS_RED_ADD_OF(function, scope, words, instruction, places)                                                           \
  __device__ __forceinline__ void function(void* at, const void* values) {                                                   \
    uint32_t x[words];                                                                                                       \
    memcpy(x, values, sizeof(x));                                                                                            \
    asm volatile("red.relaxed." scope ".global.add." instruction " [%0], " places ";" ::"l"(__cvta_generic_to_global(at)),   \
                 TS_WORDS_##words : "memory");                                                                               \
  }
#define TS_RED_ADD(name, words, instruction, places)                                                                         \
  TS_RED_ADD_OF(red_add##name, "gpu", words, instruction, places)                                                            \
  /* of another rank's memory (system_red_add in atomic.cuh) */                                                              \
  TS_RED_ADD_OF(remote_red_add##name, "sys", words, instruction, places)                                                     \
  /* what the block did before is seen by whoever sees the sums */                                                           \
  __device__ __forceinline__ void publishing_red_add##name(void* at, const void* values) {                                   \
    __threadfence();                                                                                                         \
    red_add##name(at, values);                                                                                               \
  }
#define TS_WORDS_1 "r"(x[0])
#define TS_WORDS_2 "r"(x[0]), "r"(x[1])
#define TS_WORDS_4 "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])

TS_RED_ADD(2_f16, 1, "noftz.f16x2", "%1")
#if __CUDA_ARCH__ >= 900
TS_RED_ADD(4_f16, 2, "noftz.v2.f16x2", "{%1, %2}")
TS_RED_ADD(8_f16, 4, "noftz.v4.f16x2", "{%1, %2, %3, %4}")
TS_RED_ADD(2_bf16, 1, "noftz.bf16x2", "%1")
TS_RED_ADD(4_bf16, 2, "noftz.v2.bf16x2", "{%1, %2}")
TS_RED_ADD(8_bf16, 4, "noftz.v4.bf16x2", "{%1, %2, %3, %4}")
TS_RED_ADD(2_f32, 2, "v2.f32", "{%1, %2}")
TS_RED_ADD(4_f32, 4, "v4.f32", "{%1, %2, %3, %4}")
#endif

#undef TS_WORDS_1
#undef TS_WORDS_2
#undef TS_WORDS_4
#undef TS_RED_ADD
#undef TS_RED_ADD_OF

}  // namespace ts
