#include <cuda_bf16.h>
#include <ts/ts.cuh>

extern "C" __global__ void __launch_bounds__(128) staged(const nv_bfloat16* __restrict__ A, float* B) {
  const int bx = blockIdx.x;
  const int tx = threadIdx.x;
  extern __shared__ __align__(1024) uint8_t smem[];  // 8192 bytes
  // kernel.py:20
  nv_bfloat16* const A_s = (nv_bfloat16*)smem;
  float acc[32];
  #pragma unroll
  for (int k = 0; k < 4; ++k) {
    // kernel.py:21
    *(uint4*)&A_s[(k * 128 + tx) * 8] = *(const uint4*)&A[int64_t(bx) * 4096 + (k * 128 + tx) * 8];
  }
  // kernel.py:22
  __syncthreads();
  #pragma unroll
  for (int k = 0; k < 32; ++k) {
    // kernel.py:23
    acc[k] = float(A_s[((k * 128 + tx) & 63) * 64 + ((k * 128 + tx) >> 6)]);
    // kernel.py:24
    B[int64_t(bx) * 4096 + (k * 128 + tx)] = ts::max(acc[k], 0.0f);
  }
}
