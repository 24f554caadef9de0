"""Hints for a product's tiles, by TileLang's names and from this compiler's cost model."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from types import FunctionType
from typing import Any, cast

from tilescale.carver.arch import Cuda
from tilescale.carver.roller.rasterization import NoRasterization, Rasterization2DColumn
from tilescale.errors import TileValueError
from tilescale.language.dtypes import canonical


@dataclass(frozen=True)
class Hint:
    """One way to cut a product.

    Attributes:
        block: rows and columns of a block's tile. warp: those of each warp. rstep: the depth of a round, as a
            list of one number. pipeline_stage: stages of the loop's ring.
        rasterization_plan: the class of the order of blocks. latency: the milliseconds that the cost model
            predicts.
    """

    block: list[int]
    warp: list[int]
    rstep: list[int]
    pipeline_stage: int
    rasterization_plan: type
    latency: float


class MatmulTemplate:
    """``C[M, N] = A[M, K] @ B[N, K].T``, of which `recommend_hints` gives the best tiles.

    Raises:
        TileValueError: extents that are no positive numbers.
    """

    def __init__(
        self,
        M: int,
        N: int,
        K: int,
        in_dtype: Any = "float16",
        out_dtype: Any = "float16",
        accum_dtype: Any = "float32",
        trans_A: bool = False,
        trans_B: bool = True,
    ):
        if min(M, N, K) < 1:
            raise TileValueError(f"a product of {M} × {N} × {K}", expected="positive extents")
        self.extents, self.transposed = (M, N, K), (trans_A, trans_B)
        self.dtypes = tuple(map(canonical, (in_dtype, out_dtype, accum_dtype)))
        self.arch: Cuda | None = None

    def with_arch(self, arch: Cuda) -> MatmulTemplate:
        """For this GPU; the template itself."""
        self.arch = arch
        return self

    def equivalent_function(self) -> Any:
        """The product as a ``@T.prim_func``, with tiles of 128 × 128 × 64."""
        return _product(self, 128, 128, 64, 2, 256, True)

    def recommend_hints(self, topk: int = 10) -> list[Hint]:
        """The ``topk`` ways to cut it of which the cost model predicts the least time, the best first."""
        from tilescale.jit import Factory
        from tilescale.tuning import cost

        def product(block_M: int, block_N: int, block_K: int, stages: int, threads: int, panels: bool) -> Any:
            return _product(
                self,
                block_M,
                block_N,
                block_K,
                stages,
                threads,
                panels,
            )

        target = "cuda" if self.arch is None else self.arch.target
        names = ("block_M", "block_N", "block_K", "stages", "threads", "panels")
        values = itertools.product((64, 128), (64, 128, 256), (32, 64), (2, 3, 4), (128, 256), (True,))
        configs = [dict(zip(names, v, strict=True)) for v in values]
        ranked = cost.rank(Factory(cast(FunctionType, product), [-1], target, False), configs)
        out = []
        for p in [p for p in ranked if not p.error][:topk]:
            c, warps = p.config, p.config["threads"] // 32
            rows = next(r for r in (4, 2, 1) if warps % r == 0 and c["block_M"] // r >= 16)
            out.append(
                Hint(
                    [c["block_M"], c["block_N"]],
                    [c["block_M"] // rows, c["block_N"] // (warps // rows)],
                    [c["block_K"]],
                    c["stages"],
                    Rasterization2DColumn if c["panels"] else NoRasterization,
                    p.latency,
                )
            )
        return out


def _product(
    of: MatmulTemplate, block_M: int, block_N: int, block_K: int, stages: int, threads: int, panels: bool
) -> Any:
    import tilescale.language as T

    (M, N, K), (dtype, out_dtype, accum) = of.extents, of.dtypes
    trans_A, trans_B = of.transposed

    of_a, of_b = (K, M) if trans_A else (M, K), (N, K) if trans_B else (K, N)
    in_a = (block_K, block_M) if trans_A else (block_M, block_K)
    in_b = (block_N, block_K) if trans_B else (block_K, block_N)

    @T.prim_func
    def product(A: T.Tensor(of_a, dtype), B: T.Tensor(of_b, dtype), C: T.Tensor((M, N), out_dtype)) -> None:  # type: ignore[valid-type]
        with T.Kernel(T.ceildiv(N, block_N), T.ceildiv(M, block_M), threads=threads) as (bx, by):
            a, b = T.alloc_shared(in_a, dtype), T.alloc_shared(in_b, dtype)
            c = T.alloc_fragment((block_M, block_N), accum)
            T.use_swizzle(8, enable=panels)
            T.clear(c)
            for k in T.Pipelined(T.ceildiv(K, block_K), num_stages=stages):
                if trans_A:
                    T.copy(A[k * block_K, by * block_M], a)
                else:
                    T.copy(A[by * block_M, k * block_K], a)
                if trans_B:
                    T.copy(B[bx * block_N, k * block_K], b)
                else:
                    T.copy(B[k * block_K, bx * block_N], b)
                T.gemm(a, b, c, transpose_A=trans_A, transpose_B=trans_B)
            T.copy(c, C[by * block_M, bx * block_N])

    return product
