// What printed kernels call. Tiny headers: their size is most of a kernel's compile time.
#pragma once
#include <ts/types.cuh>
#include <ts/convert.cuh>
#include <ts/math.cuh>
#include <ts/warp.cuh>
#include <ts/atomic.cuh>
