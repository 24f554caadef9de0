"""seed 3055"""

import tilescale.language as T


@T.prim_func
def main(
        A0: T.Tensor((1, 2), "float16"),
        A1: T.Tensor((4, 17), "bool"),
        A2: T.Tensor((3, 5), "float8_e5m2"),
        A3: T.Tensor((8, 1), "float32"),
        A4: T.Tensor((1, 1), "float32"),
        O0: T.Tensor((1, 3, 1, 16), "uint16"),
        O1: T.Tensor((1, 3, 1, 4), "float16"),
        n_k0: T.int32,
):
    with T.Kernel(1, 3, 1, threads=64) as (bx, by, bz):
        t0 = T.alloc_shared((1, 5), "float16")
        T.copy(A0[bz * 1, 0], t0)
        for i0, i1 in T.Parallel(1, 5):
            x0 = (-T.cast(by, "uint64"))
            if (T.cast(i0, "float32") >= T.cast(bx, "float32")):
                t0[i0, i1] = (((-T.cast(i1, "float16")) * T.cast(bz, "float16")) - T.cast(T.if_then_else((T.cast(by, "int32") < T.cast(i1, "int32")), T.cast(i0, "uint16"), T.cast(i0, "uint16")), "float16"))
        t1 = T.alloc_fragment((2, 17), "uint16")
        for i2, i3 in T.Parallel(2, 17):
            x1 = ((T.cast(i3, "uint16") - T.cast(i2, "uint16")) - T.abs(T.cast(i3, "uint16")))
            if (T.cast(i2, "int32") != T.cast(i2, "int32")):
                t1[i2, i3] = T.if_then_else((((t0[bx, (bx ^ 1) % 5] >= t0[0, 1]) or (T.cast(bz, "float32") == T.cast(bz, "float32"))) and (i3 % 2 == 0)), T.truncdiv(T.if_then_else((T.cast(bx, "int32") > T.cast(by, "int32")), T.cast(bz, "uint16"), T.cast(bx, "uint16")), T.max(T.truncdiv(x1, 4), T.cast(1, "uint16"))), (T.abs(x1) >> 0))
            else:
                t1[i2, i3] = (T.cast(i2, "uint16") << 1)
        for i4, i5 in T.Parallel(1, 5):
            if (not (i5 < 0)):
                t0[i4, i5] = T.cast(0.75, "float16")
            else:
                t0[i4, i5] = T.min(T.cast((T.cast(i5, "bfloat16") * T.cast(bz, "bfloat16")), "float16"), T.if_then_else((T.cast(i4, "int32") < T.cast(-2, "int32")), T.ieee_sqrt(T.cast(i5, "float16")), (T.cast(i5, "float16") * T.cast(by, "float16"))))
        for i7, i6 in T.Parallel(5, 1):
            t0[i6, i7] = ((-T.if_then_else((bx % 2 == 0), T.cast(i6, "float16"), T.cast(bx, "float16"))) * T.max(T.ieee_sqrt(T.cast(i7, "float16")), T.ieee_sqrt(T.cast(i7, "float16"))))
        if T.isnan(t0[0, by // 2]):
            t2 = T.view(t1, (68, 1), "uint8")
            t3 = T.alloc_shared((17,), "int64")
            T.reduce_bitxor(t1, t3, dim=0)
        t4 = T.alloc_shared((2, 17), "uint16")
        T.cummax(t1, t4, dim=1)
        if (T.cast(-0.75, "float32") <= T.cast(bx, "float32")):
            t5 = T.alloc_shared((2, 17), "int16")
            T.copy(t4, t5)
            T.copy(t5, t4)
        for k0 in T.serial(n_k0):
            t6 = T.alloc_fragment((8, 1), "float32")
            T.copy(A3, t6)
            t7 = T.alloc_shared((1, 1), "float32")
            T.copy(A4, t7)
            t8 = T.alloc_shared((8, 1), "float32")
            T.gemm(t6, t7, t8, transpose_B=True, clear_accum=True, policy=T.GemmWarpPolicy.Square)
            t9 = T.reshape(t8, (2, 4))
            t10 = T.alloc_shared((1,), "float32")
            T.reduce_sum(t6, t10, dim=-2)
        for i8, i9 in T.Parallel(2, 17):
            O0[bz, by, bx * 2 + i8, i9] = t4[i8, i9]
        T.copy(t0, O1[bz, by, bx * 1, 0])

# InternalError: Check failed: (value >= 0) is false: cannot make uint from negative value -1
