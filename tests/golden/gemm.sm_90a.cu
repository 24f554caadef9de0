extern "C" __global__ void __launch_bounds__(160, 1) gemm(
    const __grid_constant__ ts::TensorMap A_map,
    const __grid_constant__ ts::TensorMap B_map,
    const __grid_constant__ ts::TensorMap C_map,
    int m) {
  const int tid = threadIdx.x;
  const int bx = blockIdx.x;
  const int by = blockIdx.y;
  extern __shared__ __align__(1024) uint8_t smem[];  // 32816 bytes
  if (tid == 0) {
    ts::prefetch_map(A_map);
    ts::prefetch_map(B_map);
    ts::prefetch_map(C_map);
  }
  half* const A_s = (half*)(smem + 20480);
  half* const B_s = (half*)smem;
  uint64_t* const full0 = (uint64_t*)(smem + 32768);
  uint64_t* const empty0 = (uint64_t*)(smem + 32792);
  half* const C_staged = (half*)(smem + 12288);
  int ring0_filled = 0;
  int ring0_read = 0;
  if (tid == 0) {
    #pragma unroll
    for (int s = 0; s < 3; ++s) {
      ts::mbarrier_init(&full0[s], 1);
      ts::mbarrier_init(&empty0[s], 4);
    }
    ts::fence_mbarrier_init();
  }
  __syncthreads();
  if (tid >= 128) {
    if (tid == 128) {
      #pragma unroll 1
      for (int k = 0; k < 3; ++k) {
        ts::mbarrier_wait(&empty0[ring0_filled % 3], (ring0_filled / 3 & 1) ^ 1);
        ts::mbarrier_expect(&full0[ring0_filled % 3], 8192);
        ts::tma_load(&A_s[ring0_filled % 3 * 2048], A_map, &full0[ring0_filled % 3], k * 32, by * 64);
        ts::tma_load(&B_s[ring0_filled % 3 * 2048], B_map, &full0[ring0_filled % 3], bx * 64, k * 32);
        ring0_filled = ring0_filled + 1;
      }
    }
  } else {
    float C_l[32];
    #pragma unroll
    for (int u0 = 0; u0 < 8; ++u0) {
      #pragma unroll
      for (int u1 = 0; u1 < 2; ++u1) {
        #pragma unroll
        for (int u2 = 0; u2 < 2; ++u2) {
          C_l[u0 * 4 + u1 * 2 + u2] = 0.0f;
        }
      }
    }
    for (int k = 0; k < 3; ++k) {
      ts::mbarrier_wait(&full0[ring0_read % 3], ring0_read / 3 & 1);
      const uint64_t a_desc = ts::matrix_descriptor<64>(&A_s[ring0_read % 3 * 2048], 16);
      const uint64_t b_desc = ts::matrix_descriptor<128>(&B_s[ring0_read % 3 * 2048], 4096);
      ts::wgmma_fence();
      ts::wgmma_m64n64k16_f16_01(&C_l[0], a_desc, b_desc, 1);
      ts::wgmma_m64n64k16_f16_01(&C_l[0], a_desc + 2UL, b_desc + 128UL, 1);
      ts::wgmma_commit();
      ts::wgmma_wait<0>();
      ts::wgmma_arrived<32>(C_l);
      ts::mbarrier_arrive_warp(&empty0[ring0_read % 3], true);
      ring0_read = ring0_read + 1;
    }
    #pragma unroll
    for (int u0 = 0; u0 < 8; ++u0) {
      #pragma unroll
      for (int u1 = 0; u1 < 2; ++u1) {
        #pragma unroll
        for (int u2 = 0; u2 < 2; ++u2) {
          C_l[u0 * 4 + u1 * 2 + u2] = ts::max(C_l[u0 * 4 + u1 * 2 + u2], 0.0f);
        }
      }
    }
    if (tid == 0) {
      ts::bulk_wait_read<0>();
    }
    ts::barrier_sync(15, 128);  // T.copy writes C_staged that T.await_stores, line 35 reads
    const int lane = tid & 31;
    const int i_row = (tid >> 5) * 16 + (lane & 7);
    #pragma unroll
    for (int u0 = 0; u0 < 4; ++u0) {
      half C_staged_out[8];
      #pragma unroll
      for (int m0 = 0; m0 < 2; ++m0) {
        #pragma unroll
        for (int m1 = 0; m1 < 2; ++m1) {
          #pragma unroll
          for (int u = 0; u < 2; ++u) {
            C_staged_out[m0 * 4 + m1 * 2 + u] = half(C_l[u0 * 8 + m0 * 4 + m1 * 2 + u]);
          }
        }
      }
      const int i = ((lane & 15) >> 3) * 8 + i_row;
      const int j = u0 * 16 + (lane >> 4) * 8;
      ts::stmatrix_x4(&C_staged[i * 64 + (j ^ (i & 7) * 8)], &C_staged_out[0]);
    }
    ts::fence_proxy_async();
    ts::barrier_sync(15, 128);  // T.copy reads C_staged that T.copy, line 35 writes
    if (tid == 0) {
      ts::tma_store(C_map, &C_staged[0], bx * 64, by * 64);
      ts::bulk_commit();
    }
    if (tid == 0) {
      ts::bulk_wait_read<0>();
    }
  }
}
