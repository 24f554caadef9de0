"""``T.gemm``: the product of two tiles, added to a third."""

from __future__ import annotations

from enum import IntEnum
from typing import Any, ClassVar

from tilescale.compiler.builder.constructs import is_device
from tilescale.compiler.builder.values import as_expr
from tilescale.compiler.ir import source
from tilescale.compiler.ir.contexts import SimContext
from tilescale.compiler.ir.numbers import constant
from tilescale.compiler.ir.operations import Access, TileOp, register
from tilescale.compiler.ops.base import emit, region, show, unheeded
from tilescale.compiler.tvm_compat import tirx
from tilescale.errors import TileTypeError, TileValueError
from tilescale.language.booleans import require_bools
from tilescale.language.dtypes import TFLOAT32, held


class GemmWarpPolicy(IntEnum):
    """How the warps of a block share the accumulator on a GPU; results do not depend on it."""

    Square = 0
    FullRow = 1
    FullCol = 2


def warp_policy(policy: Any, what: str, loc: Any) -> int:
    """A policy as an operation's attribute.

    Raises:
        TileValueError: there is no such policy.
    """
    if not isinstance(policy, int) or policy not in list(GemmWarpPolicy):
        policies = ", ".join(f"T.GemmWarpPolicy.{p.name}" for p in GemmWarpPolicy)
        raise TileValueError(f"policy={policy!r} in {what}", loc=loc, expected=policies)
    return int(policy)


def _accumulates(a: str, b: str, c: str) -> bool:
    """Which products the language has: (A, B) → C."""
    if a == b == "float64":
        return c == "float64"
    if "float" in a and "float" in b:
        if a != b and not (a.startswith("float8") and b.startswith("float8")):
            return False
        return (
            c == "float32"
            or (c == a and a in ("float16", "bfloat16"))
            or (a.startswith("float8") and c in ("float16", "bfloat16"))
        )
    return a in ("int8", "uint8") and b in ("int8", "uint8") and c == "int32" or a == b == c == "int32"


def check_operands(a: str, b: str, c: str, what: str, loc: Any) -> None:
    """
    Raises:
        TileTypeError: dtypes that have no product.
    """
    if not _accumulates(a, b, c):
        raise TileTypeError(
            f"{what} of {a} by {b} into {c}",
            loc=loc,
            expected="equal floating operands, or two of float8, into float32 or a 16-bit float of theirs "
            "(float64 into float64), 8-bit integers or int32 into int32",
        )


def gemm(
    A: Any,
    B: Any,
    C: Any,
    transpose_A: bool = False,
    transpose_B: bool = False,
    policy: GemmWarpPolicy = GemmWarpPolicy.Square,
    clear_accum: bool = False,
    k_pack: int = 1,
    wg_wait: int = 0,
    mbar: Any = None,
    precision: str = "",
    annotations: dict[str, Any] | None = None,
) -> None:
    """C += op(A) · op(B) over tiles, accumulated in C's dtype (float16 and bfloat16 accumulators are rounded
    once a call).

    Args:
        A: (M, K), or (K, M) with ``transpose_A``. B: (K, N), or (N, K) with ``transpose_B``. C: (M, N).
        wg_wait: -1 on sm_90a: the product runs beside the executor, whose threads are warpgroups, until
            ``T.wait_wgmma`` says that it is complete; its tiles in shared memory stay as they are until then,
            and C is not touched. Elsewhere it is complete at once.
        clear_accum: C starts from zero instead of its contents; also a condition of the device.
        k_pack: of AMD's matrix units; changes nothing.
        precision: "tf32": float32 operands may be cut to tf32, their upper 10 bits of mantissa, which tensor
            cores multiply.

    Raises:
        TileValueError: shapes that do not fit, a precision that there is not, ``mbar``. TileTypeError: dtypes
        that have no product.
    """
    unheeded("gemm", annotations)
    require_bools(
        transpose_A=transpose_A, transpose_B=transpose_B, clear_accum=is_device(clear_accum) or clear_accum
    )
    a, b, c = region(A, "A", narrow=True), region(B, "B", narrow=True), region(C, "C")
    loc = source.current()
    for r, what in ((a, "A"), (b, "B"), (c, "C")):
        if len(r.shape) != 2 or any(constant(e) is None for e in r.shape):
            raise TileValueError(
                f"{what} of T.gemm is {r.name}, a tile of {show(r.shape)}",
                loc=loc,
                expected="two constant extents",
            )
        if not r.buffer.scope.startswith(("shared", "local")):
            raise TileTypeError(
                f"{what} of T.gemm is {r.name}, which lies in global memory",
                loc=loc,
                hint="copy the tile into T.alloc_shared first",
            )
    m, k = a.shape[::-1] if transpose_A else a.shape
    k2, n = b.shape[::-1] if transpose_B else b.shape
    if (k, m, n) != (k2, *c.shape):
        raise TileValueError(
            f"T.gemm of A {show(a.shape)}{'ᵀ' if transpose_A else ''}, B "
            f"{show(b.shape)}{'ᵀ' if transpose_B else ''} "
            f"into C {show(c.shape)}",
            loc=loc,
            expected=f"A (M, K), B (K, N), C (M, N); here K is {k} and {k2}, C should be ({m}, {n})",
        )
    check_operands(held(a.dtype), held(b.dtype), c.dtype, "T.gemm", loc)
    if not precision and all(isinstance(r.dtype, type(TFLOAT32)) for r in (a, b)):
        precision = "tf32"
    if precision not in ("", "tf32") or (precision and a.dtype != "float32"):
        raise TileValueError(
            f"precision={precision!r} in T.gemm of {a.dtype}",
            loc=loc,
            expected='nothing, or "tf32" for operands of float32',
        )
    if mbar is not None:
        raise TileValueError(
            "T.gemm with mbar=: no product here signals a barrier", loc=loc, expected="no mbar=",
            hint="wg_wait=-1 and T.wait_wgmma behind it",
        )  # fmt: skip
    flags = [as_expr(clear_accum, "bool")]
    if wg_wait not in (-1, 0):
        raise TileValueError(
            f"T.gemm with wg_wait={wg_wait}", loc=loc, expected="0, or -1 and T.wait_wgmma behind it"
        )
    attrs: dict[str, Any] = {"wg_wait": wg_wait} if wg_wait else {}
    attrs |= {
        "trans_a": int(bool(transpose_A)),
        "trans_b": int(bool(transpose_B)),
        "policy": warp_policy(policy, "T.gemm", loc),
    }
    emit("gemm", [a.ir(), b.ir(), c.ir(), *flags], attrs | ({"precision": precision} if precision else {}))


def wgmma_gemm(
    A: Any,
    B: Any,
    C: Any,
    transpose_A: bool = False,
    transpose_B: bool = False,
    policy: GemmWarpPolicy = GemmWarpPolicy.Square,
    clear_accum: bool = False,
    annotations: Any = None,
) -> None:
    """`gemm` with ``wg_wait=-1``, by TileLang's name: on sm_90a it runs beside the warpgroup until
    ``T.wait_wgmma``, elsewhere it is complete at once. ``annotations`` is TileLang's; it is refused.

    Raises:
        TileTypeError: annotations; and as `gemm`.
    """
    if annotations:
        raise TileTypeError(
            f"T.wgmma_gemm with annotations={annotations!r}", loc=source.current(), expected="none"
        )
    gemm(A, B, C, transpose_A, transpose_B, policy, clear_accum, wg_wait=-1)


def accumulated(c: Any, clears: Any, later: bool = False) -> list[Access]:
    """What a product does to what it is added to: it is read unless it starts from zero, and written.
    ``later``: not at once."""
    when = None if constant(clears) is not None else tirx.Not(clears)
    held = [] if constant(clears) else [Access(c, "read", asynchronous=later, when=when)]
    return [*held, Access(c, "write", asynchronous=later)]


@register
class Gemm(TileOp):
    """``ts.gemm(a, b, c, clears)``. ``wg_wait``: it may run on until it is awaited."""

    name = "gemm"
    attributes: ClassVar[tuple[str, ...]] = ("trans_a", "trans_b", "policy", "precision?", "wg_wait?")
    multiplies = plain = True

    def queue(self, call: Any) -> str:
        return "product" if "wg_wait" in call.attrs else ""

    def effects(self, call: Any) -> list[Access]:
        a, b, c, clears = call.args
        later = bool(self.queue(call))
        engines = [
            "async" if later and r.source.ty.storage_scope.startswith("shared") else "" for r in (a, b)
        ]
        reads = [
            Access(r, "read", asynchronous=later, proxy=engine)
            for r, engine in zip((a, b), engines, strict=True)
        ]
        return [*reads, *accumulated(c, clears, later)]

    def pending(self, call: Any) -> int:
        """How many products may be under way behind it; below zero where nothing is awaited there."""
        return -1

    def simulate(self, call: Any, cx: SimContext) -> Any:
        from tilescale.compiler.sim import flights, tiles

        site, pending = cx.site_of(call), self.pending(call)
        a, b, c = (cx.view(region, call) for region in call.args[:3])
        clear, dtypes = cx.scalar(call.args[3]), (a.dtype, b.dtype, c.dtype)
        across, down, cut = (
            bool(call.attrs["trans_a"]),
            bool(call.attrs["trans_b"]),
            "precision" in call.attrs,
        )

        def multiply(left: Any, right: Any, to: Any, fresh: bool) -> None:
            x, y = tiles.matrix(left.read()), tiles.matrix(right.read())
            if cut:
                x, y = tiles.tf32(x), tiles.tf32(y)
            to.write(
                tiles.product(
                    x.T if across else x,
                    y.T if down else y,
                    None if fresh else tiles.matrix(to.read()),
                    dtypes,
                )
            )

        def run(ex: Any) -> None:
            multiply(a.placed(ex, None), b.placed(ex, None), c.placed(ex, None), bool(clear(ex)))

        def begin(ex: Any, engine: Any) -> None:
            left, right, to, fresh = (
                a.placed(ex, None),
                b.placed(ex, None),
                c.placed(ex, None),
                bool(clear(ex)),
            )
            flights.start(
                ex, flights.PRODUCT, engine, site, (left, right), to, lambda: multiply(left, right, to, fresh)
            )
            if pending >= 0:
                flights.wait(ex, flights.PRODUCT, pending)

        return begin if self.queue(call) else run
