#include <cuda_fp16.h>
#include <ts/ts.cuh>
#include <ts/ampere.cuh>

extern "C" __global__ void __launch_bounds__(128) gemm(
    const half* __restrict__ A,
    const half* __restrict__ B,
    half* C,
    int m) {
  const int tid = threadIdx.x;
  const int bx = blockIdx.x;
  const int by = blockIdx.y;
  extern __shared__ __align__(1024) uint8_t smem[];  // 24576 bytes
  // test_ir.py:26  A_s, B_s = T.alloc_shared((64, 32), "float16"), T.alloc_shared((32, 64), "float16")
  half* const A_s = (half*)(smem + 12288);
  half* const B_s = (half*)smem;
  int ring0_filled = 0;
  int ring0_read = 0;
  // test_ir.py:27  C_l = T.alloc_fragment((64, 64), "float32")
  float C_l[32];
  // test_ir.py:28  T.clear(C_l)
  #pragma unroll
  for (int u0 = 0; u0 < 2; ++u0) {
    #pragma unroll
    for (int u1 = 0; u1 < 4; ++u1) {
      #pragma unroll
      for (int u2 = 0; u2 < 2; ++u2) {
        #pragma unroll
        for (int u3 = 0; u3 < 2; ++u3) {
          C_l[u0 * 16 + u1 * 4 + u2 * 2 + u3] = 0.0f;
        }
      }
    }
  }
  // test_ir.py:29  for k in T.Pipelined(3, num_stages=3):
  const int rounds = 3;
  for (int k = 0; k < 2; ++k) {
    // test_ir.py:30  T.copy(A[by * 64, k * 32], A_s)
    #pragma unroll
    for (int u = 0; u < 2; ++u) {
      const int chunk = u * 128 + tid;
      ts::cp_async<16>(&A_s[ring0_filled % 3 * 2048 + (chunk >> 2) * 32 + ((chunk & 3) * 8 ^ ((chunk & 31) >> 3) * 8)], &A[int64_t(by) * 6144 + (int64_t(chunk) >> 2) * 96 + int64_t(k) * 32 + (int64_t(chunk) & 3) * 8], by * 64 + (chunk >> 2) < m ? 16 : 0);
    }
    // test_ir.py:31  T.copy(B[k * 32, bx * 64], B_s)
    #pragma unroll
    for (int u = 0; u < 2; ++u) {
      const int chunk = u * 128 + tid;
      ts::cp_async<16>(&B_s[ring0_filled % 3 * 2048 + (chunk >> 3) * 64 + ((chunk & 7) * 8 ^ ((chunk & 63) >> 3) * 8)], &B[k * 4096 + (chunk >> 3) * 128 + bx * 64 + (chunk & 7) * 8]);
    }
    // test_ir.py:29  for k in T.Pipelined(3, num_stages=3):
    ts::cp_async_commit();
    ring0_filled = ring0_filled + 1;
  }
  for (int k = 0; k < 3; ++k) {
    if (ring0_filled - ring0_read > 1) {
      ts::cp_async_wait<1>();
    } else {
      ts::cp_async_wait<0>();
    }
    __syncthreads();  // ring 0: this round's stage has arrived, the one before has been read
    if (k + 2 < rounds) {
      // test_ir.py:30  T.copy(A[by * 64, k * 32], A_s)
      #pragma unroll
      for (int u = 0; u < 2; ++u) {
        const int chunk = u * 128 + tid;
        ts::cp_async<16>(&A_s[ring0_filled % 3 * 2048 + (chunk >> 2) * 32 + ((chunk & 3) * 8 ^ ((chunk & 31) >> 3) * 8)], &A[int64_t(by) * 6144 + (int64_t(chunk) >> 2) * 96 + int64_t(k) * 32 + (int64_t(chunk) & 3) * 8 + 64], by * 64 + (chunk >> 2) < m ? 16 : 0);
      }
      // test_ir.py:31  T.copy(B[k * 32, bx * 64], B_s)
      #pragma unroll
      for (int u = 0; u < 2; ++u) {
        const int chunk = u * 128 + tid;
        ts::cp_async<16>(&B_s[ring0_filled % 3 * 2048 + (chunk >> 3) * 64 + ((chunk & 7) * 8 ^ ((chunk & 63) >> 3) * 8)], &B[k * 4096 + (chunk >> 3) * 128 + bx * 64 + (chunk & 7) * 8 + 8192]);
      }
      // test_ir.py:29  for k in T.Pipelined(3, num_stages=3):
      ts::cp_async_commit();
      ring0_filled = ring0_filled + 1;
    }
    const int lane = tid & 31;
    const int row0 = ((tid & 63) >> 5) * 32;
    const int col0 = (tid >> 6) * 32;
    // test_ir.py:32  T.gemm(A_s, B_s, C_l)
    for (int k_1 = 0; k_1 < 2; ++k_1) {
      half a[16];
      #pragma unroll
      for (int t = 0; t < 2; ++t) {
        ts::ldmatrix_x4(&a[t * 8], &A_s[ring0_read % 3 * 2048 + t * 512 + row0 * 32 + (lane & 15) * 32 + ((k_1 * 16 + (lane >> 4) * 8) ^ (((row0 + (lane & 15)) & 7) >> 1) * 8)]);
      }
      half b[16];
      #pragma unroll
      for (int t = 0; t < 2; ++t) {
        ts::ldmatrix_x4_trans(&b[t * 8], &B_s[ring0_read % 3 * 2048 + k_1 * 1024 + (lane & 15) * 64 + ((t * 16 + (lane >> 4) * 8 + col0) ^ (lane & 7) * 8)]);
      }
      #pragma unroll
      for (int i = 0; i < 2; ++i) {
        #pragma unroll
        for (int j = 0; j < 4; ++j) {
          ts::mma_m16n8k16_f16(&C_l[i * 16 + j * 4], &a[i * 8], &b[j * 4]);
        }
      }
    }
    // test_ir.py:29  for k in T.Pipelined(3, num_stages=3):
    ring0_read = ring0_read + 1;
  }
  // test_ir.py:33  for i, j in T.Parallel(64, 64):
  #pragma unroll
  for (int u0 = 0; u0 < 2; ++u0) {
    #pragma unroll
    for (int u1 = 0; u1 < 4; ++u1) {
      #pragma unroll
      for (int u2 = 0; u2 < 2; ++u2) {
        #pragma unroll
        for (int u3 = 0; u3 < 2; ++u3) {
          // test_ir.py:34  C_l[i, j] = T.max(C_l[i, j], 0)
          C_l[u0 * 16 + u1 * 4 + u2 * 2 + u3] = ts::max(C_l[u0 * 16 + u1 * 4 + u2 * 2 + u3], 0.0f);
        }
      }
    }
  }
  const int i0 = ((tid & 63) >> 5) * 32 + ((tid & 31) >> 2);
  const int j0 = (tid >> 6) * 32 + (tid & 3) * 2;
  // test_ir.py:35  T.copy(C_l, C[by * 64, bx * 64])
  #pragma unroll
  for (int u0 = 0; u0 < 2; ++u0) {
    #pragma unroll
    for (int u1 = 0; u1 < 4; ++u1) {
      #pragma unroll
      for (int u2 = 0; u2 < 2; ++u2) {
        const int i = u0 * 16 + u2 * 8 + i0;
        const int j = u1 * 8 + j0;
        alignas(4) half C_out[2];
        #pragma unroll
        for (int u = 0; u < 2; ++u) {
          C_out[u] = half(C_l[u0 * 16 + u1 * 4 + u2 * 2 + u]);
        }
        if (by * 64 + i < m) {
          *(uint32_t*)&C[int64_t(by) * 8192 + int64_t(i) * 128 + int64_t(bx) * 64 + j] = *(const uint32_t*)&C_out[0];
        }
      }
    }
  }
}
