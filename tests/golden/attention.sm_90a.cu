extern "C" __global__ void __launch_bounds__(160, 3) main_kernel(
    const __grid_constant__ ts::TensorMap Q_map,
    const __grid_constant__ ts::TensorMap K_map,
    const __grid_constant__ ts::TensorMap V_map,
    const __grid_constant__ ts::TensorMap O_map) {
  const int tid = threadIdx.x;
  extern __shared__ __align__(1024) uint8_t smem[];  // 49232 bytes
  if (tid == 0) {
    ts::prefetch_map(Q_map);
    ts::prefetch_map(K_map);
    ts::prefetch_map(V_map);
    ts::prefetch_map(O_map);
  }
  half* const q = (half*)(smem + 32768);
  half* const k = (half*)smem;
  half* const v = (half*)(smem + 16384);
  uint64_t* const full0 = (uint64_t*)(smem + 49152);
  uint64_t* const empty0 = (uint64_t*)(smem + 49168);
  uint64_t* const full1 = (uint64_t*)(smem + 49184);
  uint64_t* const empty1 = (uint64_t*)(smem + 49200);
  uint64_t* const full2 = (uint64_t*)(smem + 49216);
  uint64_t* const empty2 = (uint64_t*)(smem + 49224);
  half* const O_staged = (half*)(smem + 40960);
  int ring0_filled = 0;
  int ring0_read = 0;
  int ring1_filled = 0;
  int ring1_read = 0;
  int ring2_filled = 0;
  int ring2_read = 0;
  if (tid == 0) {
    #pragma unroll
    for (int s = 0; s < 2; ++s) {
      ts::mbarrier_init(&full0[s], 1);
      ts::mbarrier_init(&empty0[s], 4);
    }
    #pragma unroll
    for (int s = 0; s < 2; ++s) {
      ts::mbarrier_init(&full1[s], 1);
      ts::mbarrier_init(&empty1[s], 4);
    }
    #pragma unroll
    for (int s = 0; s < 1; ++s) {
      ts::mbarrier_init(&full2[s], 1);
      ts::mbarrier_init(&empty2[s], 4);
    }
    ts::fence_mbarrier_init();
  }
  __syncthreads();
  if (tid >= 128) {
    if (tid == 128) {
      ts::mbarrier_wait(&empty2[0], (ring2_filled & 1) ^ 1);
      ts::mbarrier_expect(&full2[0], 8192);
      ts::tma_load(&q[0], Q_map, &full2[0], 0, 0);
      ring2_filled = ring2_filled + 1;
      #pragma unroll 1
      for (int t = 0; t < 5; ++t) {
        ts::mbarrier_wait(&empty0[ring0_filled & 1], ((ring0_filled >> 1) & 1) ^ 1);
        ts::mbarrier_expect(&full0[ring0_filled & 1], 8192);
        ts::tma_load(&k[(ring0_filled & 1) * 4096], K_map, &full0[ring0_filled & 1], 0, t * 64);
        ring0_filled = ring0_filled + 1;
        ts::mbarrier_wait(&empty1[ring1_filled & 1], ((ring1_filled >> 1) & 1) ^ 1);
        ts::mbarrier_expect(&full1[ring1_filled & 1], 8192);
        ts::tma_load(&v[(ring1_filled & 1) * 4096], V_map, &full1[ring1_filled & 1], 0, t * 64);
        ring1_filled = ring1_filled + 1;
      }
    }
  } else {
    float s[32];
    half p[32];
    float o[32];
    float top[2];
    float before[2];
    float total[2];
    #pragma unroll
    for (int u0 = 0; u0 < 8; ++u0) {
      #pragma unroll
      for (int u1 = 0; u1 < 2; ++u1) {
        #pragma unroll
        for (int u2 = 0; u2 < 2; ++u2) {
          o[u0 * 4 + u1 * 2 + u2] = 0.0f;
        }
      }
    }
    #pragma unroll
    for (int u = 0; u < 2; ++u) {
      total[u] = 0.0f;
    }
    #pragma unroll
    for (int u = 0; u < 2; ++u) {
      top[u] = __int_as_float(0xff800000);
    }
    ts::mbarrier_wait(&full2[0], ring2_read & 1);
    if (true) {
      ts::mbarrier_wait(&full0[ring0_read & 1], (ring0_read >> 1) & 1);
      const uint64_t a_desc = ts::matrix_descriptor<128>(&q[0], 16);
      const uint64_t b_desc = ts::matrix_descriptor<128>(&k[(ring0_read & 1) * 4096], 16);
      ts::wgmma_fence();
      ts::wgmma_m64n64k16_f16_00(&s[0], a_desc, b_desc, 0);
      ts::wgmma_m64n64k16_f16_00(&s[0], a_desc + 2UL, b_desc + 2UL, 1);
      ts::wgmma_m64n64k16_f16_00(&s[0], a_desc + 4UL, b_desc + 4UL, 1);
      ts::wgmma_m64n64k16_f16_00(&s[0], a_desc + 6UL, b_desc + 6UL, 1);
      ts::wgmma_commit();
      #pragma unroll
      for (int u = 0; u < 2; ++u) {
        before[u] = top[u];
      }
      ts::wgmma_behind(&before[1], &smem[0]);
      ts::wgmma_behind(&before[0], &smem[0]);
      ts::wgmma_wait<0>();
      ts::wgmma_arrived<32>(s);
      ts::mbarrier_arrive_warp(&empty0[ring0_read & 1], true);
      ring0_read = ring0_read + 1;
      #pragma unroll
      for (int u0 = 0; u0 < 2; ++u0) {
        float total_1[4];
        #pragma unroll
        for (int r = 0; r < 4; ++r) {
          total_1[r] = s[(r >> 1) * 4 + u0 * 2 + (r & 1)];
        }
        #pragma unroll
        for (int r = 0; r < 12; ++r) {
          total_1[r & 3] = fmaxf(total_1[r & 3], s[(r >> 1) * 4 + u0 * 2 + (r & 1) + 8]);
        }
        total_1[0] = fmaxf(total_1[0], total_1[2]);
        total_1[1] = fmaxf(total_1[1], total_1[3]);
        total_1[0] = fmaxf(total_1[0], total_1[1]);
        total_1[0] = fmaxf(total_1[0], __int_as_float(0xff800000));
        total_1[0] = fmaxf(total_1[0], ts::shuffle_xor(total_1[0], 1));
        total_1[0] = fmaxf(total_1[0], ts::shuffle_xor(total_1[0], 2));
        top[u0] = fmaxf(top[u0], total_1[0]);
      }
      #pragma unroll
      for (int u0 = 0; u0 < 8; ++u0) {
        #pragma unroll
        for (int u1 = 0; u1 < 2; ++u1) {
          #pragma unroll
          for (int u2 = 0; u2 < 2; ++u2) {
            s[u0 * 4 + u1 * 2 + u2] = expf(s[u0 * 4 + u1 * 2 + u2] - top[u1]);
          }
        }
      }
      #pragma unroll
      for (int u = 0; u < 2; ++u) {
        before[u] = expf(before[u] - top[u]);
        total[u] = total[u] * before[u];
      }
      #pragma unroll
      for (int u0 = 0; u0 < 2; ++u0) {
        float total_1 = 0.0f;
        #pragma unroll
        for (int r0 = 0; r0 < 8; ++r0) {
          #pragma unroll
          for (int r1 = 0; r1 < 2; ++r1) {
            total_1 = total_1 + s[r0 * 4 + u0 * 2 + r1];
          }
        }
        total[u0] = total[u0] + total_1;
      }
      #pragma unroll
      for (int u0 = 0; u0 < 8; ++u0) {
        #pragma unroll
        for (int u1 = 0; u1 < 2; ++u1) {
          #pragma unroll
          for (int u2 = 0; u2 < 2; ++u2) {
            o[u0 * 4 + u1 * 2 + u2] = o[u0 * 4 + u1 * 2 + u2] * before[u1];
          }
        }
      }
      #pragma unroll
      for (int u0 = 0; u0 < 8; ++u0) {
        #pragma unroll
        for (int u1 = 0; u1 < 2; ++u1) {
          #pragma unroll
          for (int u2 = 0; u2 < 2; ++u2) {
            p[u0 * 4 + u1 * 2 + u2] = half(s[u0 * 4 + u1 * 2 + u2]);
          }
        }
      }
      for (int t = 0; t < 4; ++t) {
        ts::mbarrier_wait(&full0[ring0_read & 1], (ring0_read >> 1) & 1);
        const uint64_t a_desc_1 = ts::matrix_descriptor<128>(&q[0], 16);
        const uint64_t b_desc_1 = ts::matrix_descriptor<128>(&k[(ring0_read & 1) * 4096], 16);
        ts::wgmma_fence();
        ts::wgmma_m64n64k16_f16_00(&s[0], a_desc_1, b_desc_1, 0);
        ts::wgmma_m64n64k16_f16_00(&s[0], a_desc_1 + 2UL, b_desc_1 + 2UL, 1);
        ts::wgmma_m64n64k16_f16_00(&s[0], a_desc_1 + 4UL, b_desc_1 + 4UL, 1);
        ts::wgmma_m64n64k16_f16_00(&s[0], a_desc_1 + 6UL, b_desc_1 + 6UL, 1);
        ts::wgmma_commit();
        ts::mbarrier_wait(&full1[ring1_read & 1], (ring1_read >> 1) & 1);
        const uint64_t b_desc_2 = ts::matrix_descriptor<128>(&v[(ring1_read & 1) * 4096], 8192);
        ts::wgmma_fence();
        ts::wgmma_m64n64k16_f16_r1(&o[0], &p[0], b_desc_2, 1);
        ts::wgmma_m64n64k16_f16_r1(&o[0], &p[8], b_desc_2 + 128UL, 1);
        ts::wgmma_m64n64k16_f16_r1(&o[0], &p[16], b_desc_2 + 256UL, 1);
        ts::wgmma_m64n64k16_f16_r1(&o[0], &p[24], b_desc_2 + 384UL, 1);
        ts::wgmma_commit();
        #pragma unroll
        for (int u = 0; u < 2; ++u) {
          before[u] = top[u];
        }
        ts::wgmma_wait<1>();
        ts::wgmma_arrived<32>(s);
        ts::mbarrier_arrive_warp(&empty0[ring0_read & 1], true);
        ring0_read = ring0_read + 1;
        #pragma unroll
        for (int u0 = 0; u0 < 2; ++u0) {
          float total_1[4];
          #pragma unroll
          for (int r = 0; r < 4; ++r) {
            total_1[r] = s[(r >> 1) * 4 + u0 * 2 + (r & 1)];
          }
          #pragma unroll
          for (int r = 0; r < 12; ++r) {
            total_1[r & 3] = fmaxf(total_1[r & 3], s[(r >> 1) * 4 + u0 * 2 + (r & 1) + 8]);
          }
          total_1[0] = fmaxf(total_1[0], total_1[2]);
          total_1[1] = fmaxf(total_1[1], total_1[3]);
          total_1[0] = fmaxf(total_1[0], total_1[1]);
          total_1[0] = fmaxf(total_1[0], __int_as_float(0xff800000));
          total_1[0] = fmaxf(total_1[0], ts::shuffle_xor(total_1[0], 1));
          total_1[0] = fmaxf(total_1[0], ts::shuffle_xor(total_1[0], 2));
          top[u0] = fmaxf(top[u0], total_1[0]);
        }
        #pragma unroll
        for (int u0 = 0; u0 < 8; ++u0) {
          #pragma unroll
          for (int u1 = 0; u1 < 2; ++u1) {
            #pragma unroll
            for (int u2 = 0; u2 < 2; ++u2) {
              s[u0 * 4 + u1 * 2 + u2] = expf(s[u0 * 4 + u1 * 2 + u2] - top[u1]);
            }
          }
        }
        #pragma unroll
        for (int u = 0; u < 2; ++u) {
          before[u] = expf(before[u] - top[u]);
          total[u] = total[u] * before[u];
        }
        #pragma unroll
        for (int u0 = 0; u0 < 2; ++u0) {
          float total_1 = 0.0f;
          #pragma unroll
          for (int r0 = 0; r0 < 8; ++r0) {
            #pragma unroll
            for (int r1 = 0; r1 < 2; ++r1) {
              total_1 = total_1 + s[r0 * 4 + u0 * 2 + r1];
            }
          }
          total[u0] = total[u0] + total_1;
        }
        ts::wgmma_behind(&s[31], &smem[0]);
        ts::wgmma_behind(&s[30], &smem[0]);
        ts::wgmma_behind(&s[29], &smem[0]);
        ts::wgmma_behind(&s[28], &smem[0]);
        ts::wgmma_wait<0, false>();
        ts::wgmma_arrived<32>(o);
        ts::wgmma_arrived<32>(p);
        ts::mbarrier_arrive_warp(&empty1[ring1_read & 1], true);
        ring1_read = ring1_read + 1;
        #pragma unroll
        for (int u0 = 0; u0 < 8; ++u0) {
          #pragma unroll
          for (int u1 = 0; u1 < 2; ++u1) {
            #pragma unroll
            for (int u2 = 0; u2 < 2; ++u2) {
              o[u0 * 4 + u1 * 2 + u2] = o[u0 * 4 + u1 * 2 + u2] * before[u1];
            }
          }
        }
        #pragma unroll
        for (int u0 = 0; u0 < 8; ++u0) {
          #pragma unroll
          for (int u1 = 0; u1 < 2; ++u1) {
            #pragma unroll
            for (int u2 = 0; u2 < 2; ++u2) {
              p[u0 * 4 + u1 * 2 + u2] = half(s[u0 * 4 + u1 * 2 + u2]);
            }
          }
        }
      }
      ts::mbarrier_wait(&full1[ring1_read & 1], (ring1_read >> 1) & 1);
      const uint64_t b_desc_1 = ts::matrix_descriptor<128>(&v[(ring1_read & 1) * 4096], 8192);
      ts::wgmma_fence();
      ts::wgmma_m64n64k16_f16_r1(&o[0], &p[0], b_desc_1, 1);
      ts::wgmma_m64n64k16_f16_r1(&o[0], &p[8], b_desc_1 + 128UL, 1);
      ts::wgmma_m64n64k16_f16_r1(&o[0], &p[16], b_desc_1 + 256UL, 1);
      ts::wgmma_m64n64k16_f16_r1(&o[0], &p[24], b_desc_1 + 384UL, 1);
      ts::wgmma_commit();
      ts::wgmma_wait<0>();
      ts::wgmma_arrived<32>(o);
      ts::wgmma_arrived<32>(p);
      ts::mbarrier_arrive_warp(&empty1[ring1_read & 1], true);
      ring1_read = ring1_read + 1;
    }
    ts::mbarrier_arrive_warp(&empty2[0], true);
    ring2_read = ring2_read + 1;
    #pragma unroll
    for (int u = 0; u < 2; ++u) {
      total[u] = total[u] + ts::shuffle_xor(total[u], 1);
      total[u] = total[u] + ts::shuffle_xor(total[u], 2);
    }
    #pragma unroll
    for (int u0 = 0; u0 < 8; ++u0) {
      #pragma unroll
      for (int u1 = 0; u1 < 2; ++u1) {
        #pragma unroll
        for (int u2 = 0; u2 < 2; ++u2) {
          o[u0 * 4 + u1 * 2 + u2] = o[u0 * 4 + u1 * 2 + u2] / total[u1];
        }
      }
    }
    if (tid == 0) {
      ts::bulk_wait_read<0>();
    }
    ts::barrier_sync(15, 128);  // T.copy writes O_staged that T.await_stores, line 116 reads
    const int lane = tid & 31;
    const int i_row = (tid >> 5) * 16 + (lane & 7);
    #pragma unroll
    for (int u0 = 0; u0 < 4; ++u0) {
      half O_staged_out[8];
      #pragma unroll
      for (int m0 = 0; m0 < 2; ++m0) {
        #pragma unroll
        for (int m1 = 0; m1 < 2; ++m1) {
          #pragma unroll
          for (int u = 0; u < 2; ++u) {
            O_staged_out[m0 * 4 + m1 * 2 + u] = half(o[u0 * 8 + m0 * 4 + m1 * 2 + u]);
          }
        }
      }
      const int i = ((lane & 15) >> 3) * 8 + i_row;
      const int j = u0 * 16 + (lane >> 4) * 8;
      ts::stmatrix_x4(&O_staged[i * 64 + (j ^ (i & 7) * 8)], &O_staged_out[0]);
    }
    ts::fence_proxy_async();
    ts::barrier_sync(15, 128);  // T.copy reads O_staged that T.copy, line 116 writes
    if (tid == 0) {
      ts::tma_store(O_map, &O_staged[0], 0, 0);
      ts::bulk_commit();
    }
    if (tid == 0) {
      ts::bulk_wait_read<0>();
    }
  }
}
