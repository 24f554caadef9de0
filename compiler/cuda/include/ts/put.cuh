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

// Accesses of a thread that are under way at once: 4 KiB a warp, which hides the way to memory; its registers hold no more.
constexpr int UNDER_WAY = 8;

// `rows` rows of `count` elements, `width` elements at a time, by `threads` threads of which this is number `thread`. Pitches count
// elements. All loads of a round stand in front of its stores: the compiler may not move them, since both sides may be one memory.
template <int width, int threads, typename T>
__device__ __forceinline__ void put_rows(T* to, const T* from, int rows, int count, int64_t to_pitch, int64_t from_pitch, int thread) {
  using Vector = typename Access<width * sizeof(T)>::type;
  const int each = count / width;  // a row
  if (rows <= 0 || each <= 0) return;
  // This thread's next access, and what lies between two of a thread, as rows and places in a row.
  int row = thread / each, place = thread % each;
  const int down = threads / each, along = threads % each;
  while (row < rows) {
    Vector held[UNDER_WAY];
    int64_t there[UNDER_WAY];
#pragma unroll
    for (int k = 0; k < UNDER_WAY; ++k) {
      there[k] = -1;
      if (row < rows) {
        held[k] = *(const Vector*)(from + row * from_pitch + int64_t(place) * width);
        there[k] = row * to_pitch + int64_t(place) * width;
      }
      row += down, place += along;
      if (place >= each) place -= each, ++row;
    }
#pragma unroll
    for (int k = 0; k < UNDER_WAY; ++k)
      if (there[k] >= 0) *(Vector*)(to + there[k]) = held[k];
  }
}

}  // namespace ts
