"""seed 3045"""

import tilescale.language as T


@T.prim_func
def main(
        A0: T.Tensor((17, 8), "bfloat16"),
        A1: T.Tensor((4, 17), "bfloat16"),
        O0: T.Tensor((1, 12), "int32"),
        O1: T.Tensor((1, 6, 3), "bfloat16"),
        O2: T.Tensor((1, 24, 4), "bfloat16"),
        O3: T.Tensor((1, 10, 17), "bfloat16"),
        O4: T.Tensor((1, 51, 8), "bfloat16"),
):
    with T.Kernel(3, 1, threads=64) as (bx, by):
        t0 = T.alloc_fragment((17, 8), "bfloat16")
        T.copy(A0, t0)
        t1 = T.alloc_shared((4, 17), "bfloat16")
        T.copy(A1, t1)
        t2 = T.alloc_fragment((8, 4), "bfloat16")
        T.gemm(t0, t1, t2, transpose_A=True, transpose_B=True, clear_accum=True)
        t3 = T.alloc_shared((2, 4), "float16")
        with T.Scale("warp") as (w0, n0):
            for i0 in T.Parallel(4):
                t3[w0, i0] = T.if_then_else((not ((T.cast(i0, "uint8") < T.cast(w0, "uint8")) or (T.cast(-9, "int32") < T.cast(w0, "int32")))), T.if_then_else(((T.cast(bx, "int32") > T.cast(w0, "int32")) or (T.cast(i0, "int32") == T.cast(by, "int32"))), T.cast(w0, "float16"), T.cast(by, "float16")), T.min(T.cast(i0, "float16"), T.max(T.cast(bx, "float16"), T.cast(by, "float16"))))
        T.fill(t2, (t2[bx, 0] * t1[by >> 1, bx]))
        v0 = T.alloc_var("int32", (T.cast(bx, "int32") << 3))
        if (by < 1):
            v0 = 1
        t4 = T.alloc_fragment((4,), "int32")
        T.fill(t4, v0)
        for i1, i2 in T.Parallel(17, 8):
            x0 = ((T.cast(bx, "int16") - T.cast(bx, "int16")) % T.max(T.cast(i1, "int16"), T.cast(1, "int16")))
            if (t4[by] == t4[(bx * 3 + i1 + 7) % 4]):
                t0[i1, i2] = T.if_then_else(((i2 % 2 == 0) or (not (i1 % 2 == 0))), T.if_then_else(((bx % 2 == 0) and (i1 % 2 == 0)), T.min(T.cast(i2, "bfloat16"), t2[T.max(T.min(bx - 5, 7), 0), T.max(T.min(by - 2, 3), 0)]), (T.cast(by, "bfloat16") + T.cast(i2, "bfloat16"))), T.log1p(T.cast(T.cast(i2, "uint32"), "bfloat16")))
            else:
                t0[i1, i2] = (T.cast((T.cast(i2, "int16") >> 2), "bfloat16") * (T.cast(T.cast(i2, "uint32"), "bfloat16") - (t2[T.abs(by - 5) % 8, 3 - by] + t1[(i2 - 5 * by - 5) % 4, i2])))
        T.copy(t4, O0[by, bx * 4])
        for i3, i4 in T.grid(2, 4):
            O1[by, bx * 2 + i3, i4] = t3[i3, i4]
        T.copy(t2, O2[by, bx * 8, 0])
        for i5, i6 in T.Parallel(4, 17):
            O3[by, bx * 4 + i5, i6] = t1[i5, i6]
        T.copy(t0, O4[by, bx * 17, 0])
