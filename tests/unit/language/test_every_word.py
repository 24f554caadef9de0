"""Every parameter of the language changes something or is refused, or stands in the list of words that change
nothing.

For each function a use of it, and for each parameter another use that differs in that parameter: their tile
IR, launch or refusal differ, else the CUDA that is printed. A parameter that is new and has no such pair
fails the test; what changes nothing must indeed change nothing.
"""

from __future__ import annotations

import enum
import functools
import inspect
import linecache
import re
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tilescale
import tilescale.language as T
from tests.kernels import refused
from tilescale.compiler import driver
from tilescale.compiler.cuda.lower import Lowering
from tilescale.compiler.cuda.printer import print_kernel
from tilescale.compiler.cuda.targets import target
from tilescale.compiler.passes import pipeline
from tilescale.errors import TileError, TileTypeError, TileValueError
from tilescale.language.dtypes import ALL as DTYPES
from tilescale.language.dtypes import NARROW
from tilescale.language.vectors import VECTORS

ROOT = Path(__file__).resolve().parents[3]

HEAD = """
@T.prim_func
def kernel(
    A: T.Tensor((64, 64), "float32"), B: T.Tensor((64, 64), "float32"), I: T.Tensor((64, 64), "int32"), H: T.Tensor((64, 64), "float16"),
    S: T.SymmTensor((64, 64), "float32"), R: T.SymmTensor((4, 64, 64), "float32"), sig: T.Signal((4,)), x: T.float32, n: T.int32,
    P: T.Packets((4, 64, 64), "float32"), Q: T.Tensor((4,), T.ptr),
):
"""
LAUNCH = """with T.Kernel(4, threads=128) as bx:
    a, b, c = [T.alloc_shared((64, 64), "float32") for _ in range(3)]
    h, g = T.alloc_shared((64, 64), "float16"), T.alloc_shared((64, 64), "float16")
    f, r = T.alloc_fragment((64, 64), "float32"), T.alloc_fragment((64,), "float32")
    i, k = T.alloc_fragment((64, 64), "int32"), T.alloc_fragment((64,), "int32")
"""
DEVICE = 'with T.Scale("device") as (rank, ranks):\n    '
THREAD = 'with T.Scale("thread") as (t, threads):\n    '

REDUCER = (
    "q = T.alloc_reducer({})\nT.clear(q)\nfor i, j in T.Parallel(64, 64):\n    q[i] += f[i, j]\n"
    "T.finalize_reducer(q)\nT.copy(q, A[0, 0])"
)
EXTERN = (
    "d, e = T.alloc_local((4,), 'int8'), T.alloc_local((4,), 'int8')\nT.clear(d)\nT.clear(e)\n"
    "T.import_source('void {}();')\nT.call_extern('f', {})"
)
PTX_COPY = 'T.ptx_cp_async(T.access_ptr({}, "w", {}), T.access_ptr({}, "r", {}), {})'
DP4A = "d, q = T.alloc_local((8,), 'int8'), T.alloc_local((2,), 'int32')\nT.clear(d)\nT.clear(q)\nT.dp4a({}, {}, {})"
MMA = (
    "d, e, q = T.alloc_local((16,), 'float16'), T.alloc_local((8,), 'float16'), T.alloc_local((8,), 'float32')\n"
    "T.clear(d)\nT.clear(e)\nT.clear(q)\nT.mma_sync({}, {}, {})\nA[0, 0] = q[0]"
)
LDMATRIX = f"{THREAD}d = T.alloc_local((16,), 'float16')\n    T.clear(d)\n    T.ldmatrix({{}})\n    A[0, t % 64] = d[0]"
RANDOM = "T.rng_init({})\nI[bx, 0] = T.rng_rand()"
IM2COL = "T.im2col(T.view({}, (4, 8, 8, 16)), {}, {}, {}, {}, {}, {}, {})"
#: Words of TileLang's that change nothing, as docs/LANGUAGE.md says: function → its parameters, each with two
#: uses
NOTHING = {
    **{
        f"reduce_{op}": {
            "batch": (f"T.reduce_{op}(f, r, batch=2)", f"T.reduce_{op}(f, r)"),
            "annotations": (f"T.reduce_{op}(f, r, annotations={{'it': 1}})", f"T.reduce_{op}(f, r)"),
        }
        for op in ("sum", "abssum", "prod", "max", "min", "absmax")
    },
    **{
        f"reduce_{op}": {
            "batch": (f"T.reduce_{op}(i, k, 1, batch=2)", f"T.reduce_{op}(i, k, 1)"),
            "annotations": (f"T.reduce_{op}(i, k, 1, annotations={{'it': 1}})", f"T.reduce_{op}(i, k, 1)"),
        }
        for op in ("bitand", "bitor", "bitxor")
    },
    **{
        word: {"annotations": (f"T.{word}(a, annotations={{'it': 1}})", f"T.{word}(a)")}
        for word in ("cumsum", "cummax")
    },
    "reduce": {
        "batch": ("T.reduce(f, r, 'sum', 1, batch=2)", "T.reduce(f, r, 'sum', 1)"),
        "annotations": ("T.reduce(f, r, 'sum', 1, annotations={'it': 1})", "T.reduce(f, r, 'sum', 1)"),
    },
    "Kernel": {
        "is_cpu": (
            "with T.Kernel(4, is_cpu=True) as bx:\n    A[bx, 0] = x",
            "with T.Kernel(4) as bx:\n    A[bx, 0] = x",
        )
    },
    "gemm": {
        "k_pack": ("T.gemm(h, g, f, k_pack=2)", "T.gemm(h, g, f)"),
        "annotations": ("T.gemm(h, g, f, annotations={'it': 1})", "T.gemm(h, g, f)"),
    },
    "Pipelined": {
        "annotations": (
            "for p in T.Pipelined(4, annotations={'it': 1}):\n    T.copy(R[p, :, :], a)",
            "for p in T.Pipelined(4):\n    T.copy(R[p, :, :], a)",
        )
    },
    "finalize_reducer": {
        "batch": (
            "q = T.alloc_reducer((64,), 'float32')\nT.clear(q)\nT.finalize_reducer(q, batch=2)",
            "q = T.alloc_reducer((64,), 'float32')\nT.clear(q)\nT.finalize_reducer(q)",
        )
    },
    "fill": {"annotations": ("T.fill(a, 2, annotations={'it': 1})", "T.fill(a, 2)")},
    "clear": {"annotations": ("T.clear(a, annotations={'it': 1})", "T.clear(a)")},
    "gemm_sp": {
        "k_pack": ("T.gemm_sp(h[0:64, 0:32], e, g, f, k_pack=2)", "T.gemm_sp(h[0:64, 0:32], e, g, f)")
    },
    "im2col": {
        "eviction_policy": (
            IM2COL.format("A", "f", 0, 0, 3, 1, 1, "1, 'evict_first'"),
            IM2COL.format("A", "f", 0, 0, 3, 1, 1, 1),
        ),
        "annotations": (
            IM2COL.format("A", "f", 0, 0, 3, 1, 1, "1, annotations={'it': 1}"),
            IM2COL.format("A", "f", 0, 0, 3, 1, 1, 1),
        ),
    },
    "copy": {"eviction_policy": ('T.copy(A, a, eviction_policy="evict_first")', "T.copy(A, a)")},
    "atomic_add": {
        "memory_order": ('T.atomic_add(A, a, memory_order="relaxed")', "T.atomic_add(A, a)"),
        "use_tma": ("T.atomic_add(A, a, use_tma=True)", "T.atomic_add(A, a)"),
        "annotations": ("T.atomic_add(A, a, annotations={'it': 1})", "T.atomic_add(A, a)"),
    },
    **{
        f"atomic_{kind}": {
            "memory_order": (
                f'T.atomic_{kind}(I[0, 0], n, memory_order="relaxed")',
                f"T.atomic_{kind}(I[0, 0], n)",
            )
        }
        for kind in ("or", "and", "xor", "exch")
    },
    "atomic_max": {"memory_order": ('T.atomic_max(A, a, memory_order="relaxed")', "T.atomic_max(A, a)")},
    "atomic_min": {"memory_order": ('T.atomic_min(A, a, memory_order="relaxed")', "T.atomic_min(A, a)")},
    "atomic_load": {
        "memory_order": (
            'B[0, 0] = T.atomic_load(A[0, 0], memory_order="relaxed")',
            "B[0, 0] = T.atomic_load(A[0, 0])",
        )
    },
    "atomic_store": {
        "memory_order": ('T.atomic_store(A[0, 0], x, memory_order="relaxed")', "T.atomic_store(A[0, 0], x)")
    },
    "Persistent": {
        "group_size": (
            "for p, q in T.Persistent((8, 8), 4, bx, group_size=4):\n    A[p, q] = x",
            "for p, q in T.Persistent((8, 8), 4, bx):\n    A[p, q] = x",
        )
    },
    "attr": {
        "value": (
            "with T.attr(T.comm_reducer(T.max, [0]), 'reduce_scope', 0):\n    A[0, 0] = x",
            "with T.attr(T.comm_reducer(T.max, [0]), 'reduce_scope', 1):\n    A[0, 0] = x",
        )
    },
    "alloc_reducer": {
        "replication": (REDUCER.format("64, 'float32', replication='all'"), REDUCER.format("64, 'float32'"))
    },
    "Parallel": {
        "prefer_async": (
            "for p, q in T.Parallel(64, 64, prefer_async=True):\n    f[p, q] = x",
            "for p, q in T.Parallel(64, 64):\n    f[p, q] = x",
        ),
        "annotations": (
            "for p, q in T.Parallel(64, 64, annotations={'a': 1}):\n    f[p, q] = x",
            "for p, q in T.Parallel(64, 64):\n    f[p, q] = x",
        ),
    },
    "evaluate": {"value": ("T.evaluate(x)", "T.evaluate(n)")},
    "annotate_l2_hit_ratio": {"ratios": ("T.annotate_l2_hit_ratio({A: 0.5})", "pass")},
    "transpose": {
        "annotations": ("T.transpose(a, b, annotations={'x': 1})", "T.transpose(a, b)"),
    },
    "async_copy": {
        "annotations": ("T.async_copy(A, a, annotations={'x': 1})", "T.async_copy(A, a)"),
    },
    "annotate_compile_flags": {"flags": ("T.annotate_compile_flags(['-O3'])", "pass")},
    "annotate_restrict_buffers": {"buffers": ("T.annotate_restrict_buffers(A, B)", "pass")},
    "warpgroup_fence_operand": {
        "buffer_or_ptr": ("T.warpgroup_fence_operand(f)", "T.warpgroup_fence_operand(r)"),
        "offset": ("T.warpgroup_fence_operand(f, 4)", "T.warpgroup_fence_operand(f)"),
        "num_regs": ("T.warpgroup_fence_operand(f, num_regs=4)", "T.warpgroup_fence_operand(f)"),
        "dtype": ("T.warpgroup_fence_operand(f, dtype='float32')", "T.warpgroup_fence_operand(f)"),
    },
    "annotate_producer_reg_dealloc": {"reg_count": ("T.annotate_producer_reg_dealloc(40)", "pass")},
    "annotate_consumer_reg_alloc": {"reg_count": ("T.annotate_consumer_reg_alloc(160)", "pass")},
}

ALL_REDUCE = (
    "t, g = T.get_thread_binding(), T.alloc_local((2,), 'float32')\n"
    "with T.attr(T.comm_reducer({}, {}), {}, 0):\n    T.tvm_thread_allreduce({}, {}, {}, g[0], {}, dtype={})\nA[0, t % 64] = g[0]"
)
#: function → its use, and for each parameter one that differs in it
USES: dict[str, tuple[str, dict[str, str]]] = {
    "Kernel": (
        "with T.Kernel(4) as bx:\n    A[0, 0] = x",
        {
            "grid": "with T.Kernel(8) as bx:\n    A[0, 0] = x",
            "threads": "with T.Kernel(4, threads=64) as bx:\n    A[0, 0] = x",
            "block": "with T.Kernel(4, block=4) as bx:\n    A[0, 0] = x",
            "cta_cluster": "with T.Kernel(4, cta_cluster=2) as bx:\n    A[0, 0] = x",
            "cluster_dims": "with T.Kernel(4, cluster_dims=2) as bx:\n    A[0, 0] = x",
            "max_blocks": "with T.Kernel(4, max_blocks=2) as bx:\n    A[0, 0] = x",
            "ordered": "with T.Kernel(4, ordered=False) as bx:\n    A[0, 0] = x",
            "awaited": "with T.Kernel(4, awaited=True) as bx:\n    A[0, 0] = x",
            "pdl": "with T.Kernel(4, pdl=True) as bx:\n    A[0, 0] = x",
            "comm_warps": "with T.Kernel(4, comm_warps=1) as bx:\n    A[0, 0] = x",
            "comm_depth": "with T.Kernel(4, comm_depth=4) as bx:\n    A[0, 0] = x",
            "prelude": "with T.Kernel(4, prelude='x') as bx:\n    A[0, 0] = x",
        },
    ),
    "PersistentTileScheduler": (
        "s = T.PersistentTileScheduler(8, 6, 4, 2, column_major=True, cluster_size=1, stateful=True, name='s')\ns.init(bx)\nwhile s.valid():\n    A[s.m_idx, s.n_idx] = x\n    s.next_tile()",
        {
            "num_m_tiles": "s = T.PersistentTileScheduler(7, 6, 4, 2, column_major=True, cluster_size=1, stateful=True, name='s')\ns.init(bx)\nwhile s.valid():\n    A[s.m_idx, s.n_idx] = x\n    s.next_tile()",
            "num_n_tiles": "s = T.PersistentTileScheduler(8, 5, 4, 2, column_major=True, cluster_size=1, stateful=True, name='s')\ns.init(bx)\nwhile s.valid():\n    A[s.m_idx, s.n_idx] = x\n    s.next_tile()",
            "num_workers": "s = T.PersistentTileScheduler(8, 6, 3, 2, column_major=True, cluster_size=1, stateful=True, name='s')\ns.init(bx)\nwhile s.valid():\n    A[s.m_idx, s.n_idx] = x\n    s.next_tile()",
            "swizzle_size": "s = T.PersistentTileScheduler(8, 6, 4, 3, column_major=True, cluster_size=1, stateful=True, name='s')\ns.init(bx)\nwhile s.valid():\n    A[s.m_idx, s.n_idx] = x\n    s.next_tile()",
            "column_major": "s = T.PersistentTileScheduler(8, 6, 4, 2, column_major=False, cluster_size=1, stateful=True, name='s')\ns.init(bx)\nwhile s.valid():\n    A[s.m_idx, s.n_idx] = x\n    s.next_tile()",
            "cluster_size": "s = T.PersistentTileScheduler(8, 6, 4, 2, column_major=True, cluster_size=2, stateful=True, name='s')\ns.init(bx)\nwhile s.valid():\n    A[s.m_idx, s.n_idx] = x\n    s.next_tile()",
            "stateful": "s = T.PersistentTileScheduler(8, 6, 4, 2, column_major=True, cluster_size=1, stateful=False, name='s')\ns.init(bx)\nwhile s.valid():\n    A[s.m_idx, s.n_idx] = x\n    s.next_tile()",
            "name": "s = T.PersistentTileScheduler(8, 6, 4, 2, column_major=True, cluster_size=1, stateful=True, name='t')\ns.init(bx)\nwhile s.valid():\n    A[s.m_idx, s.n_idx] = x\n    s.next_tile()",
        },
    ),
    "ClusterKernel": (
        "with T.ClusterKernel(4, cluster_dims=1) as bx:\n    A[0, 0] = x",
        {
            "grid": "with T.ClusterKernel(8, cluster_dims=1) as bx:\n    A[0, 0] = x",
            "cluster_dims": "with T.ClusterKernel(4, cluster_dims=2) as bx:\n    A[0, 0] = x",
            "threads": "with T.ClusterKernel(4, cluster_dims=1, threads=64) as bx:\n    A[0, 0] = x",
            "prelude": "with T.ClusterKernel(4, cluster_dims=1, prelude='x') as bx:\n    A[0, 0] = x",
        },
    ),
    "block_rank_in_cluster": ("A[T.block_rank_in_cluster(), 0] = x", {}),
    "Layout": (
        "T.annotate_layout({h: T.Layout((64, 64), lambda p, q: p * 64 + q)})",
        {
            "shape": "T.annotate_layout({h: T.Layout((32, 64), lambda p, q: p * 64 + q)})",
            "forward_fn": "T.annotate_layout({h: T.Layout((64, 64), lambda p, q: p * 72 + q)})",
        },
    ),
    "Fragment": (
        "T.annotate_layout({f: T.Fragment((64, 64), lambda p, q: (p * 2 + q // 32, q % 32))})",
        {
            "shape": "T.annotate_layout({f: T.Fragment((32, 64), lambda p, q: (p * 4 + q // 16, q % 16))})",
            "forward_fn": "T.annotate_layout({f: T.Fragment((64, 64), lambda p, q: (q * 2 + p // 32, p % 32))})",
            "forward_thread_fn": "T.annotate_layout({f: T.Fragment((64, 64), forward_thread_fn=lambda p, q: p)})",
            "forward_index_fn": "T.annotate_layout({f: T.Fragment((64, 64), forward_thread_fn=lambda p, q: p * 2 + q % 2, "
            "forward_index_fn=lambda p, q: 31 - q // 2)})",
            "replicate": "T.annotate_layout({f: T.Fragment((64, 64), lambda p, q, copy: (p + 64 * copy, q), replicate=2)})",
        },
    ),
    "Parallel": (
        "for p in T.Parallel(64):\n    A[0, p] = B[0, p]",
        {
            "extents": "for p in T.Parallel(32):\n    A[0, p] = B[0, p]",
            "coalesced_width": "for p in T.Parallel(64, coalesced_width=2):\n    A[0, p] = B[0, p]",
            "loop_layout": "for p in T.Parallel(64, loop_layout=T.Fragment((64,), lambda p: (p // 4, p % 4))):\n    A[0, p] = B[0, p]",
        },
    ),
    "ws": (
        "with T.Kernel(4, threads=256) as bx:\n    with T.ws(0):\n        A[0, 0] = x",
        {"warp_group_idx": "with T.Kernel(4, threads=256) as bx:\n    with T.ws(1):\n        A[0, 0] = x"},
    ),
    "thread_binding": (
        "A[0, T.thread_binding(0, 128) % 64] = x",
        {
            "begin": "A[0, T.thread_binding(1, 128) % 64] = x",
            "end": "A[0, T.thread_binding(0, 64) % 64] = x",
            "thread": "A[0, T.thread_binding(0, 1, thread='threadIdx.y') % 64] = x",
        },
    ),
    "tvm_warp_shuffle": (
        f"{THREAD}A[0, t % 64] = T.tvm_warp_shuffle(-1 & 0xFFFFFFFF, x, 1, 32, 32)",
        {
            "mask": f"{THREAD}A[0, t % 64] = T.tvm_warp_shuffle(1, x, 1, 32, 32)",
            "value": f"{THREAD}A[0, t % 64] = T.tvm_warp_shuffle(0xFFFFFFFF, x * 2, 1, 32, 32)",
            "warp_id": f"{THREAD}A[0, t % 64] = T.tvm_warp_shuffle(0xFFFFFFFF, x, 2, 32, 32)",
            "width": f"{THREAD}A[0, t % 64] = T.tvm_warp_shuffle(0xFFFFFFFF, x, 1, 16, 32)",
            "warp_size": f"{THREAD}A[0, t % 64] = T.tvm_warp_shuffle(0xFFFFFFFF, x, 1, 32, 8)",
        },
    ),
    "comm_reducer": (
        ALL_REDUCE.format(
            "lambda p, q: p + q", "[0]", "'reduce_scope'", "T.uint32(1)", "x", "True", "t", "'handle'"
        ),
        {
            "fcombine": ALL_REDUCE.format(
                "lambda p, q: p * q", "[0]", "'reduce_scope'", "T.uint32(1)", "x", "True", "t", "'handle'"
            ),
            "identity": ALL_REDUCE.format(
                "lambda p, q: p + q", "[1]", "'reduce_scope'", "T.uint32(1)", "x", "True", "t", "'handle'"
            ),
        },
    ),
    "attr": (
        ALL_REDUCE.format(
            "lambda p, q: p + q", "[0]", "'reduce_scope'", "T.uint32(1)", "x", "True", "t", "'handle'"
        ),
        {
            "node": "with T.attr(5, 'reduce_scope', 0):\n    A[0, 0] = x",
            "attr_key": "with T.attr(T.comm_reducer(T.max, [0]), 'other', 0):\n    A[0, 0] = x",
        },
    ),
    "evaluate": ("T.evaluate(x)", {}),
    "tvm_thread_allreduce": (
        ALL_REDUCE.format(
            "lambda p, q: p + q", "[0]", "'reduce_scope'", "T.uint32(1)", "x", "True", "t", "'handle'"
        ),
        {
            "size": ALL_REDUCE.format(
                "lambda p, q: p + q", "[0]", "'reduce_scope'", "T.uint32(2)", "x", "True", "t", "'handle'"
            ),
            "value": ALL_REDUCE.format(
                "lambda p, q: p + q", "[0]", "'reduce_scope'", "T.uint32(1)", "x * 2", "True", "t", "'handle'"
            ),
            "pred": ALL_REDUCE.format(
                "lambda p, q: p + q", "[0]", "'reduce_scope'", "T.uint32(1)", "x", "False", "t", "'handle'"
            ),
            "result": ALL_REDUCE.format(
                "lambda p, q: p + q", "[0]", "'reduce_scope'", "T.uint32(1)", "x", "True", "t", "'handle'"
            ).replace("g[0], t", "g[1], t"),
            "axes": ALL_REDUCE.format(
                "lambda p, q: p + q", "[0]", "'reduce_scope'", "T.uint32(1)", "x", "True", "n", "'handle'"
            ),
            "dtype": ALL_REDUCE.format(
                "lambda p, q: p + q", "[0]", "'reduce_scope'", "T.uint32(1)", "x", "True", "t", "'int32'"
            ),
        },
    ),
    "alloc_reducer": (
        REDUCER.format("64, 'float32'"),
        {
            "shape": REDUCER.format("32, 'float32'"),
            "dtype": REDUCER.format("64, 'float64'"),
            "op": REDUCER.format("64, 'float32', op='max'").replace(
                "q[i] += f[i, j]", "T.reducer_update(q[i], f[i, j])"
            ),
        },
    ),
    "finalize_reducer": (
        REDUCER.format("64, 'float32'"),
        {
            "reducer": REDUCER.format("64, 'float32'").replace("finalize_reducer(q)", "finalize_reducer(r)"),
            "dst": REDUCER.format("64, 'float32'").replace("finalize_reducer(q)", "finalize_reducer(q, r)"),
        },
    ),
    "reducer_init": (
        REDUCER.format("64, 'float32'").replace("T.clear(q)", "T.reducer_init(q)"),
        {
            "reducer": REDUCER.format("64, 'float32'").replace("T.clear(q)", "T.reducer_init(r)"),
            "init": REDUCER.format("64, 'float32'").replace("T.clear(q)", "T.reducer_init(q, 1)"),
        },
    ),
    "reducer_update": (
        REDUCER.format("64, 'float32'").replace("q[i] += f[i, j]", "T.reducer_update(q[i], f[i, j])"),
        {
            "target": REDUCER.format("64, 'float32'").replace(
                "q[i] += f[i, j]", "T.reducer_update(q[j], f[i, j])"
            ),
            "value": REDUCER.format("64, 'float32'").replace("q[i] += f[i, j]", "T.reducer_update(q[i], 1)"),
        },
    ),
    "import_source": (
        EXTERN.format("d", "T.access_ptr(d)"),
        {"source_code": EXTERN.format("e", "T.access_ptr(d)")},
    ),
    "access_ptr": (
        EXTERN.format("d", "T.access_ptr(d)"),
        {
            "base": EXTERN.format("d", "T.access_ptr(e)"),
            "access_type": EXTERN.format("d", "T.access_ptr(d, 'w')"),
            "extents": EXTERN.format("d", "T.access_ptr(d[0], 'r', 2)"),
        },
    ),
    "call_extern": (
        EXTERN.format("d", "T.access_ptr(d)"),
        {
            "args": EXTERN.format("d", "T.access_ptr(d), 3"),
            "dtype": EXTERN.format("d", "T.access_ptr(d), dtype='float16'"),
        },
    ),
    "call_pure_extern": (
        "A[0, 0] = T.call_pure_extern('float32', 'f', x)",
        {
            "dtype": "A[0, 0] = T.call_pure_extern('float16', 'f', x)",
            "func_name": "A[0, 0] = T.call_pure_extern('float32', 'g', x)",
            "args": "A[0, 0] = T.call_pure_extern('float32', 'f', x, 1)",
        },
    ),
    "dp4a": (
        DP4A.format("d[0]", "d[4]", "q[0]"),
        {
            "A": DP4A.format("d[4]", "d[4]", "q[0]"),
            "B": DP4A.format("d[0]", "d[0]", "q[0]"),
            "C": DP4A.format("d[0]", "d[4]", "q[1]"),
        },
    ),
    "mma_sync": (
        MMA.format("d[0]", "e[0]", "q[0]"),
        {
            "A": MMA.format("d[8]", "e[0]", "q[0]"),
            "B": MMA.format("d[0]", "e[4]", "q[0]"),
            "C": MMA.format("d[0]", "e[0]", "q[4]"),
        },
    ),
    "ldmatrix": (
        LDMATRIX.format("h[t % 8, 0], d[0]"),
        {
            "src": LDMATRIX.format("h[t % 8, 8], d[0]"),
            "dst": LDMATRIX.format("h[t % 8, 0], d[8]"),
            "transposed": LDMATRIX.format("h[t % 8, 0], d[0], transposed=True"),
        },
    ),
    "ptx_cp_async": (
        PTX_COPY.format("h[0, 0]", 8, "H[0, 0]", 8, 8),
        {
            "dst_access_ptr": PTX_COPY.format("h[1, 0]", 8, "H[0, 0]", 8, 8),
            "src_access_ptr": PTX_COPY.format("h[0, 0]", 8, "H[1, 0]", 8, 8),
            "num_elems": PTX_COPY.format("h[0, 0]", 8, "H[0, 0]", 8, 4),
            "predicate": PTX_COPY.format("h[0, 0]", 8, "H[0, 0]", 8, "8, n > 0"),
        },
    ),
    "ptx_commit_group": ("T.ptx_commit_group()", {}),
    "ptx_wait_group": ("T.ptx_wait_group(1)", {"num": "T.ptx_wait_group(0)"}),
    "cp_async_barrier_noinc": (
        "T.cp_async_barrier_noinc(ms[0])",
        {"barrier": "T.cp_async_barrier_noinc(ms[1])"},
    ),
    "wgmma_gemm": (
        "T.wgmma_gemm(h, g, f)",
        {
            "A": "T.wgmma_gemm(g, g, f)",
            "B": "T.wgmma_gemm(h, h, f)",
            "C": "q = T.alloc_fragment((64, 64), 'float32')\nT.wgmma_gemm(h, g, q)",
            "transpose_A": "T.wgmma_gemm(h, g, f, transpose_A=True)",
            "transpose_B": "T.wgmma_gemm(h, g, f, transpose_B=True)",
            "policy": "T.wgmma_gemm(h, g, f, policy=T.GemmWarpPolicy.FullRow)",
            "clear_accum": "T.wgmma_gemm(h, g, f, clear_accum=True)",
            "annotations": "T.wgmma_gemm(h, g, f, annotations={'a': 1})",
        },
    ),
    "rng_init": (
        RANDOM.format("n"),
        {
            "seed": RANDOM.format("n + 1"),
            "seq": RANDOM.format("n, 3"),
            "off": RANDOM.format("n, off=2"),
            "generator": RANDOM.format("n, generator='xorwow'"),
        },
    ),
    "rng_rand": (RANDOM.format("n"), {}),
    "rng_rand_float": (
        "T.rng_init(n)\nA[bx, 0] = T.rng_rand_float()",
        {
            "bit": "T.rng_init(n)\nA[bx, 0] = T.rng_rand_float(64)",
            "dist": "T.rng_init(n)\nA[bx, 0] = T.rng_rand_float(dist='normal')",
        },
    ),
    "transpose": (
        "T.transpose(a, b)",
        {"src": "T.transpose(c, b)", "dst": "T.transpose(a, c)"},
    ),
    "async_copy": (
        "T.async_copy(A, a)",
        {
            "src": "T.async_copy(B, a)",
            "dst": "T.async_copy(A, b)",
            "coalesced_width": "T.async_copy(A, a, coalesced_width=1)",
            "loop_layout": "T.async_copy(A, a, loop_layout=T.Fragment((64, 64), lambda p, q: (q * 2 + p // 32, p % 32)))",
        },
    ),
    "While": (
        "k[0] = 0\nwith T.While(k[0] < 3):\n    k[0] += 1\nI[0, 0] = k[0]",
        {"condition": "k[0] = 0\nwith T.While(k[0] < 4):\n    k[0] += 1\nI[0, 0] = k[0]"},
    ),
    "let": (
        "u, v = T.int32(), T.int32()\nT.let(u, n)\nI[0, 0] = u + v",
        {
            "var": "u, v = T.int32(), T.int32()\nT.let(v, n)\nI[0, 0] = u + v",
            "value": "u, v = T.int32(), T.int32()\nT.let(u, n + 1)\nI[0, 0] = u + v",
        },
    ),
    "tvm_access_ptr": (
        EXTERN.format("f", "T.tvm_access_ptr(T.type_annotation('int8'), d.data, 0, 2, 1)"),
        {
            "ptype": EXTERN.format("f", "T.tvm_access_ptr(T.type_annotation('int32'), d.data, 0, 2, 1)"),
            "data": EXTERN.format("f", "T.tvm_access_ptr(T.type_annotation('int8'), e.data, 0, 2, 1)"),
            "offset": EXTERN.format("f", "T.tvm_access_ptr(T.type_annotation('int8'), d.data, 1, 2, 1)"),
            "extent": EXTERN.format("f", "T.tvm_access_ptr(T.type_annotation('int8'), d.data, 0, 1, 1)"),
            "rw_mask": EXTERN.format("f", "T.tvm_access_ptr(T.type_annotation('int8'), d.data, 0, 2, 3)"),
        },
    ),
    "type_annotation": (
        "y = T.alloc_var(T.type_annotation('int8'), n)\nI[0, 0] = y",
        {"dtype": "y = T.alloc_var(T.type_annotation('int16'), n)\nI[0, 0] = y"},
    ),
    "address_of": (
        EXTERN.format("f", "T.address_of(d), 8"),
        {"base": EXTERN.format("f", "T.address_of(e), 8")},
    ),
    "get_block_bindings": ("A[T.get_block_bindings()[0], 0] = x", {}),
    "get_block_extents": ("I[0, 0] = T.get_block_extents()[0]", {}),
    "get_block_extent": ("I[0, 0] = T.get_block_extent()", {"dim": "I[0, 0] = T.get_block_extent(1)"}),
    "get_thread_bindings": ("A[0, T.get_thread_bindings()[0] % 64] = x", {}),
    "get_thread_extents": ("I[0, 0] = T.get_thread_extents()[0]", {}),
    "get_thread_extent": ("I[0, 0] = T.get_thread_extent()", {"dim": "I[0, 0] = T.get_thread_extent(1)"}),
    "annotate_pass_configs": (
        "T.annotate_pass_configs({})\nA[0, 0] = T.exp(x)",
        {"configs": "T.annotate_pass_configs({'TL_ENABLE_FAST_MATH': True})\nA[0, 0] = T.exp(x)"},
    ),
    "annotate_compile_flags": ("T.annotate_compile_flags('-O3')", {}),
    "annotate_restrict_buffers": ("T.annotate_restrict_buffers(A, B)", {}),
    "annotate_producer_reg_dealloc": ("T.annotate_producer_reg_dealloc()", {}),
    "annotate_consumer_reg_alloc": ("T.annotate_consumer_reg_alloc()", {}),
    "disable_warp_group_reg_alloc": ("T.disable_warp_group_reg_alloc()", {}),
    "no_set_max_nreg": ("T.no_set_max_nreg()", {}),
    "warpgroup_arrive": ("T.warpgroup_arrive()", {}),
    "warpgroup_commit_batch": ("T.warpgroup_commit_batch()", {}),
    "warpgroup_fence_operand": ("T.warpgroup_fence_operand(f)", {}),
    "thread_return": ("A[bx, 0] = x\nif n > 3:\n    T.thread_return()\nA[bx, 1] = x", {}),
    "Not": ("if T.Not(n > 0):\n    A[0, 0] = x", {"a": "if T.Not(n > 1):\n    A[0, 0] = x"}),
    **{
        word: (
            f"A[0, 0] = T.Select(T.{word}(n > 0, n < 9), x, 1)",
            {
                "a": f"A[0, 0] = T.Select(T.{word}(n > 1, n < 9), x, 1)",
                "b": f"A[0, 0] = T.Select(T.{word}(n > 0, n < 8), x, 1)",
            },
        )
        for word in ("And", "Or", "EQ", "NE")
    },
    **{
        word: (
            f"A[0, 0] = T.cast(T.{word}(n, 3), 'float32')",
            {
                "a": f"A[0, 0] = T.cast(T.{word}(n * 2, 3), 'float32')",
                "b": f"A[0, 0] = T.cast(T.{word}(n, 4), 'float32')",
            },
        )
        for word in (
            *(
                "Add",
                "Sub",
                "Mul",
                "Div",
                "Mod",
                "FloorDiv",
                "FloorMod",
                "Min",
                "Max",
                "LT",
                "LE",
                "GT",
                "GE",
            ),
        )
    },
    "If": (
        "with T.If(n > 0), T.Then():\n    A[0, 0] = x",
        {"condition": "with T.If(n > 1), T.Then():\n    A[0, 0] = x"},
    ),
    "Then": ("with T.If(n > 0), T.Then():\n    A[0, 0] = x", {}),
    "Else": (
        "with T.If(n > 0):\n    with T.Then():\n        A[0, 0] = x\n    with T.Else():\n        A[0, 0] = 1",
        {},
    ),
    "get_block_binding": ("A[T.get_block_binding(), 0] = x", {"dim": "A[T.get_block_binding(1), 0] = x"}),
    "im2col": (
        IM2COL.format("A", "f", 0, 0, 3, 1, 1, 1),
        {
            "img": IM2COL.format("B", "f", 0, 0, 3, 1, 1, 1),
            "col": IM2COL.format("A", "a", 0, 0, 3, 1, 1, 1),
            "nhw_step": IM2COL.format("A", "f", 1, 0, 3, 1, 1, 1),
            "c_step": IM2COL.format("A", "f", 0, 1, 3, 1, 1, 1),
            "kernel": IM2COL.format("A", "f", 0, 0, 2, 1, 1, 1),
            "stride": IM2COL.format("A", "f", 0, 0, 3, 2, 1, 1),
            "dilation": IM2COL.format("A", "f", 0, 0, 3, 1, 2, 1),
            "pad": IM2COL.format("A", "f", 0, 0, 3, 1, 1, 2),
        },
    ),
    "Persistent": (
        "for p, q in T.Persistent((8, 8), 4, bx):\n    A[p, q] = x",
        {
            "domain": "for p, q in T.Persistent((8, 4), 4, bx):\n    A[p, q] = x",
            "wave_size": "for p, q in T.Persistent((8, 8), 2, bx):\n    A[p, q] = x",
            "index": "for p, q in T.Persistent((8, 8), 4, 3 - bx):\n    A[p, q] = x",
            "group": "for p, q in T.Persistent((8, 8), 4, bx, group=(2, 4)):\n    A[p, q] = x",
            "rotate": "for p, q in T.Persistent((8, 8), 4, bx, rotate=1):\n    A[p, q] = x",
        },
    ),
    "Pipelined": (
        "for p in T.Pipelined(4, num_stages=2):\n    T.copy(R[p, :, :], a)\n    T.copy(a, B)",
        {
            "start": "for p in T.Pipelined(3, num_stages=2):\n    T.copy(R[p, :, :], a)\n    T.copy(a, B)",
            "stop": "for p in T.Pipelined(1, 4, num_stages=2):\n    T.copy(R[p, :, :], a)\n    T.copy(a, B)",
            "num_stages": "for p in T.Pipelined(4, num_stages=3):\n    T.copy(R[p, :, :], a)\n    T.copy(a, B)",
            "order": "for p in T.Pipelined(4, num_stages=2, order=[1, 0], stage=[0, 0]):\n    T.copy(R[p, :, :], a)\n    T.copy(a, B)",
            "stage": "for p in T.Pipelined(4, num_stages=2, order=[0, 1], stage=[0, 1]):\n    T.copy(R[p, :, :], a)\n    T.copy(a, B)",
            "sync": "for p in T.Pipelined(4, num_stages=2, sync=[[0]]):\n    T.copy(R[p, :, :], a)\n    T.copy(a, B)",
            "group": "for p in T.Pipelined(4, num_stages=2, order=[0], stage=[0], group=[[0, 1]]):\n    T.copy(R[p, :, :], a)\n    T.copy(a, B)",
        },
    ),
    "serial": (
        "for p in T.serial(8):\n    A[0, p] = x",
        {
            "args": "for p in T.serial(4):\n    A[0, p] = x",
            "step": "for p in T.serial(0, 8, step=2):\n    A[0, p] = x",
            "annotations": "for p in T.serial(8, annotations={'a': 1}):\n    A[0, p] = x",
        },
    ),
    "unroll": (
        "for p in T.unroll(8):\n    A[0, p] = x",
        {
            "args": "for p in T.unroll(4):\n    A[0, p] = x",
            "step": "for p in T.unroll(0, 8, step=2):\n    A[0, p] = x",
            "unroll_factor": "for p in T.unroll(8, unroll_factor=2):\n    A[0, p] = x",
            "explicit": "for p in T.unroll(8, unroll_factor=2, explicit=True):\n    A[0, p] = x",
        },
    ),
    "vectorized": (
        "for p in T.vectorized(8):\n    A[0, p] = x",
        {"args": "for p in T.vectorized(4):\n    A[0, p] = x"},
    ),
    "grid": ("for p in T.grid(8):\n    A[0, p] = x", {"extents": "for p in T.grid(4):\n    A[0, p] = x"}),
    "use_swizzle": (
        "T.use_swizzle(8)",
        {
            "panel_size": "T.use_swizzle(4)",
            "order": "T.use_swizzle(8, order='column')",
            "enable": "T.use_swizzle(8, enable=False)",
        },
    ),
    "annotate_layout": (
        "pass",
        {"layouts": "T.annotate_layout({h: T.Layout((64, 64), lambda p, q: p * 72 + q)})"},
    ),
    "annotate_safe_value": (
        "T.annotate_safe_value({A: 0}); T.copy(A[n, 0], T.alloc_shared((8, 64), 'float32'))",
        {"values": "T.annotate_safe_value({A: 1}); T.copy(A[n, 0], T.alloc_shared((8, 64), 'float32'))"},
    ),
    "assume": ("T.assume(n > 0)", {"condition": "T.assume(n > 1)"}),
    "alloc_shared": (
        "T.copy(A[0:8, 0:64], T.alloc_shared((8, 64), 'float32'))",
        {
            "shape": "T.copy(A[0:8, 0:64], T.alloc_shared((8, 32), 'float32'))",
            "dtype": "T.copy(A[0:8, 0:64], T.alloc_shared((8, 64), 'float16'))",
            "scope": "T.copy(A[0:8, 0:64], T.alloc_shared((8, 64), 'float32', scope='local'))",
        },
    ),
    "alloc_fragment": (
        "T.copy(A[0:8, 0:64], T.alloc_fragment((8, 64), 'float32'))",
        {
            "shape": "T.copy(A[0:8, 0:64], T.alloc_fragment((8, 32), 'float32'))",
            "dtype": "T.copy(A[0:8, 0:64], T.alloc_fragment((8, 64), 'float16'))",
            "scope": "T.copy(A[0:8, 0:64], T.alloc_fragment((8, 64), 'float32', scope='local'))",
        },
    ),
    "alloc_local": (
        "v = T.alloc_local((4,), 'float32')\nv[0] = x",
        {
            "shape": "v = T.alloc_local((8,), 'float32')\nv[0] = x",
            "dtype": "v = T.alloc_local((4,), 'float16')\nv[0] = x",
            "scope": "v = T.alloc_local((4,), 'float32', scope='shared')\nv[0] = x",
        },
    ),
    "alloc_buffer": (
        "v = T.alloc_buffer((4,), 'float32', 'local')\nv[0] = x",
        {
            "shape": "v = T.alloc_buffer((8,), 'float32', 'local')\nv[0] = x",
            "dtype": "v = T.alloc_buffer((4,), 'float16', 'local')\nv[0] = x",
            "scope": "v = T.alloc_buffer((4,), 'float32', 'shared')\nv[0] = x",
        },
    ),
    "alloc_var": (
        "v = T.alloc_var('int32', 1)",
        {
            "dtype": "v = T.alloc_var('int64', 1)",
            "init": "v = T.alloc_var('int32', 2)",
            "scope": "v = T.alloc_var('int32', 1, scope='local')",
        },
    ),
    "alloc_signal": ("s = T.alloc_signal((2,))", {"shape": "s = T.alloc_signal((4,))"}),
    "alloc_cluster_barrier": (
        "m = T.alloc_cluster_barrier(128)",
        {"arrive_count": "m = T.alloc_cluster_barrier([128, 1])"},
    ),
    "alloc_barrier": ("m = T.alloc_barrier(128)", {"arrive_count": "m = T.alloc_barrier([128, 1])"}),
    "make_tensor": (
        "v = T.make_tensor(Q[0], (64, 64), 'float32')\nv[0, 0] = x",
        {
            "ptr": "v = T.make_tensor(Q[1], (64, 64), 'float32')\nv[0, 0] = x",
            "shape": "v = T.make_tensor(Q[0], (64, 32), 'float32')\nv[0, 0] = x",
            "dtype": "v = T.make_tensor(Q[0], (64, 64), 'float16')\nv[0, 0] = x",
            "strides": "v = T.make_tensor(Q[0], (64, 64), 'float32', (1, 64))\nv[0, 0] = x",
        },
    ),
    "view": (
        "v = T.view(a, (128, 32), 'float32')",
        {
            "buffer": "v = T.view(b, (128, 32), 'float32')",
            "shape": "v = T.view(a, (32, 128), 'float32')",
            "dtype": "v = T.view(a, (128, 32), 'int32')",
        },
    ),
    "reshape": (
        "v = T.reshape(a, (128, 32))",
        {"buffer": "v = T.reshape(b, (128, 32))", "shape": "v = T.reshape(a, (32, 128))"},
    ),
    "copy": (
        f"{DEVICE}T.copy(A, S, dst=1, signal=sig[0])",
        {
            "operands": f"{DEVICE}T.copy(B, S, dst=1, signal=sig[0])",
            "src": f"{DEVICE}T.copy(S, A, src=1)",
            "dst": f"{DEVICE}T.copy(A, S, dst=2, signal=sig[0])",
            "signal": f"{DEVICE}T.copy(A, S, dst=1, signal=sig[1])",
            "value": f"{DEVICE}T.copy(A, S, dst=1, signal=sig[0], value=2)",
            "signal_op": f"{DEVICE}T.copy(A, S, dst=1, signal=sig[0], signal_op='set')",
            "op": f"{DEVICE}T.copy(A, S, dst=1, signal=sig[0], op='add')",
            "blocking": f"{DEVICE}T.copy(A, S, dst=1, signal=sig[0], blocking=False)",
            "coalesced_width": f"{DEVICE}T.copy(A, S, dst=1, signal=sig[0], coalesced_width=2)",
            "disable_tma": f"{DEVICE}T.copy(A, S, dst=1, signal=sig[0], disable_tma=True)",
            "prefer_instruction": f"{DEVICE}T.copy(A, S, dst=1, signal=sig[0], prefer_instruction='cp_async')",
            "annotations": f"{DEVICE}T.copy(A, S, dst=1, signal=sig[0], annotations={{'coalesced_width': 2}})",
            "loop_layout": f"{DEVICE}T.copy(A, S, dst=1, signal=sig[0], loop_layout=T.Fragment((64, 64), lambda p, q: (p * 2 + q // 32, q % 32)))",
        },
    ),
    "fill": ("T.fill(a, 2)", {"buffer": "T.fill(b, 2)", "value": "T.fill(a, 3)"}),
    "clear": ("T.clear(a)", {"buffer": "T.clear(b)"}),
    "gemm": (
        "T.gemm(h, g, f)\nT.copy(f, A)",
        {
            "A": "T.gemm(g, g, f)\nT.copy(f, A)",
            "B": "T.gemm(h, h, f)\nT.copy(f, A)",
            "C": "T.gemm(h, g, c)\nT.copy(f, A)",
            "transpose_A": "T.gemm(h, g, f, transpose_A=True)\nT.copy(f, A)",
            "transpose_B": "T.gemm(h, g, f, transpose_B=True)\nT.copy(f, A)",
            "policy": "T.gemm(h, g, f, policy=T.GemmWarpPolicy.FullCol)\nT.copy(f, A)",
            "clear_accum": "T.gemm(h, g, f, clear_accum=True)\nT.copy(f, A)",
            "wg_wait": "T.gemm(h, g, f, wg_wait=-1)\nT.copy(f, A)",
            "mbar": "T.gemm(h, g, f, mbar=1)\nT.copy(f, A)",
            "precision": "T.gemm(h, g, f, precision='tf32')\nT.copy(f, A)",
        },
    ),
    "gemm_sp": (
        "T.gemm_sp(h[0:64, 0:32], e, g, f)",
        {
            "A_sparse": "T.gemm_sp(h[0:64, 32:64], e, g, f)",
            "E": "T.gemm_sp(h[0:64, 0:32], e2, g, f)",
            "B": "T.gemm_sp(h[0:64, 0:32], e, h, f)",
            "C": "T.gemm_sp(h[0:64, 0:32], e, g, c)",
            "transpose_A": "T.gemm_sp(h[0:32, 0:64], e, g, f, transpose_A=True)",
            "transpose_B": "T.gemm_sp(h[0:64, 0:32], e, g, f, transpose_B=True)",
            "policy": "T.gemm_sp(h[0:64, 0:32], e, g, f, policy=T.GemmWarpPolicy.FullCol)",
            "clear_accum": "T.gemm_sp(h[0:64, 0:32], e, g, f, clear_accum=True)",
            "wg_wait": "T.gemm_sp(h[0:64, 0:32], e, g, f, wg_wait=-1)",
            "transpose_E": "T.gemm_sp(h[0:64, 0:32], e, g, f, transpose_E=True)",
        },
    ),
    "reduce": (
        "T.reduce(f, r, 'max', 1)",
        {
            "buffer": "T.reduce(a, r, 'max', 1)",
            "out": "T.reduce(f, k, 'max', 1)",
            "reduce_type": "T.reduce(f, r, 'sum', 1)",
            "dim": "T.reduce(f, r, 'max', 0)",
            "clear": "T.reduce(f, r, 'max', 1, clear=False)",
            "nan_propagate": "T.reduce(f, r, 'max', 1, nan_propagate=True)",
        },
    ),
    "atomic_addx2": (
        "T.atomic_addx2(A[0, 0], a[0, 0])",
        {
            "dst": "T.atomic_addx2(B[0, 0], a[0, 0])",
            "value": "T.atomic_addx2(A[0, 0], b[0, 0])",
            "return_prev": "T.atomic_addx2(A[0, 0], a[0, 0], return_prev=True)",
        },
    ),
    "atomic_addx4": (
        "T.atomic_addx4(A[0, 0], a[0, 0])",
        {
            "dst": "T.atomic_addx4(B[0, 0], a[0, 0])",
            "value": "T.atomic_addx4(A[0, 0], b[0, 0])",
            "return_prev": "T.atomic_addx4(A[0, 0], a[0, 0], return_prev=True)",
        },
    ),
    "atomic_load": ("B[0, 0] = T.atomic_load(A[0, 0])", {"src": "B[0, 0] = T.atomic_load(A[0, 1])"}),
    "atomic_store": (
        "T.atomic_store(A[0, 0], x)",
        {"dst": "T.atomic_store(A[0, 1], x)", "value": "T.atomic_store(A[0, 0], 1)"},
    ),
    "print": ("T.print(x)", {"obj": "T.print(n)", "msg": "T.print(x, 'it')"}),
    "device_assert": (
        "T.device_assert(n > 0)",
        {"condition": "T.device_assert(n > 1)", "msg": "T.device_assert(n > 0, 'it')"},
    ),
    "signal": (
        f"{DEVICE}T.signal(sig[0])",
        {
            "counter_": f"{DEVICE}T.signal(sig[1])",
            "value": f"{DEVICE}T.signal(sig[0], 2)",
            "op": f"{DEVICE}T.signal(sig[0], op='set')",
            "dst": f"{DEVICE}T.signal(sig[0], dst=1)",
        },
    ),
    "wait": (
        f"{DEVICE}T.wait(sig[0])",
        {
            "counter_": f"{DEVICE}T.wait(sig[1])",
            "value": f"{DEVICE}T.wait(sig[0], 2)",
            "cmp": f"{DEVICE}T.wait(sig[0], cmp='eq')",
        },
    ),
    "test": (
        f"{DEVICE}T.device_assert(T.test(sig[0]))",
        {
            "counter_": f"{DEVICE}T.device_assert(T.test(sig[1]))",
            "value": f"{DEVICE}T.device_assert(T.test(sig[0], 2))",
            "cmp": f"{DEVICE}T.device_assert(T.test(sig[0], cmp='eq'))",
        },
    ),
    "put": (
        f"{DEVICE}T.put(x, S[0, 0], dst=0, signal=sig[0])",
        {
            "value": f"{DEVICE}T.put(n, S[0, 0], dst=0, signal=sig[0])",
            "target": f"{DEVICE}T.put(x, S[0, 1], dst=0, signal=sig[0])",
            "dst": f"{DEVICE}T.put(x, S[0, 0], dst=1, signal=sig[0])",
            "signal": f"{DEVICE}T.put(x, S[0, 0], dst=0, signal=sig[1])",
            "signal_value": f"{DEVICE}T.put(x, S[0, 0], dst=0, signal=sig[0], signal_value=2)",
            "signal_op": f"{DEVICE}T.put(x, S[0, 0], dst=0, signal=sig[0], signal_op='set')",
        },
    ),
    "put_packets": (
        f"{DEVICE}T.put_packets(f, P[rank, :, :], dst=0)",
        {
            "src": f"{DEVICE}T.put_packets(a, P[rank, :, :], dst=0)",
            "box": f"{DEVICE}T.put_packets(f, P[0, :, :], dst=0)",
            "dst": f"{DEVICE}T.put_packets(f, P[rank, :, :], dst=1)",
        },
    ),
    "get_packets": (
        f"{DEVICE}T.get_packets(P[0, :, :], f)",
        {
            "box": f"{DEVICE}T.get_packets(P[rank, :, :], f)",
            "dst": f"{DEVICE}T.get_packets(P[0, :, :], a)",
        },
    ),
    "all_gather": (
        f"{DEVICE}T.all_gather(S, R)",
        {"src": f"{DEVICE}T.all_gather(a, R)", "dst": f"{DEVICE}T.all_gather(S, S)"},
    ),
    "all_to_all": (
        f"{DEVICE}T.all_to_all(R, R)",
        {"src": f"{DEVICE}T.all_to_all(S, R)", "dst": f"{DEVICE}T.all_to_all(R, S)"},
    ),
    "broadcast": (
        f"{DEVICE}T.broadcast(A, S)",
        {
            "src": f"{DEVICE}T.broadcast(B, S)",
            "dst": f"{DEVICE}T.broadcast(A, B)",
            "root": f"{DEVICE}T.broadcast(A, S, root=1)",
        },
    ),
    "reduce_scatter": (
        f"{DEVICE}T.reduce_scatter(R, A)",
        {
            "src": f"{DEVICE}T.reduce_scatter(S, A)",
            "dst": f"{DEVICE}T.reduce_scatter(R, B)",
            "op": f"{DEVICE}T.reduce_scatter(R, A, op='max')",
        },
    ),
    "all_reduce": (
        f"{DEVICE}T.all_reduce(S, A)",
        {
            "src": f"{DEVICE}T.all_reduce(B, A)",
            "dst": f"{DEVICE}T.all_reduce(S)",
            "op": f"{DEVICE}T.all_reduce(S, A, op='max')",
        },
    ),
    "named_barrier_arrive": (
        f"{THREAD}T.named_barrier_arrive(1, 64)",
        {
            "barrier_id": f"{THREAD}T.named_barrier_arrive(2, 64)",
            "thread_count": f"{THREAD}T.named_barrier_arrive(1, 96)",
        },
    ),
    "sync_threads": (
        f"{THREAD}T.sync_threads(1, 64)",
        {"barrier_id": f"{THREAD}T.sync_threads(2, 64)", "arrive_count": f"{THREAD}T.sync_threads(1, 96)"},
    ),
    "tvm_storage_sync": (
        f"{THREAD}T.tvm_storage_sync('shared')",
        {"storage_scope": f"{THREAD}T.tvm_storage_sync('warp')"},
    ),
    "sync_warp": (f"{THREAD}T.sync_warp()", {"mask": f"{THREAD}T.sync_warp(1)"}),
    "tma_copy": (
        "T.tma_copy(A, a, barrier=m)",
        {
            "src": "T.tma_copy(B, a, barrier=m)",
            "dst": "T.tma_copy(A, b, barrier=m)",
            "barrier": "T.tma_copy(A, a)",
            "reduce": "T.tma_copy(A, a, barrier=m, reduce='add')",
            "cluster_mask": "with T.ClusterKernel(2, threads=128, cluster_dims=2):\n"
            "    a, m = T.alloc_shared((64, 64), 'float32'), T.alloc_barrier(128)\n"
            "    T.tma_copy(A, a, barrier=m, cluster_mask=3)",
            "leader_scope_threads": "T.tma_copy(A, a, barrier=m, leader_scope_threads=32)",
        },
    ),
    "tma_store_wait": (
        "T.tma_store_wait(0)",
        {
            "count": "T.tma_store_wait(1)",
            "read": "T.tma_store_wait(0, read=True)",
        },
    ),
    "mbarrier_arrive": (
        "T.mbarrier_arrive(m)",
        {
            "barrier": "T.mbarrier_arrive(ms[1])",
            "cta_id": "far = T.alloc_cluster_barrier(128)\nT.mbarrier_arrive(far, 0)",
            "mbarrier": "T.mbarrier_arrive(mbarrier=ms[1])",
        },
    ),
    "barrier_arrive": ("T.barrier_arrive(m)", {"barrier": "T.barrier_arrive(ms[1])"}),
    "mbarrier_expect_tx": (
        "T.mbarrier_expect_tx(m, 64)",
        {"barrier": "T.mbarrier_expect_tx(ms[1], 64)", "tx": "T.mbarrier_expect_tx(m, 32)"},
    ),
    "mbarrier_wait_parity": (
        "T.mbarrier_wait_parity(m, 0)",
        {
            "barrier": "T.mbarrier_wait_parity(ms[1], 0)",
            "parity": "T.mbarrier_wait_parity(m, 1)",
            "mbarrier": "T.mbarrier_wait_parity(mbarrier=ms[1], parity=0)",
        },
    ),
    "barrier_wait": (
        "T.barrier_wait(m)",
        {"barrier": "T.barrier_wait(ms[1])", "parity": "T.barrier_wait(m, 1)"},
    ),
    "set_max_nreg": (
        'with T.Scale("warpgroup"):\n    T.set_max_nreg(64, 0)',
        {
            "reg_count": 'with T.Scale("warpgroup"):\n    T.set_max_nreg(128, 0)',
            "is_inc": 'with T.Scale("warpgroup"):\n    T.set_max_nreg(64, 1)',
        },
    ),
    "inc_max_nreg": (
        'with T.Scale("warpgroup"):\n    T.inc_max_nreg(64)',
        {"reg_count": 'with T.Scale("warpgroup"):\n    T.inc_max_nreg(128)'},
    ),
    "dec_max_nreg": (
        'with T.Scale("warpgroup"):\n    T.dec_max_nreg(64)',
        {"reg_count": 'with T.Scale("warpgroup"):\n    T.dec_max_nreg(128)'},
    ),
    "wait_wgmma": ("T.wait_wgmma(0)", {"count": "T.wait_wgmma(1)"}),
    "warpgroup_wait": ("T.warpgroup_wait(0)", {"count": "T.warpgroup_wait(1)"}),
    "get_thread_binding": (
        f"{THREAD}A[0, T.get_thread_binding(0) % 64] = x",
        {"dim": f"{THREAD}A[0, T.get_thread_binding(1) % 64] = x"},
    ),
    "shuffle_elect": (
        f"{THREAD}if T.shuffle_elect(128):\n        A[0, 0] = x",
        {"thread_extent": f"{THREAD}if T.shuffle_elect(64):\n        A[0, 0] = x"},
    ),
    "cast": (
        "A[0, 0] = T.cast(x, 'int32')",
        {"value": "A[0, 0] = T.cast(n, 'int32')", "dtype": "A[0, 0] = T.cast(x, 'int64')"},
    ),
    "Cast": (
        "A[0, 0] = T.Cast('int32', x)",
        {"value": "A[0, 0] = T.Cast('int32', n)", "dtype": "A[0, 0] = T.Cast('int64', x)"},
    ),
    "reinterpret": (
        "I[0, 0] = T.reinterpret('int32', x)",
        {
            "a": "I[0, 0] = T.reinterpret('uint32', x)",
            "b": "I[0, 0] = T.reinterpret('int32', x * 2)",
            "dtype": "I[0, 0] = T.reinterpret(x, dtype='uint32')",
        },
    ),
    "if_then_else": (
        "A[0, 0] = T.if_then_else(n > 0, x, 1)",
        {
            "condition": "A[0, 0] = T.if_then_else(n > 1, x, 1)",
            "a": "A[0, 0] = T.if_then_else(n > 0, x * 2, 1)",
            "b": "A[0, 0] = T.if_then_else(n > 0, x, 2)",
        },
    ),
    "Select": (
        "A[0, 0] = T.Select(n > 0, x, 1)",
        {
            "condition": "A[0, 0] = T.Select(n > 1, x, 1)",
            "a": "A[0, 0] = T.Select(n > 0, x * 2, 1)",
            "b": "A[0, 0] = T.Select(n > 0, x, 2)",
        },
    ),
    "clamp": (
        "A[0, 0] = T.clamp(x, 0, 1)",
        {
            "x": "A[0, 0] = T.clamp(x * 2, 0, 1)",
            "min_val": "A[0, 0] = T.clamp(x, -1, 1)",
            "max_val": "A[0, 0] = T.clamp(x, 0, 2)",
        },
    ),
    "max": ("A[0, 0] = T.max(x, 1)", {"a": "A[0, 0] = T.max(x * 2, 1)", "rest": "A[0, 0] = T.max(x, 2)"}),
    "min": ("A[0, 0] = T.min(x, 1)", {"a": "A[0, 0] = T.min(x * 2, 1)", "rest": "A[0, 0] = T.min(x, 2)"}),
    "any_of": (
        "if T.any_of(n > 0, n > 3):\n    A[0, 0] = x",
        {"conditions": "if T.any_of(n > 0, n > 4):\n    A[0, 0] = x"},
    ),
    "all_of": (
        "if T.all_of(n > 0, n > 3):\n    A[0, 0] = x",
        {"conditions": "if T.all_of(n > 0, n > 4):\n    A[0, 0] = x"},
    ),
    "infinity": ("A[0, 0] = T.infinity('float32')", {"dtype": "A[0, 0] = T.infinity('float16')"}),
    "max_value": ("A[0, 0] = T.max_value('float32')", {"dtype": "A[0, 0] = T.max_value('float16')"}),
    "min_value": ("A[0, 0] = T.min_value('float32')", {"dtype": "A[0, 0] = T.min_value('float16')"}),
    "__ldg": (
        "A[0, 0] = T.__ldg(B[0, 0])",
        {"x": "A[0, 0] = T.__ldg(B[0, 1])", "index": "A[0, 0] = T.__ldg(B, (0, 1))"},
    ),
    "ieee_fmaf": (
        "A[0, 0] = T.ieee_fmaf(x, x, x)",
        {
            "a": "A[0, 0] = T.ieee_fmaf(x * 2, x, x)",
            "b": "A[0, 0] = T.ieee_fmaf(x, x * 2, x)",
            "c": "A[0, 0] = T.ieee_fmaf(x, x, x * 2)",
            "rounding_mode": "A[0, 0] = T.ieee_fmaf(x, x, x, 'rz')",
        },
    ),
    "ldexp": (
        "A[0, 0] = T.ldexp(x, n)",
        {"x": "A[0, 0] = T.ldexp(x * 2, n)", "n": "A[0, 0] = T.ldexp(x, n + 1)"},
    ),
    "align_up": (
        "A[0, 0] = T.align_up(n, 3)",
        {"a": "A[0, 0] = T.align_up(n * 2, 3)", "b": "A[0, 0] = T.align_up(n, 4)"},
    ),
    "index_to_coordinates": (
        f"{THREAD}p, q = T.index_to_coordinates(t, (8, 4))\n    A[p, q] = x",
        {
            "index": f"{THREAD}p, q = T.index_to_coordinates(t + 1, (8, 4))\n    A[p, q] = x",
            "shape": f"{THREAD}p, q = T.index_to_coordinates(t, (4, 8))\n    A[p, q] = x",
        },
    ),
    "ceildiv": (
        "A[0, 0] = T.ceildiv(n, 3)",
        {"a": "A[0, 0] = T.ceildiv(n * 2, 3)", "b": "A[0, 0] = T.ceildiv(n, 4)"},
    ),
}
for _name in ("sum", "max", "min", "prod", "abssum", "absmax"):
    USES[f"reduce_{_name}"] = (
        f"T.reduce_{_name}(f, r, 1)",
        {
            "buffer": f"T.reduce_{_name}(a, r, 1)",
            "out": f"T.reduce_{_name}(f, k, 1)",
            "dim": f"T.reduce_{_name}(f, r, 0)",
            "clear": f"T.reduce_{_name}(f, r, 1, clear=False)",
            **(
                {"nan_propagate": f"T.reduce_{_name}(f, r, 1, nan_propagate=True)"}
                if _name in ("max", "min", "absmax")
                else {}
            ),
        },
    )
USES["round"] = ("A[0, 0] = T.round(x)", {
    "x": "A[0, 0] = T.round(x * 2)",
    "rounding_mode": "A[0, 0] = T.round(x, 'ties-away-from-zero')",
})  # fmt: skip
for _name in ("and", "or", "xor"):
    USES[f"reduce_bit{_name}"] = (
        f"T.reduce_bit{_name}(i, k, 1)",
        {
            "buffer": f"T.reduce_bit{_name}(f, k, 1)",
            "out": f"T.reduce_bit{_name}(i, r, 1)",
            "dim": f"T.reduce_bit{_name}(i, k, 0)",
            "clear": f"T.reduce_bit{_name}(i, k, 1, clear=False)",
        },
    )
for _name in ("cumsum", "cummax"):
    USES[_name] = (
        f"T.{_name}(a, b)",
        {
            "src": f"T.{_name}(c, b)",
            "dst": f"T.{_name}(a, c)",
            "dim": f"T.{_name}(a, b, dim=1)",
            "reverse": f"T.{_name}(a, b, reverse=True)",
        },
    )
for _name in ("max", "min"):
    USES[f"arg{_name}"] = (
        f"T.arg{_name}(a, r, k)",
        {
            "src": f"T.arg{_name}(b, r, k)",
            "values": f"T.arg{_name}(a, a[0, 0:64], k)",
            "indices": f"T.arg{_name}(a, r, i[0, 0:64])",
            "dim": f"T.arg{_name}(a, r, k, dim=0)",
        },
    )
USES["topk"] = ("T.topk(a, b[0:64, 0:4], i[0:64, 0:4], 4)", {
    "src": "T.topk(f, b[0:64, 0:4], i[0:64, 0:4], 4)", "values": "T.topk(a, c[0:64, 0:4], i[0:64, 0:4], 4)",
    "indices": "T.topk(a, b[0:64, 0:4], i[0:64, 4:8], 4)", "k": "T.topk(a, b[0:64, 0:4], i[0:64, 0:4], 3)",
})  # fmt: skip
for _name in ("add", "max", "min"):
    USES[f"atomic_{_name}"] = (f"T.atomic_{_name}(A[0, 0], x)", {
        "dst": f"T.atomic_{_name}(A[0, 1], x)", "value": f"T.atomic_{_name}(A[0, 0], x * 2)",
        "return_prev": f"B[0, 0] = T.atomic_{_name}(A[0, 0], x, return_prev=True)",
    })  # fmt: skip
for _name in ("any_sync", "all_sync", "ballot_sync", "match_any_sync", "match_all_sync"):
    _put = f"{THREAD}I[0, t % 64] = T.cast(T.{_name}"
    USES[_name] = (
        f"{_put}(n), 'int32')",
        {
            "value" if "match" in _name else "predicate": f"{_put}(n * 2), 'int32')",
            "mask": f"{_put}(n, mask=3), 'int32')",
        },
    )
for _name in ("ballot", "syncthreads_count", "syncthreads_and", "syncthreads_or"):
    _put = f"{THREAD}I[0, t % 64] = T.cast(T.{_name}"
    USES[_name] = (f"{_put}(n), 'int32')", {"predicate": f"{_put}(n * 2), 'int32')"})
for _name in ("sum", "max", "min", "bitand", "bitor"):
    _put = f"{THREAD}I[0, t % 64] = T.warp_reduce_{_name}"
    USES[f"warp_reduce_{_name}"] = (f"{_put}(n)", {"value": f"{_put}(n * 2)"})
for _name in ("up", "down"):
    _put = f"{THREAD}A[0, t % 64] = T.tvm_warp_shuffle_{_name}"
    USES[f"tvm_warp_shuffle_{_name}"] = (
        f"{_put}(0xFFFFFFFF, x, 1, 32, 32)",
        {
            "mask": f"{_put}(1, x, 1, 32, 32)",
            "value": f"{_put}(0xFFFFFFFF, x * 2, 1, 32, 32)",
            "offset": f"{_put}(0xFFFFFFFF, x, 2, 32, 32)",
            "width": f"{_put}(0xFFFFFFFF, x, 1, 16, 32)",
            "warp_size": f"{_put}(0xFFFFFFFF, x, 1, 32, 8)",
        },
    )
for _name in ("get_lane_idx", "get_warp_idx", "get_warp_idx_sync", "get_warp_group_idx"):
    _put = f"{THREAD}I[0, t % 64] = T.{_name}"
    USES[_name] = (f"{_put}()", {"warp_size": f"{_put}(16)"})
USES["get_warp_group_idx"][1]["warps_per_group"] = f"{_put}(None, 2)"
BAR = "b = T.alloc_barrier([1, 2])\n"
USES |= {
    "sync_global": ("T.sync_global()", {}),
    "cluster_sync": ("T.cluster_sync()", {}),
    "cluster_arrive": ("T.cluster_arrive()", {}),
    "cluster_arrive_relaxed": ("T.cluster_arrive_relaxed()", {}),
    "cluster_wait": ("T.cluster_wait()", {}),
    "pdl_sync": ("T.pdl_sync()", {}),
    "pdl_trigger": ("T.pdl_trigger()", {}),
    "annotate_min_blocks_per_sm": (
        "T.annotate_min_blocks_per_sm(2)\nA[bx, 0] = x",
        {"n": "T.annotate_min_blocks_per_sm(3)\nA[bx, 0] = x"},
    ),
    "mbarrier_arrive_expect_tx": (
        f"{BAR}T.mbarrier_arrive_expect_tx(b[0], 128)",
        {
            "mbarrier": f"{BAR}T.mbarrier_arrive_expect_tx(b[1], 128)",
            "tx": f"{BAR}T.mbarrier_arrive_expect_tx(b[0], 64)",
        },
    ),
}
USES["loop_break"] = (
    "for e in T.serial(4):\n    if I[0, e] > 0:\n        T.loop_break()\n    A[0, e] = x",
    {},
)
for _name in ("activemask", "tvm_warp_activemask"):
    USES[_name] = (f"{THREAD}I[0, t % 64] = T.cast(T.{_name}(), 'int32')", {})
for _name in ("sync", "up", "down", "xor"):
    _put, _to = (
        f"{THREAD}A[0, t % 64] = T.shfl_{_name}",
        {"sync": "srcLane", "xor": "offset"}.get(_name, "delta"),
    )
    USES[f"shfl_{_name}"] = (
        f"{_put}(x, 1)",
        {
            "value": f"{_put}(x * 2, 1)",
            _to: f"{_put}(x, 2)",
            "width": f"{_put}(x, 1, width=8)",
            "mask": f"{_put}(x, 1, mask=3)",
        },
    )
for _name in ("add", "sub", "mul", "fdiv"):
    USES[f"ieee_{_name}"] = (f"A[0, 0] = T.ieee_{_name}(x, 3.0)", {
        "a": f"A[0, 0] = T.ieee_{_name}(x * 2, 3.0)", "b": f"A[0, 0] = T.ieee_{_name}(x, 4.0)",
        "rounding_mode": f"A[0, 0] = T.ieee_{_name}(x, 3.0, 'rz')",
    })  # fmt: skip
for _name in ("sqrt", "frcp", "fsqrt"):
    USES[f"ieee_{_name}"] = (f"A[0, 0] = T.ieee_{_name}(x)", {
        "x": f"A[0, 0] = T.ieee_{_name}(x * 2)", "rounding_mode": f"A[0, 0] = T.ieee_{_name}(x, 'rz')",
    })  # fmt: skip
#: functions of values, by how many
UNARY = """abs exp exp2 exp10 log log2 log10 log1p sqrt rsqrt sin cos tan tanh sigmoid erf floor ceil trunc isnan isinf isfinite sinh cosh
asin acos atan asinh acosh atanh nearbyint fast_rcp bitwise_not popcount clz likely ieee_frsqrt __exp __exp2 __exp10 __log __log2 __log10 __sin __cos __tan""".split()
BINARY = """nextafter pow power fmod atan2 copysign hypot floordiv floormod truncdiv truncmod shift_left shift_right bitwise_and bitwise_or
bitwise_xor""".split()
for _name in ("or", "and", "xor", "exch"):
    USES[f"atomic_{_name}"] = (
        f"T.atomic_{_name}(I[0, 0], n)",
        {
            "dst": f"T.atomic_{_name}(I[0, 1], n)",
            "value": f"T.atomic_{_name}(I[0, 0], n + 1)",
            **({} if _name == "exch" else {"return_prev": f"T.atomic_{_name}(I[0, 0], n, return_prev=True)"}),
        },
    )
VECTOR = "v, w, u = T.float32x2(x, 1), T.float32x2(x, 2), T.float32x2(x, 3)\n"
for _name in ("add2", "sub2", "mul2", "max2", "min2", "fma2", "abs2"):
    _given = {"fma2": ["v", "w", "u"], "abs2": ["v"]}.get(_name, ["v", "w"])
    USES[_name] = (
        VECTOR + f"v = T.{_name}({', '.join(_given)})\nA[0, 0] = T.extract_lane(v, 1)",
        {
            p: VECTOR
            + f"v = T.{_name}({', '.join([*_given[:k], 'T.float32x2(x, 5)', *_given[k + 1 :]])})\n"
            + "A[0, 0] = T.extract_lane(v, 1)"
            for k, p in enumerate("xyz"[: len(_given)])
        },
    )
USES["extract_lane"] = (
    VECTOR + "A[0, 0] = T.extract_lane(v, 1)",
    {
        "vector": VECTOR + "A[0, 0] = T.extract_lane(w, 1)",
        "lane": VECTOR + "A[0, 0] = T.extract_lane(v, 0)",
    },
)
USES["Broadcast"] = (
    "B[0, 0:4] = T.Broadcast(x, 4)",
    {"value": "B[0, 0:4] = T.Broadcast(x * 2, 4)", "lanes": "B[0, 0:8] = T.Broadcast(x, 8)"},
)
USES["Ramp"] = (
    "B[0, T.Ramp(0, 1, 2)] = A[0, T.Ramp(0, 1, 2)]",
    {
        "base": "B[0, T.Ramp(0, 1, 2)] = A[0, T.Ramp(2, 1, 2)]",
        "stride": "B[0, T.Ramp(0, 1, 2)] = A[0, T.Ramp(0, 2, 2)]",
        "lanes": "B[0, T.Ramp(0, 1, 4)] = A[0, T.Ramp(0, 1, 4)]",
    },
)
for _bits in (32, 64, 128, 256):
    for _kind, _of in (("g", ("A", "B")), ("s", ("a", "b"))):
        if _kind == "s" and _bits == 256:
            continue
        _value = "T.uint32(n)" if _bits == 32 else f"T.uint32x{_bits // 32}(n)"
        _pred = {"pred": f"T.stg{_bits}(A[0, 0], {_value}, n > 0)"} if _kind == "g" else {}
        USES[f"st{_kind}{_bits}"] = (
            f"T.st{_kind}{_bits}({_of[0]}[0, 0], {_value})",
            {
                "dst": f"T.st{_kind}{_bits}({_of[1]}[0, 0], {_value})",
                "value": f"T.st{_kind}{_bits}({_of[0]}[0, 0], {_value.replace('(n', '(n + 1')})",
                **_pred,
            },
        )
        _put = f"T.stg{_bits}(S[0, 0], T.ld{_kind}{_bits}({{}}[0, 0]{{}}))"
        USES[f"ld{_kind}{_bits}"] = (
            _put.format(_of[0], ""),
            {
                "src": _put.format(_of[1], ""),
                **({"pred": _put.format(_of[0], ", n > 0")} if _kind == "g" else {}),
            },
        )
#: of the host: expressions, by what they are equal to
HOST: dict[str, tuple[str, dict[str, str]]] = {
    "Ref": ("T.Ref", {}),
    "Var": (
        "(lambda v: (v.name, v.dtype, v.multiple_of))(T.Var('m'))",
        {
            "name": "(lambda v: (v.name, v.dtype, v.multiple_of))(T.Var('k'))",
            "dtype": "(lambda v: (v.name, v.dtype, v.multiple_of))(T.Var('m', 'int64'))",
            "multiple_of": "(lambda v: (v.name, v.dtype, v.multiple_of))(T.Var('m', multiple_of=8))",
        },
    ),
    "Tensor": (
        "T.Tensor((4, 8), 'float32')",
        {
            "shape": "T.Tensor((8, 4), 'float32')",
            "dtype": "T.Tensor((4, 8), 'float16')",
            "strides": "T.Tensor((4, 8), 'float32', strides=(16, 1))",
        },
    ),
    "SymmTensor": (
        "T.SymmTensor((4, 8), 'float32')",
        {
            "shape": "T.SymmTensor((8, 4), 'float32')",
            "dtype": "T.SymmTensor((4, 8), 'float16')",
            "strides": "T.SymmTensor((4, 8), 'float32', strides=(16, 1))",
        },
    ),
    "StridedTensor": (
        "T.StridedTensor((4, 8), (8, 1), 'float32')",
        {
            "shape": "T.StridedTensor((4, 4), (8, 1), 'float32')",
            "strides": "T.StridedTensor((4, 8), (16, 1), 'float32')",
            "dtype": "T.StridedTensor((4, 8), (8, 1), 'float16')",
        },
    ),
    "Packets": (
        "T.Packets((4, 8))",
        {
            "shape": "T.Packets((4, 16))",
            "dtype": 'T.Packets((4, 8), "bfloat16")',
            "dense": "T.Packets((4, 8), dense=True)",
        },
    ),
    "Signal": ("T.Signal((4,))", {"shape": "T.Signal((8,))", "keep": "T.Signal((4,), keep=True)"}),
    "dynamic": (
        "(T.dynamic('m'), T.dynamic('m').multiple_of, T.dynamic('m').dtype)",
        {
            "name": "(T.dynamic('k'), T.dynamic('k').multiple_of, T.dynamic('m').dtype)",
            "dtype": "(T.dynamic('m', 'int64'), T.dynamic('m').multiple_of, T.dynamic('m', 'int64').dtype)",
            "multiple_of": "(T.dynamic('m'), T.dynamic('m', multiple_of=8).multiple_of, T.dynamic('m').dtype)",
        },
    ),
    "const": ("T.const('m')", {"name": "T.const('k')"}),
    "canonical": ("T.canonical('half')", {"value": "T.canonical('float')"}),
    "macro": ("T.macro(one).func", {"func": "T.macro(two).func"}),
    "prim_func": ("T.prim_func(one).func", {"func": "T.prim_func(two).func"}),
    "PrimFunc": ("T.PrimFunc(one).func", {"func": "T.PrimFunc(two).func"}),
}
SAME = {
    "Buffer": "Tensor",
    "symbolic": "dynamic",
    "inline": "macro",
    "cdiv": "ceildiv",
    "c2d_im2col": "im2col",
    "make_tensor_from_addr": "make_tensor",
    "Serial": "serial",
    "Unroll": "unroll",
    "Vectorized": "vectorized",
    "parallel": "Parallel",
    "SharedBuffer": "Tensor",
    "FragmentBuffer": "Tensor",
    "LocalBuffer": "Tensor",
}
#: an enumeration, a dtype's class and one by indexing; T.empty, below; T.alloc_global, which stands in front of
#: T.Kernel (tests/unit/test_several.py); and T.Scale, whose team= is not read yet
APART = {
    "alloc_global",
    "GemmWarpPolicy",
    "dtype",
    "dyn",
    "empty",
    "Scale",
    "ptr",
    "tfloat32",
    *NARROW,
    *VECTORS,
}


TILED = "with T.Kernel(8, 8) as (bx, by):\n    {}\n    A[bx, by] = x"
LOOP = (
    "with T.Kernel(1, threads=128):\n    h, g = T.alloc_shared((64, 64), 'float16'), T.alloc_shared((64, 64), 'float16')\n"
    "    f = T.alloc_fragment((64, 64), 'float32')\n    T.clear(f)\n    for p in {}:\n        T.copy(H, h{})\n        T.copy(H, g)\n"
    "        {}\n    T.copy(f, A)"
)
WIDE = (
    "with T.Kernel(1, threads=256):\n    h, f = T.alloc_shared((128, 64), 'float16'), T.alloc_fragment((128, 128), 'float32')\n    T.clear(f)\n"
    "    T.gemm(h, h, f, transpose_B=True, policy=T.GemmWarpPolicy.{})\n    T.copy(f[0:64, 0:64], A)"
)
#: what tile IR merely notes: the code that is printed for a GPU must show it. Two uses each
HEEDED = {
    "use_swizzle.panel_size": (TILED.format("T.use_swizzle(4)"), TILED.format("T.use_swizzle(2)")),
    "use_swizzle.order": (TILED.format("T.use_swizzle(4)"), TILED.format("T.use_swizzle(4, order='column')")),
    "use_swizzle.enable": (TILED.format("T.use_swizzle(4)"), TILED.format("T.use_swizzle(4, enable=False)")),
    "Pipelined.num_stages": (
        LOOP.format("T.Pipelined(8, num_stages=2)", "", "T.gemm(h, g, f)"),
        LOOP.format("T.Pipelined(8, num_stages=3)", "", "T.gemm(h, g, f)"),
    ),
    "Pipelined.stage": (
        LOOP.format("T.Pipelined(8, order=[0, 1, 2], stage=[0, 0, 1])", "", "T.gemm(h, g, f)"),
        LOOP.format("T.Pipelined(8, order=[0, 1, 2], stage=[0, 0, 2])", "", "T.gemm(h, g, f)"),
    ),
    "copy.disable_tma": (
        LOOP.format("T.Pipelined(8, num_stages=2)", "", "T.gemm(h, g, f)"),
        LOOP.format("T.Pipelined(8, num_stages=2)", ", disable_tma=True", "T.gemm(h, g, f)"),
    ),
    "copy.coalesced_width": ("T.copy(A, f)\nT.copy(f, B)", "T.copy(A, f)\nT.copy(f, B, coalesced_width=1)"),
    "copy.loop_layout": (
        "T.copy(A, B)",
        "T.copy(A, B, loop_layout=T.Fragment((64, 64), lambda p, q: (q * 2 + p // 32, p % 32)))",
    ),
    "Parallel.coalesced_width": (
        "for p, q in T.Parallel(64, 64):\n    A[p, q] = B[p, q]",
        "for p, q in T.Parallel(64, 64, coalesced_width=1):\n    A[p, q] = B[p, q]",
    ),
    "Parallel.loop_layout": (
        "for p in T.Parallel(64):\n    A[0, p] = B[0, p]",
        "for p in T.Parallel(64, loop_layout=T.Fragment((64,), lambda p: (p // 4, p % 4))):\n    A[0, p] = B[0, p]",
    ),
    "unroll.unroll_factor": (
        "for p in T.unroll(8):\n    A[0, p] = x",
        "for p in T.unroll(8, unroll_factor=2):\n    A[0, p] = x",
    ),
    "gemm.policy": (WIDE.format("FullRow"), WIDE.format("FullCol")),
    "gemm.clear_accum": (
        "T.clear(f)\nT.gemm(h, g, f)\nT.gemm(h, g, f)\nT.copy(f, A)",
        "T.clear(f)\nT.gemm(h, g, f)\nT.gemm(h, g, f, clear_accum=True)\nT.copy(f, A)",
    ),
    "gemm.precision": ("T.gemm(a, b, f)\nT.copy(f, A)", "T.gemm(a, b, f, precision='tf32')\nT.copy(f, A)"),
    "annotate_layout.layouts": (
        "T.copy(A, a)\nT.copy(a, B)",
        "T.annotate_layout({a: T.Layout((64, 64), lambda p, q: p * 72 + q)})\nT.copy(A, a)\nT.copy(a, B)",
    ),
    "Kernel.cta_cluster": (
        "with T.Kernel(4) as bx:\n    with T.Scale('cta_cluster') as (p, q):\n        A[p, q] = x",
        "with T.Kernel(4, cta_cluster=2) as bx:\n    with T.Scale('cta_cluster') as (p, q):\n        A[p, q] = x",
    ),
    "Kernel.pdl": (
        "with T.Kernel(4) as bx:\n    A[bx, 0] = x",
        "with T.Kernel(4, pdl=True) as bx:\n    A[bx, 0] = x",
    ),
    "Kernel.threads": (
        "with T.Kernel(4, threads=128) as bx:\n    A[bx, 0] = x",
        "with T.Kernel(4, threads=64) as bx:\n    A[bx, 0] = x",
    ),
}


def table(name: str) -> tuple[str, dict[str, str]]:
    """A function's use and those that differ in a parameter."""
    name = SAME.get(name, name)
    if name in UNARY:
        one, two = ("n", "n * 2") if name in ("popcount", "clz", "bitwise_not", "likely") else ("x", "x * 2")
        if name == "likely":
            one, two = "n > 0", "n > 1"
        return f"A[0, 0] = T.{name}({one})", {parameters(name)[0]: f"A[0, 0] = T.{name}({two})"}
    if name in BINARY:
        one = "x" if name in ("nextafter", "pow", "power", "fmod", "atan2", "copysign", "hypot") else "n"
        a, b = parameters(name)
        return f"A[0, 0] = T.{name}({one}, 3)", {
            a: f"A[0, 0] = T.{name}({one} * 2, 3)",
            b: f"A[0, 0] = T.{name}({one}, 5)",
        }
    return USES.get(name) or HOST.get(name) or ("", {})


def parameters(name: str) -> list[str]:
    word = getattr(T, name)
    if isinstance(word, enum.EnumMeta):
        return []
    return [p for p in inspect.signature(word).parameters if p != "self"]


WORDS = [n for n in sorted(T.__all__) if n not in DTYPES and n not in APART]


@functools.cache
def traced(text: str) -> Any:
    """The program of a kernel whose body, or whole launch, is this text; the message of what refuses it."""
    body = (
        text
        if text.startswith(("with T.Kernel", "with T.ClusterKernel"))
        else LAUNCH + textwrap.indent(needs(text) + text, "    ")
    )
    file, source = f"<word {hash(text)}>", HEAD + textwrap.indent(body, "    ")
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    space: dict[str, Any] = {"T": T, "__name__": "words"}
    exec(compile(source, file, "exec"), space)
    try:
        return space["kernel"].trace()
    except TileError as error:
        return error.message


def needs(text: str) -> str:
    """What only some uses have beside the tiles of all."""
    out = ""
    if re.search(r"\bms?\b", text) and "m =" not in text:
        out += "ms = T.alloc_barrier([128, 128])\nm = ms[0]\n"
    if "gemm_sp" in text:
        out += 'e, e2 = T.alloc_shared((64, 8), "uint8"), T.alloc_shared((64, 8), "uint8")\n'
    return out


def tile(text: str) -> str:
    made = traced(text)
    if isinstance(made, str):
        return made
    hints = {k: {b.name: v[0] for b, v in h.items()} if k == "layouts" else h for k, h in made.hints.items()}
    launch = made.launch
    said = [
        launch.grid,
        launch.threads,
        launch.cluster,
        launch.max_blocks,
        launch.ordered,
        launch.awaited,
        launch.pdl,
        launch.comm_warps,
        launch.comm_depth,
        made.returns,
        made.multiples,
    ]
    return f"{made.func.script()}\n{said}\n{hints}"


def cuda(text: str) -> str:
    made = traced(text)
    if isinstance(made, str):
        return made
    try:
        printed = print_kernel(Lowering(pipeline.run(made, target("sm_90a"))[0]).run()).text
    except TileError as error:
        return error.message
    return re.sub(r"//.*", "", printed)


@pytest.mark.parametrize("name", WORDS)
def test_every_parameter_of_a_word_changes_something(name: str):
    base, others = table(name)
    nothing = NOTHING.get(SAME.get(name, name), {})
    assert name in HOST or SAME.get(name) in HOST or not isinstance(traced(base), str), traced(base)
    assert sorted([*others, *nothing]) == sorted(parameters(name)), (
        "a parameter has no pair of uses, or a pair no parameter"
    )
    for parameter, other in others.items():
        assert base != other
        if name in HOST or SAME.get(name) in HOST:
            assert host(base) != host(other), f"{parameter} of T.{name} changes nothing"
        elif tile(base) == tile(other):
            assert cuda(base) != cuda(other), f"{parameter} of T.{name} changes nothing"


@pytest.mark.parametrize("word", HEEDED)
def test_what_a_program_only_notes_is_heeded_by_the_code(word: str):
    one, other = HEEDED[word]
    assert not isinstance(traced(one), str) and not isinstance(traced(other), str), (
        traced(one),
        traced(other),
    )
    assert cuda(one) != cuda(other)


BOOLEANS = [
    (name, p.name)
    for name in WORDS
    if not isinstance(getattr(T, name), enum.EnumMeta)
    for p in inspect.signature(getattr(T, name)).parameters.values()
    if isinstance(p.default, bool) or "bool" in str(p.annotation)
]


@pytest.mark.parametrize(("name", "word"), BOOLEANS)
def test_a_boolean_word_takes_no_other_value(name: str, word: str):
    _, others = table(name)
    nothing = NOTHING.get(SAME.get(name, name), {})
    text = others[word] if word in others else nothing[word][0]
    text = (
        re.sub(rf"\b{word}=(True|False)", f"{word}='no'", text)
        if f"{word}=" in text
        else re.sub(r"[01]\)$", "'no')", text)
    )
    assert "'no'" in text
    on_host = name in HOST or SAME.get(name) in HOST
    for value in ("'no'", "None", "2", "x", "n > 3")[: 3 if on_host or word == "clear_accum" else None]:
        if on_host:
            with refused(TileTypeError, f"{word}={value}", expected="True or False"):
                host(text.replace("'no'", value))
        else:
            said = traced(text.replace("'no'", value))
            assert isinstance(said, str) and said.startswith(f"{word}="), said
    for value in ("True", "1", "False", "0"):
        said = host(text.replace("'no'", value)) if on_host else traced(text.replace("'no'", value))
        assert not isinstance(said, str) or not said.startswith(f"{word}="), said


MEANINGLESS = {
    "a cluster, twice": (
        "with T.Kernel(4, cta_cluster=2, cluster_dims=4) as bx:\n    A[0, 0] = x",
        "the cluster is given twice",
    ),
    "a number for no signal": ("T.copy(A, a, value=2)", "value= of T.copy without signal="),
    "an op for no signal": ("T.copy(A, a, signal_op='set')", "signal_op= of T.copy without signal="),
    "an order that there is not": ("T.use_swizzle(8, order='diagonal')", "order='diagonal' of T.use_swizzle"),
    "an order that is off": (
        "T.use_swizzle(8, order='diagonal', enable=False)",
        "order='diagonal' of T.use_swizzle",
    ),
    "panels of nothing": ("T.use_swizzle(0)", "panel_size=0"),
    "no tensors to be safe in": ("T.annotate_safe_value({'A': 0})", "T.annotate_safe_value of"),
    "no tensors in the cache": ("T.annotate_l2_hit_ratio(0.5)", "T.annotate_l2_hit_ratio of 0.5"),
    "a bound below nothing": ("with T.Kernel(4, max_blocks=-1) as bx:\n    A[0, 0] = x", "max_blocks=-1"),
    "half a block": ("with T.Kernel(4, max_blocks=2.5) as bx:\n    A[0, 0] = x", "max_blocks=2.5"),
    "a truth of threads": ("with T.Kernel(4, threads=True) as bx:\n    A[0, 0] = x", "threads=True"),
}


@pytest.mark.parametrize("name", MEANINGLESS)
def test_words_that_mean_nothing_where_they_stand_are_refused(name: str):
    text, message = MEANINGLESS[name]
    said = traced(text)
    assert isinstance(said, str) and message in said, said


def test_a_bound_of_blocks_is_kept_on_a_gpu_or_refused():
    def kernel(grid: Any, bound: int) -> Any:
        @T.prim_func
        def main(A: T.Tensor((64,), "float32")):
            with T.Kernel(grid, max_blocks=bound) as bx:
                A[bx] = 1

        return main

    for grid in (8, T.dynamic("g")):
        with refused(
            TileValueError, "main asks for max_blocks=4, and its grid may have more", write="T.Persistent"
        ):
            driver.lower(kernel(grid, 4).trace(), "cuda:sm_90a")
    driver.lower(kernel(4, 4).trace(), "cuda:sm_90a")


def test_outputs_of_eager_kernels():
    def made(shape: Any, dtype: str) -> Any:
        @tilescale.jit(target="sim")
        def eager(A):
            A: T.Tensor((4,), T.float32)
            B = T.empty(shape, dtype)
            with T.Kernel(4) as b:
                B[b] = A[b]
            return B

        return eager(np.ones(4, np.float32))

    assert (made((4,), "float32").shape, made((8,), "float32").shape, str(made((4,), "float16").dtype)) == (
        (4,),
        (8,),
        "float16",
    )


def host(text: str) -> str:
    def one(C: T.Tensor((4,), "float32")): ...
    def two(C: T.Tensor((4,), "float32")): ...

    return repr(eval(text, {"T": T, "one": one, "two": two}))


@pytest.mark.parametrize("name", NOTHING)
def test_words_that_change_nothing_do_not_and_are_listed(name: str):
    text = (ROOT / "docs/LANGUAGE.md").read_text()
    for parameter, (one, other) in NOTHING[name].items():
        assert f"`{parameter}`" in text or f"`T.{name}`" in text, (
            f"{parameter} of T.{name} is not listed in docs/LANGUAGE.md"
        )
        if name == "annotate_l2_hit_ratio":
            assert cuda(one) == cuda(other)
        else:
            assert tile(one) == tile(other)
