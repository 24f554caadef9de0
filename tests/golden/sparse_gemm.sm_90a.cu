extern "C" __global__ void __launch_bounds__(160, 2) sparse_gemm(
    const __grid_constant__ ts::TensorMap A_map,
    const __grid_constant__ ts::TensorMap E_map,
    const __grid_constant__ ts::TensorMap B_map,
    const __grid_constant__ ts::TensorMap C_map) {
  const int tid = threadIdx.x;
  const int bx = blockIdx.x;
  const int by = blockIdx.y;
  extern __shared__ __align__(1024) uint8_t smem[];  // 86048 bytes
  if (tid == 0) {
    ts::prefetch_map(A_map);
    ts::prefetch_map(E_map);
    ts::prefetch_map(B_map);
    ts::prefetch_map(C_map);
  }
  half* const a = (half*)smem;
  int16_t* const e = (int16_t*)(smem + 81920);
  half* const b = (half*)(smem + 32768);
  uint64_t* const full0 = (uint64_t*)(smem + 86016);
  uint64_t* const empty0 = (uint64_t*)(smem + 86032);
  half* const C_staged = (half*)(smem + 65536);
  uint16_t* const e_bits = (uint16_t*)(smem + 81920);
  uint32_t places[4];
  #pragma unroll
  for (int u = 0; u < 4; ++u) {
    places[u] = 0u;
  }
  int ring0_filled = 0;
  int ring0_read = 0;
  if (tid == 0) {
    #pragma unroll
    for (int s = 0; s < 2; ++s) {
      ts::mbarrier_init(&full0[s], 1);
      ts::mbarrier_init(&empty0[s], 4);
    }
    ts::fence_mbarrier_init();
  }
  __syncthreads();
  if (tid >= 128) {
    if (tid == 128) {
      #pragma unroll 1
      for (int k = 0; k < 2; ++k) {
        ts::mbarrier_wait(&empty0[ring0_filled & 1], ((ring0_filled >> 1) & 1) ^ 1);
        ts::mbarrier_expect(&full0[ring0_filled & 1], 34816);
        ts::tma_load(&a[(ring0_filled & 1) * 8192], A_map, &full0[ring0_filled & 1], k * 64, by * 128);
        ts::tma_load(&e[(ring0_filled & 1) * 1024], E_map, &full0[ring0_filled & 1], k * 8, by * 128);
        ts::tma_load(&b[(ring0_filled & 1) * 8192], B_map, &full0[ring0_filled & 1], k * 128, bx * 64);
        ts::tma_load(&b[(ring0_filled & 1) * 8192 + 4096], B_map, &full0[ring0_filled & 1], k * 128 + 64, bx * 64);
        ring0_filled = ring0_filled + 1;
      }
    }
  } else {
    float acc[64];
    #pragma unroll
    for (int u0 = 0; u0 < 2; ++u0) {
      #pragma unroll
      for (int u1 = 0; u1 < 8; ++u1) {
        #pragma unroll
        for (int u2 = 0; u2 < 2; ++u2) {
          #pragma unroll
          for (int u3 = 0; u3 < 2; ++u3) {
            acc[u0 * 32 + u1 * 4 + u2 * 2 + u3] = 0.0f;
          }
        }
      }
    }
    for (int k = 0; k < 2; ++k) {
      ts::mbarrier_wait(&full0[ring0_read & 1], (ring0_read >> 1) & 1);
      const uint64_t a_desc = ts::matrix_descriptor<128>(&a[(ring0_read & 1) * 8192], 16);
      const uint64_t b_desc = ts::matrix_descriptor<128>(&b[(ring0_read & 1) * 8192], 16);
      const int row = ((tid & 127) >> 5) * 16 + ((tid & 31) >> 2);
      #pragma unroll
      for (int i = 0; i < 2; ++i) {
        #pragma unroll
        for (int j = 0; j < 2; ++j) {
          places[i * 2 + j] = uint32_t(e_bits[(ring0_read & 1) * 1024 + i * 512 + row * 8 + j * 4 + (tid & 3)]) | (uint32_t(e_bits[(ring0_read & 1) * 1024 + i * 512 + row * 8 + j * 4 + (tid & 3) + 64]) << 16u);
        }
      }
      ts::wgmma_fence();
      ts::wgmma_sp_m64n64k32_f16_00_s0(&acc[0], a_desc, b_desc, &places[0], 1);
      ts::wgmma_sp_m64n64k32_f16_00_s0(&acc[32], a_desc + 512UL, b_desc, &places[2], 1);
      ts::wgmma_sp_m64n64k32_f16_00_s1(&acc[0], a_desc + 2UL, b_desc + 4UL, &places[0], 1);
      ts::wgmma_sp_m64n64k32_f16_00_s1(&acc[32], a_desc + 514UL, b_desc + 4UL, &places[2], 1);
      ts::wgmma_sp_m64n64k32_f16_00_s0(&acc[0], a_desc + 4UL, b_desc + 512UL, &places[1], 1);
      ts::wgmma_sp_m64n64k32_f16_00_s0(&acc[32], a_desc + 516UL, b_desc + 512UL, &places[3], 1);
      ts::wgmma_sp_m64n64k32_f16_00_s1(&acc[0], a_desc + 6UL, b_desc + 516UL, &places[1], 1);
      ts::wgmma_sp_m64n64k32_f16_00_s1(&acc[32], a_desc + 518UL, b_desc + 516UL, &places[3], 1);
      ts::wgmma_commit();
      ts::wgmma_wait<0>();
      ts::wgmma_arrived<64>(acc);
      ts::wgmma_read<4>(places, &smem[0]);
      ts::fence_proxy_async();
      ts::mbarrier_arrive_warp(&empty0[ring0_read & 1], true);
      ring0_read = ring0_read + 1;
    }
    if (tid == 0) {
      ts::bulk_wait_read<0>();
    }
    ts::barrier_sync(15, 128);  // T.copy writes C_staged that T.await_stores, line 28 reads
    const int lane = tid & 31;
    const int i_row = (tid >> 5) * 16 + (lane & 7);
    #pragma unroll
    for (int u0 = 0; u0 < 2; ++u0) {
      #pragma unroll
      for (int u1 = 0; u1 < 4; ++u1) {
        half C_staged_out[8];
        #pragma unroll
        for (int m1 = 0; m1 < 2; ++m1) {
          #pragma unroll
          for (int m2 = 0; m2 < 2; ++m2) {
            #pragma unroll
            for (int u = 0; u < 2; ++u) {
              C_staged_out[m1 * 4 + m2 * 2 + u] = half(acc[u0 * 32 + u1 * 8 + m1 * 4 + m2 * 2 + u]);
            }
          }
        }
        const int i = u0 * 64 + ((lane & 15) >> 3) * 8 + i_row;
        const int j = u1 * 16 + (lane >> 4) * 8;
        ts::stmatrix_x4(&C_staged[i * 64 + (j ^ (i & 7) * 8)], &C_staged_out[0]);
      }
    }
    ts::fence_proxy_async();
    ts::barrier_sync(15, 128);  // T.copy reads C_staged that T.copy, line 28 writes
    if (tid == 0) {
      ts::tma_store(C_map, &C_staged[0], bx * 64, by * 128);
      ts::bulk_commit();
    }
    if (tid == 0) {
      ts::bulk_wait_read<0>();
    }
  }
}
