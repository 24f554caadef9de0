#include <ts/ts.cuh>

extern "C" __global__ void __launch_bounds__(64) softmax(const float* __restrict__ A, float* C) {
  const int tid = threadIdx.x;
  const int bx = blockIdx.x;
  // test_ir.py:33  x, top, total = T.alloc_fragment((100,), "float32"), T.alloc_fragment((1,), "float32"), T.alloc_fragment((1,), "float32")
  alignas(16) float x[4];
  float top;
  float total;
  const int i0 = (tid & 31) * 4;
  if (i0 < 100) {
    // test_ir.py:34  T.copy(A[row, 0], x)
    *(uint4*)&x[0] = *(const uint4*)&A[bx * 100 + i0];
  }
  // test_ir.py:35  T.reduce_max(x, top)
  float total_1 = __int_as_float(0xff800000);
  #pragma unroll
  for (int r0 = 0; r0 < 4; ++r0) {
    total_1 = ts::max(total_1, (tid & 31) * 4 + r0 < 100 ? x[r0] : __int_as_float(0xff800000));
  }
  total_1 = ts::max(total_1, ts::shuffle_xor(total_1, 1));
  total_1 = ts::max(total_1, ts::shuffle_xor(total_1, 2));
  total_1 = ts::max(total_1, ts::shuffle_xor(total_1, 4));
  total_1 = ts::max(total_1, ts::shuffle_xor(total_1, 8));
  total_1 = ts::max(total_1, ts::shuffle_xor(total_1, 16));
  top = total_1;
  const int i0_1 = (tid & 31) * 4;
  // test_ir.py:36  for i in T.Parallel(100):
  #pragma unroll
  for (int u = 0; u < 4; ++u) {
    const int i = i0_1 + u;
    if (i < 100) {
      // test_ir.py:37  x[i] = T.exp(x[i] - top[0])
      x[u] = expf(x[u] - top);
    }
  }
  // test_ir.py:38  T.reduce_sum(x, total)
  float total_2 = 0.0f;
  #pragma unroll
  for (int r0 = 0; r0 < 4; ++r0) {
    total_2 = total_2 + ((tid & 31) * 4 + r0 < 100 ? x[r0] : 0.0f);
  }
  total_2 = total_2 + ts::shuffle_xor(total_2, 1);
  total_2 = total_2 + ts::shuffle_xor(total_2, 2);
  total_2 = total_2 + ts::shuffle_xor(total_2, 4);
  total_2 = total_2 + ts::shuffle_xor(total_2, 8);
  total_2 = total_2 + ts::shuffle_xor(total_2, 16);
  total = total_2;
  const int i_10 = (tid & 31) * 4;
  // test_ir.py:39  for i in T.Parallel(100):
  #pragma unroll
  for (int u = 0; u < 4; ++u) {
    const int i_1 = i_10 + u;
    if (i_1 < 100) {
      // test_ir.py:40  x[i] = x[i] / total[0]
      x[u] = x[u] / total;
    }
  }
  const int i0_2 = (tid & 31) * 4;
  if (i0_2 < 100) {
    if (tid >> 5 == 0) {
      // test_ir.py:41  T.copy(x, C[row, 0])
      *(uint4*)&C[bx * 100 + i0_2] = *(const uint4*)&x[0];
    }
  }
}
