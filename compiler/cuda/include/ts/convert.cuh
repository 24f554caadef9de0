// Conversions that C++ leaves undefined or CUDA defines otherwise: float to integer, and the 8-bit floats.
#pragma once
#include <ts/types.cuh>

namespace ts {

// Float to integer: truncates, saturates, NaN to zero. cvt.rzi saturates by itself, and gives zero for a NaN where the source is f32 and
// the result has 32 bits (PTX ISA, "cvt"); elsewhere the NaN is asked for.
template <typename To>
struct ToInt;

template <>
struct ToInt<int32_t> {
  static __device__ __forceinline__ int32_t of(float x) { return __float2int_rz(x); }
  static __device__ __forceinline__ int32_t of(double x) { return x == x ? __double2int_rz(x) : 0; }
};
template <>
struct ToInt<uint32_t> {
  static __device__ __forceinline__ uint32_t of(float x) { return __float2uint_rz(x); }
  static __device__ __forceinline__ uint32_t of(double x) { return x == x ? __double2uint_rz(x) : 0; }
};
template <>
struct ToInt<int64_t> {
  static __device__ __forceinline__ int64_t of(float x) { return x == x ? __float2ll_rz(x) : 0; }
  static __device__ __forceinline__ int64_t of(double x) { return x == x ? __double2ll_rz(x) : 0; }
};
template <>
struct ToInt<uint64_t> {
  static __device__ __forceinline__ uint64_t of(float x) { return x == x ? __float2ull_rz(x) : 0; }
  static __device__ __forceinline__ uint64_t of(double x) { return x == x ? __double2ull_rz(x) : 0; }
};
// Narrower ones saturate twice: at 32 bits, then at their own width.
template <typename To, int low, int high>
struct ToNarrow {
  template <typename From>
  static __device__ __forceinline__ To of(From x) {
    return To(::min(::max(ToInt<int32_t>::of(x), low), high));
  }
};
template <>
struct ToInt<int8_t> : ToNarrow<int8_t, -128, 127> {};
template <>
struct ToInt<uint8_t> : ToNarrow<uint8_t, 0, 255> {};
template <>
struct ToInt<int16_t> : ToNarrow<int16_t, -32768, 32767> {};
template <>
struct ToInt<uint16_t> : ToNarrow<uint16_t, 0, 65535> {};

template <typename To, typename From>
__device__ __forceinline__ To to(From x) {
  return ToInt<To>::of(x);
}

// float64 to float32 by truncation with a sticky last bit: rounding the result to a format at least two bits narrower is the correct
// rounding of the float64 (Boldo and Melquiond, IEEE Trans. Computers 57(4), 2008).
__device__ __forceinline__ float round_to_odd(double x) {
  const float down = __double2float_rz(x);
  const bool exact = double(down) == x || x != x;
  return exact ? down : __uint_as_float(__float_as_uint(down) | 1u);
}

// A one-byte float with `mantissa` bits behind the point and this bias, rounded to nearest even, from a float's bits. Normal results
// round on the integer; subnormal ones by adding a power of two whose last place is theirs.
template <int mantissa, int bias, uint32_t overflow, uint32_t nan>
__device__ __forceinline__ uint8_t to_float8(float x) {
  const uint32_t u = __float_as_uint(x), m = u & 0x7fffffffu;
  constexpr int shift = 23 - mantissa;
  constexpr uint32_t smallest_normal = uint32_t(128 - bias) << 23, magic = uint32_t(151 - bias - mantissa) << 23;
  const uint32_t normal = (m - (uint32_t(127 - bias) << 23) + ((1u << (shift - 1)) - 1u) + ((m >> shift) & 1u)) >> shift;
  const uint32_t tiny = __float_as_uint(__fadd_rn(__uint_as_float(m), __uint_as_float(magic))) - magic;
  uint32_t code = m < smallest_normal ? tiny : ::min(normal, overflow);
  code = m > 0x7f800000u ? nan : code;
  return uint8_t(code | ((u >> 24) & 0x80u));
}

__device__ __forceinline__ float half_bits_to_float(uint16_t h) {
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
  return f;
}

// float8_e4m3fn: no infinity; what is beyond 448 becomes NaN. 464, as far from 448 as from the 480 that there is not, is even as 448.
struct e4m3 {
  uint8_t bits;
  e4m3() = default;
  explicit __device__ __forceinline__ e4m3(float x) {
#if __CUDA_ARCH__ >= 890
    // The processor's conversion saturates; NaN stays NaN.
    uint16_t pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(x));
    bits = uint8_t(fabsf(x) > 464.0f ? pair | 0x7f : pair);
#else
    bits = to_float8<3, 7, 0x7f, 0x7f>(x);
#endif
  }
  explicit __device__ __forceinline__ e4m3(double x) : e4m3(round_to_odd(x)) {}
  explicit __device__ __forceinline__ operator float() const {
#if __CUDA_ARCH__ >= 890
    uint32_t pair;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(uint16_t(bits)));
    return half_bits_to_float(uint16_t(pair));
#else
    // As a float16 the fields mean 2^-8 of the value (bias 7, not 15), subnormals included.
    const float f = half_bits_to_float(uint16_t((bits & 0x80) << 8 | (bits & 0x7f) << 7)) * 256.0f;
    return (bits & 0x7f) == 0x7f ? __uint_as_float(0x7fc00000u) : f;
#endif
  }
};

// float8_e5m2: the upper byte of a float16; beyond 57344 (61440 and more before rounding) it becomes infinite.
struct e5m2 {
  uint8_t bits;
  e5m2() = default;
  explicit __device__ __forceinline__ e5m2(float x) : bits(to_float8<2, 15, 0x7c, 0x7f>(x)) {}
  explicit __device__ __forceinline__ e5m2(double x) : e5m2(round_to_odd(x)) {}
  explicit __device__ __forceinline__ operator float() const { return half_bits_to_float(uint16_t(bits << 8)); }
};

}  // namespace ts
