#include <cuda_fp16.h>
#include <ts/ts.cuh>

extern "C" __global__ void __launch_bounds__(128) scale(const half* __restrict__ A, half* B, float f, int n) {
  const int bx = blockIdx.x;
  const int tx = threadIdx.x;
  // kernel.py:12
  const int i = bx * 128 + tx;
  // kernel.py:13
  if (i < n) {
    B[i] = half(float(A[i]) * f);
  }
}
