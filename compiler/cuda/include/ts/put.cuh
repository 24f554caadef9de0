// Rows to another rank's memory by warps that do nothing else (compiler/cuda/ops/remote_put.py).
#pragma once
#include <ts/types.cuh>

namespace ts {

// The unsigned type of an access of so many bytes, aligned to all of them.
template <int bytes>
struct Access {
  using type = uint4;
};
template <>
struct Access<1> {
  using type = uint8_t;
};
template <>
struct Access<2> {
  using type = uint16_t;
};
template <>
struct Access<4> {
  using type = uint32_t;
};
template <>
struct Access<8> {
  using type = uint2;
};

// Accesses of a thread that are under way at once where T.Kernel names no comm_depth: COMM_DEPTH of compiler/ir/program.py. All loads of a round stand in front of its stores: the compiler
// may not move them, since both sides may be one memory.
constexpr int UNDER_WAY = 8;

// `count` neighbours, `width` elements at a time, by `threads` threads of which this is number `thread`.
template <int width, int threads, int under_way = UNDER_WAY, typename T>
__device__ __forceinline__ void put_run(T* to, const T* from, int count, int thread) {
  using Vector = typename Access<width * sizeof(T)>::type;
  to += thread * width, from += thread * width;
#pragma unroll 1
  for (int left = count / width - thread; left > 0; left -= under_way * threads) {
    Vector held[under_way];
#pragma unroll
    for (int k = 0; k < under_way; ++k)
      if (k * threads < left) held[k] = *(const Vector*)(from + k * threads * width);
#pragma unroll
    for (int k = 0; k < under_way; ++k)
      if (k * threads < left) *(Vector*)(to + k * threads * width) = held[k];
    to += under_way * threads * width, from += under_way * threads * width;
  }
}

// `rows` rows of `count` elements. Pitches count elements.
template <int width, int threads, int under_way = UNDER_WAY, typename T>
__device__ __forceinline__ void put_rows(T* to, const T* from, int rows, int count, int64_t to_pitch, int64_t from_pitch, int thread) {
  using Vector = typename Access<width * sizeof(T)>::type;
  constexpr int held_at_once = under_way > 1 ? under_way / 2 : 1;  // the way through rows takes registers too
  const int each = count / width;              // a row
  if (rows <= 0 || each <= 0) return;
  // This thread's next access, and what lies between two of a thread, as rows and places in a row.
  int row = thread / each, place = thread % each;
  const int down = threads / each, along = threads % each;
#pragma unroll 1
  while (row < rows) {
    Vector held[held_at_once];
    int r = row, p = place;
#pragma unroll
    for (int k = 0; k < held_at_once; ++k) {
      if (r < rows) held[k] = *(const Vector*)(from + r * from_pitch + p * width);
      r += down, p += along;
      if (p >= each) p -= each, ++r;
    }
#pragma unroll
    for (int k = 0; k < held_at_once; ++k) {  // the same way once more: two registers, not two for each address
      if (row < rows) *(Vector*)(to + row * to_pitch + place * width) = held[k];
      row += down, place += along;
      if (place >= each) place -= each, ++row;
    }
  }
}

// The same of zeros: rows of a source that is not there.
template <int width, int threads, typename T>
__device__ __forceinline__ void put_zeros(T* to, int rows, int count, int64_t to_pitch, int thread) {
  using Vector = typename Access<width * sizeof(T)>::type;
#pragma unroll 1
  for (int row = 0; row < rows; ++row)
#pragma unroll 1
    for (int k = thread; k < count / width; k += threads) *(Vector*)(to + row * to_pitch + k * width) = Vector{};
}

}  // namespace ts
