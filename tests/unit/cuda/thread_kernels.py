"""Thread IR written by hand, for tests of the printer and the launcher: a guarded elementwise kernel, a
staged copy, one of each dtype."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tilescale.compiler.gpu.kernel import Source, ThreadKernel, arena, placed
from tilescale.compiler.tvm_compat import ir, tirx

I32, I64 = "int32", "int64"


def int32(v: int) -> Any:
    return tirx.IntImm(I32, v)


def wide(e: Any) -> Any:
    return tirx.Cast(I64, e)


def pointer(name: str, dtype: str, scope: str = "global") -> Any:
    """A parameter in global memory."""
    return tirx.decl_buffer((1 << 40,), dtype, name=name, scope=scope)


def local(name: str, dtype: str, numel: int) -> Any:
    """An array in registers, or a variable."""
    return tirx.decl_buffer((numel,), dtype, name=name, scope="local")


def load(buffer: Any, index: Any) -> Any:
    return tirx.BufferLoad(buffer, [int32(index) if isinstance(index, int) else index])


def store(buffer: Any, index: Any, value: Any, span: Any = None) -> Any:
    return tirx.BufferStore(buffer, value, [int32(index) if isinstance(index, int) else index], span)


def ramp(base: Any, lanes: int) -> Any:
    dtype = str(base.ty)
    return tirx.Ramp(base, tirx.IntImm(dtype, 1), lanes)


def loop(
    name: str,
    extent: Any,
    body: Callable[[Any], Any],
    *,
    unroll: bool = False,
    annotations: dict[str, Any] | None = None,
) -> Any:
    var = tirx.Var(name, I32)
    kind = tirx.ForKind.UNROLLED if unroll else tirx.ForKind.SERIAL
    return tirx.For(
        var,
        int32(0),
        extent if not isinstance(extent, int) else int32(extent),
        kind,
        body(var),
        annotations=annotations or {},
    )


def span(line: int, file: str = "kernel.py") -> Any:
    return ir.Span(ir.SourceName(file), line, line, 1, 2)


def threads(body: Any, extents: dict[str, tuple[Any, Any]]) -> Any:
    """``body`` under its thread_extent attributes: ``{"threadIdx.x": (var, extent)}``."""
    for tag, (var, extent) in reversed(extents.items()):
        e = int32(extent) if isinstance(extent, int) else extent
        body = tirx.AttrStmt(
            tirx.IterVar(ir.Range.from_min_extent(0, e), var, tirx.IterVar.ThreadIndex, tag),
            "thread_extent",
            e,
            body,
        )
    return body


def kernel(
    name: str,
    params: Sequence[Any],
    body: Any,
    *,
    block: int = 128,
    grid: tuple[Any, Any, Any] = (1, 1, 1),
    **more: Any,
) -> ThreadKernel:
    """A ThreadKernel whose parameters are all the kernel's own, but for those that ``sources`` names
    otherwise."""
    sources = more.pop("sources", tuple(Source("param", k) for k in range(len(params))))
    written = frozenset(more.pop("written", (len(params) - 1,)))
    return ThreadKernel(tirx.PrimFunc(list(params), body), name, grid, block, sources, written, **more)


def scale() -> ThreadKernel:
    """B[i] = A[i] * f for i < n: ragged, one element a thread."""
    A, B = pointer("A", "float16"), pointer("B", "float16")
    f, n = tirx.Var("f", "float32"), tirx.Var("n", I32)
    bx, tx = tirx.Var("bx", I32), tirx.Var("tx", I32)
    i = tirx.Var("i", I32)
    body = tirx.SeqStmt(
        [
            tirx.Bind(i, bx * 128 + tx, span(12)),
            tirx.IfThenElse(
                i < n,
                store(B, wide(i), tirx.Cast("float16", tirx.Cast("float32", load(A, wide(i))) * f), span(13)),
                None,
                span(13),
            ),
        ]
    )
    return kernel(
        "scale",
        [A, B, f, n],
        threads(body, {"blockIdx.x": (bx, (n + 127) // 128), "threadIdx.x": (tx, 128)}),
        grid=((n + 127) // 128, 1, 1),
        sources=(Source("param", 0), Source("param", 1), Source("param", 2), Source("symbol", 0)),
        written=(1,),
    )


def staged() -> ThreadKernel:
    """A 64 × 64 tile through shared memory, transposed: vector loads, a barrier, registers, an unrolled
    loop."""
    A, B = pointer("A", "bfloat16"), pointer("B", "float32")
    bx, tx = tirx.Var("bx", I32), tirx.Var("tx", I32)
    smem = arena(64 * 64 * 2)
    tile, declared = placed(smem, "A_s", "bfloat16", 64 * 64, 0, span(20))
    acc = local("acc", "float32", 32)
    start = wide(bx) * tirx.IntImm(I64, 4096)

    def move(k: Any) -> Any:
        at = (k * 128 + tx) * 8
        return store(tile, ramp(at, 8), load(A, ramp(start + wide(at), 8)), span(21))

    def transpose(k: Any) -> Any:
        at = k * 128 + tx
        return tirx.SeqStmt([
            store(acc, k, tirx.Cast("float32", load(tile, at % 64 * 64 + at // 64)), span(23)),
            store(B, start + wide(at), tirx.max(load(acc, k), tirx.FloatImm("float32", 0.0)), span(24)),
        ])  # fmt: skip

    body = tirx.SeqStmt([
        tirx.AllocBuffer(smem), declared, tirx.AllocBuffer(acc),
        loop("k", 4, move, unroll=True),
        tirx.Evaluate(tirx.call_extern("void", "__syncthreads"), span(22)),
        loop("k", 32, transpose, unroll=True),
    ])  # fmt: skip
    return kernel(
        "staged",
        [A, B],
        threads(body, {"blockIdx.x": (bx, 4), "threadIdx.x": (tx, 128)}),
        grid=(4, 1, 1),
        shared_bytes=8192,
    )


def expression(dtype: str, make: Callable[..., Any], *inputs: str, name: str = "k") -> ThreadKernel:
    """C[tx] = make(A0[tx], A1[tx], …), one thread an element."""
    params = [pointer(f"A{k}", d) for k, d in enumerate(inputs)]
    C, tx = pointer("C", dtype), tirx.Var("tx", I32)
    body = store(C, tx, make(*(load(p, tx) for p in params)))
    return kernel(name, [*params, C], threads(body, {"threadIdx.x": (tx, 128)}))
