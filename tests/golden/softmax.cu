#include <ts/ts.cuh>

extern "C" __global__ void __launch_bounds__(128) softmax(const float* __restrict__ A, float* C) {
  const int tid = threadIdx.x;
  const int bx = blockIdx.x;
  extern __shared__ __align__(1024) uint8_t smem[];  // 32 bytes
  // test_cuda.py:39  T.reduce_max(x, top)
  float* const top_parts = (float*)smem;
  // test_cuda.py:42  T.reduce_sum(x, total)
  float* const total_parts = (float*)(smem + 16);
  // test_cuda.py:34  T.alloc_fragment((1000,), "float32"),
  alignas(16) float x[8];
  // test_cuda.py:35  T.alloc_fragment((1,), "float32"),
  float top;
  // test_cuda.py:36  T.alloc_fragment((1,), "float32"),
  float total;
  const int i0 = tid * 4;
  // test_cuda.py:38  T.copy(A[row, 0], x)
  #pragma unroll
  for (int u0 = 0; u0 < 2; ++u0) {
    const int i = u0 * 512 + i0;
    if (i < 1000) {
      *(uint4*)&x[u0 * 4] = *(const uint4*)&A[bx * 1000 + i];
    }
  }
  // test_cuda.py:39  T.reduce_max(x, top)
  float total_1[4];
  #pragma unroll
  for (int r = 0; r < 4; ++r) {
    total_1[r] = tid * 4 + r < 1000 ? x[r] : __int_as_float(0xff800000);
  }
  #pragma unroll
  for (int r = 0; r < 4; ++r) {
    total_1[r] = fmaxf(total_1[r], tid * 4 + r + 512 < 1000 ? x[r + 4] : __int_as_float(0xff800000));
  }
  total_1[0] = fmaxf(total_1[0], total_1[2]);
  total_1[1] = fmaxf(total_1[1], total_1[3]);
  total_1[0] = fmaxf(total_1[0], total_1[1]);
  total_1[0] = fmaxf(total_1[0], __int_as_float(0xff800000));
  total_1[0] = fmaxf(total_1[0], ts::shuffle_xor(total_1[0], 1));
  total_1[0] = fmaxf(total_1[0], ts::shuffle_xor(total_1[0], 2));
  total_1[0] = fmaxf(total_1[0], ts::shuffle_xor(total_1[0], 4));
  total_1[0] = fmaxf(total_1[0], ts::shuffle_xor(total_1[0], 8));
  total_1[0] = fmaxf(total_1[0], ts::shuffle_xor(total_1[0], 16));
  if ((tid & 31) == 0) {
    top_parts[tid >> 5] = total_1[0];
  }
  __syncthreads();  // T.Parallel reads top_parts that T.reduce_part, line 39 writes
  float total_2 = top_parts[0];
  #pragma unroll
  for (int g = 0; g < 3; ++g) {
    total_2 = fmaxf(total_2, top_parts[g + 1]);
  }
  top = total_2;
  const int i0_1 = tid * 4;
  // test_cuda.py:40  for i in T.Parallel(1000):
  #pragma unroll
  for (int u0 = 0; u0 < 2; ++u0) {
    #pragma unroll
    for (int u1 = 0; u1 < 4; ++u1) {
      const int i = u0 * 512 + i0_1 + u1;
      if (i < 1000) {
        // test_cuda.py:41  x[i] = T.exp(x[i] - top[0])
        x[u0 * 4 + u1] = expf(x[u0 * 4 + u1] - top);
      }
    }
  }
  // test_cuda.py:42  T.reduce_sum(x, total)
  float total_3 = 0.0f;
  #pragma unroll
  for (int r0 = 0; r0 < 2; ++r0) {
    #pragma unroll
    for (int r1 = 0; r1 < 4; ++r1) {
      total_3 = total_3 + (r0 * 512 + tid * 4 + r1 < 1000 ? x[r0 * 4 + r1] : 0.0f);
    }
  }
  total_3 = total_3 + ts::shuffle_xor(total_3, 1);
  total_3 = total_3 + ts::shuffle_xor(total_3, 2);
  total_3 = total_3 + ts::shuffle_xor(total_3, 4);
  total_3 = total_3 + ts::shuffle_xor(total_3, 8);
  total_3 = total_3 + ts::shuffle_xor(total_3, 16);
  if ((tid & 31) == 0) {
    total_parts[tid >> 5] = total_3;
  }
  __syncthreads();  // T.Parallel reads total_parts that T.reduce_part, line 42 writes
  float total_4 = total_parts[0];
  #pragma unroll
  for (int g = 0; g < 3; ++g) {
    total_4 = total_4 + total_parts[g + 1];
  }
  total = total_4;
  const int i_10 = tid * 4;
  // test_cuda.py:43  for i in T.Parallel(1000):
  #pragma unroll
  for (int u0 = 0; u0 < 2; ++u0) {
    #pragma unroll
    for (int u1 = 0; u1 < 4; ++u1) {
      const int i_1 = u0 * 512 + i_10 + u1;
      if (i_1 < 1000) {
        // test_cuda.py:44  x[i] = x[i] / total[0]
        x[u0 * 4 + u1] = x[u0 * 4 + u1] / total;
      }
    }
  }
  const int i0_2 = tid * 4;
  // test_cuda.py:45  T.copy(x, C[row, 0])
  #pragma unroll
  for (int u0 = 0; u0 < 2; ++u0) {
    const int i = u0 * 512 + i0_2;
    if (i < 1000) {
      *(uint4*)&C[bx * 1000 + i] = *(const uint4*)&x[u0 * 4];
    }
  }
}
