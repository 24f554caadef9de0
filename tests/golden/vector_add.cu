#include <ts/ts.cuh>

extern "C" __global__ void __launch_bounds__(128) vector_add(
    const float* __restrict__ A,
    const float* __restrict__ B,
    float* C) {
  const int tid = threadIdx.x;
  const int bx = blockIdx.x;
  const int i0 = tid * 4;
  alignas(16) float A_in[4];
  if (bx * 512 + i0 < 1000) {
    *(uint4*)&A_in[0] = *(const uint4*)&A[bx * 512 + i0];
  } else {
    *(uint4*)&A_in[0] = uint4{};
  }
  alignas(16) float B_in[4];
  if (bx * 512 + i0 < 1000) {
    *(uint4*)&B_in[0] = *(const uint4*)&B[bx * 512 + i0];
  } else {
    *(uint4*)&B_in[0] = uint4{};
  }
  alignas(16) float C_out[4];
  // test_cuda.py:53  for i in T.Parallel(512):
  #pragma unroll
  for (int u = 0; u < 4; ++u) {
    // test_cuda.py:54  C[bx * 512 + i] = A[bx * 512 + i] + B[bx * 512 + i]
    C_out[u] = A_in[u] + B_in[u];
  }
  if (bx * 512 + i0 < 1000) {
    *(uint4*)&C[bx * 512 + i0] = *(const uint4*)&C_out[0];
  }
}
