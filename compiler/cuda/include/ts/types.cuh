// Integer types under NVRTC, which has no <stdint.h>, and the types of our own.
#pragma once

#ifdef __CUDACC_RTC__
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long int64_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long uint64_t;
typedef unsigned long uintptr_t;
#else
#include <stdint.h>
#endif

namespace ts {

// CUtensorMap, without <cuda.h>.
struct alignas(64) TensorMap {
  uint64_t opaque[16];
};

// The unsigned integer of a size, of the kind that atomicCAS takes.
template <int size>
struct WordOf;
template <>
struct WordOf<2> {
  using type = unsigned short;
};
template <>
struct WordOf<4> {
  using type = unsigned int;
};
template <>
struct WordOf<8> {
  using type = unsigned long long;
};

// The bits of a value as another type of the same size.
template <typename To, typename From>
__device__ __forceinline__ To bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "ts::bits of types of different sizes");
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

}  // namespace ts
