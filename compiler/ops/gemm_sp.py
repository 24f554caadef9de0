"""``T.gemm_sp``: a product whose left operand has two numbers in every four of a row, and keeps those alone
(2:4 sparsity)."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from tilescale.compiler.builder.constructs import is_device
from tilescale.compiler.builder.values import as_expr
from tilescale.compiler.ir import source
from tilescale.compiler.ir.contexts import SimContext
from tilescale.compiler.ir.nests import matrix_axes
from tilescale.compiler.ir.numbers import constant
from tilescale.compiler.ir.operations import VOID, Access, TileOp, register
from tilescale.compiler.ir.program import TileProgram
from tilescale.compiler.ir.statements import sequence
from tilescale.compiler.layout.sparse import COVERED, dense_shape
from tilescale.compiler.ops.base import emit, region, show
from tilescale.compiler.ops.gemm import GemmWarpPolicy, accumulated, check_operands, warp_policy
from tilescale.compiler.tvm_compat import ir, structural_map, tirx
from tilescale.errors import TileTypeError, TileValueError
from tilescale.language.booleans import require_bools


def gemm_sp(
    A_sparse: Any,
    E: Any,
    B: Any,
    C: Any,
    transpose_A: bool = False,
    transpose_B: bool = False,
    policy: GemmWarpPolicy = GemmWarpPolicy.Square,
    clear_accum: bool = False,
    k_pack: int = 1,
    wg_wait: int = 0,
    transpose_E: bool = False,
) -> None:
    """C += A · op(B), where A (M, K) has at most two numbers in each four neighbours of a row, and
    ``A_sparse`` is those two.

    ``E`` says where they are: four bits for each four neighbours, of which the lower two are the place of the
    first number, the upper two that of the second, 0 ≤ first < second ≤ 3. The lowest bits of an element are
    for the first neighbours. Where the places are not in order, what the four count for is not defined.

    Args:
        A_sparse: (M, K / 2), or (K / 2, M) with ``transpose_A``. B: (K, N), or (N, K) with ``transpose_B``.
        C: (M, N).
        E: (M, K / 8) of uint8, (M, K / 16) of int16 or uint16, (M, K / 32) of int32 or uint32.
        clear_accum: C starts from zero instead of its contents; also a condition of the device.
        transpose_E: TileLang's; E lies as it is, and True is refused.

    Raises:
        TileValueError: shapes that do not fit. TileTypeError: dtypes that have no product, or say no places.
    """
    require_bools(
        transpose_A=transpose_A,
        transpose_B=transpose_B,
        transpose_E=transpose_E,
        clear_accum=is_device(clear_accum) or clear_accum,
    )
    if transpose_E:
        raise TileValueError(
            "T.gemm_sp with transpose_E=True", loc=source.current(), expected="E with a row for each row of A"
        )
    a, e, b, c = region(A_sparse, "A"), region(E, "E"), region(B, "B"), region(C, "C")
    loc = source.current()
    if wg_wait:
        raise TileValueError(
            f"T.gemm_sp with wg_wait={wg_wait}", loc=loc, expected="0: it is complete where it stands"
        )
    for r, what in ((a, "A"), (e, "E"), (b, "B"), (c, "C")):
        if len(r.shape) != 2 or any(constant(x) is None for x in r.shape):
            raise TileValueError(
                f"{what} of T.gemm_sp is {r.name}, a tile of {show(r.shape)}",
                loc=loc,
                expected="two constant extents",
            )
        if not r.buffer.scope.startswith(("shared", "local")):
            raise TileTypeError(
                f"{what} of T.gemm_sp is {r.name}, which lies in global memory",
                loc=loc,
                hint="copy the tile into T.alloc_shared first",
            )
    m, half = a.shape[::-1] if transpose_A else a.shape
    k, n = b.shape[::-1] if transpose_B else b.shape
    each = COVERED.get(e.dtype)
    if each is None:
        raise TileTypeError(
            f"E of T.gemm_sp is {e.name} of {e.dtype}", loc=loc, expected="one of " + ", ".join(COVERED)
        )
    rows, columns = (constant(x) for x in e.shape)
    whole = constant(k) or 0
    if (
        (constant(half), m, n) != (whole // 2, *c.shape)
        or whole % each
        or (rows, columns) != (constant(m), whole // each)
    ):
        raise TileValueError(
            f"T.gemm_sp of A {show(a.shape)}, E {show(e.shape)} of {e.dtype}, B {show(b.shape)} into C "
            f"{show(c.shape)}",
            loc=loc,
            expected=f"A (M, K / 2), E (M, K / {each}), B (K, N), C (M, N); here K is {whole}",
        )
    check_operands(a.dtype, b.dtype, c.dtype, "T.gemm_sp", loc)
    attrs = {
        "trans_a": int(bool(transpose_A)),
        "trans_b": int(bool(transpose_B)),
        "policy": warp_policy(policy, "T.gemm_sp", loc),
    }
    emit("gemm_sp", [a.ir(), b.ir(), c.ir(), as_expr(clear_accum, "bool"), e.ir()], attrs)


@register
class GemmSp(TileOp):
    name = "gemm_sp"
    attributes: ClassVar[tuple[str, ...]] = ("trans_a", "trans_b", "policy")
    multiplies = plain = True

    def effects(self, call: Any) -> list[Access]:
        a, b, c, clears, e = call.args
        later = bool(self.queue(call))
        reads = [Access(r, "read", asynchronous=later, proxy="async" if later else "") for r in (a, b)]
        return [*reads, Access(e, "read"), *accumulated(c, clears, later)]

    def pending(self, call: Any) -> int:
        """As of a product of whole operands."""
        return -1

    def simulate(self, call: Any, cx: SimContext) -> Any:
        from tilescale.compiler.sim import flights, tiles

        site, pending = cx.site_of(call), self.pending(call)
        a, b, c, e = (cx.view(r, call) for r in (*call.args[:3], call.args[4]))
        clear, dtypes = cx.scalar(call.args[3]), (a.dtype, b.dtype, c.dtype)
        across, down = bool(call.attrs["trans_a"]), bool(call.attrs["trans_b"])

        def multiply(left: Any, right: Any, to: Any, where: Any, fresh: bool) -> None:
            x, y = tiles.matrix(left.read()), tiles.matrix(right.read())
            x = expanded(x.T if across else x, where)
            to.write(tiles.product(x, y.T if down else y, None if fresh else tiles.matrix(to.read()), dtypes))

        def run(ex: Any) -> None:
            multiply(
                a.placed(ex, None),
                b.placed(ex, None),
                c.placed(ex, None),
                tiles.matrix(e.read(ex)),
                bool(clear(ex)),
            )

        def begin(ex: Any, engine: Any) -> None:
            left, right, to = (v.placed(ex, None) for v in (a, b, c))
            where, fresh = tiles.matrix(e.read(ex)).copy(), bool(clear(ex))
            flights.start(
                ex,
                flights.PRODUCT,
                engine,
                site,
                (left, right),
                to,
                lambda: multiply(left, right, to, where, fresh),
            )
            if pending >= 0:
                flights.wait(ex, flights.PRODUCT, pending)

        return begin if self.queue(call) else run


def places(e: Any) -> Any:
    """(M, K / 4, 2): the places of the two numbers in each four, of an array ``E``."""
    bits = np.ascontiguousarray(e).astype(f"u{e.dtype.itemsize}")
    shifts = np.arange(0, bits.dtype.itemsize * 8, 4, dtype=bits.dtype)
    four = (bits[..., None] >> shifts & bits.dtype.type(15)).reshape(len(bits), -1).astype(np.int64)
    return np.stack([four & 3, four >> 2], axis=-1)


def expanded(kept: Any, e: Any) -> Any:
    """A (M, K) from what it keeps (M, K / 2) and where that is."""
    at = places(e)
    out = np.zeros((*at.shape[:2], 4), kept.dtype)
    np.put_along_axis(out, at, kept.reshape(at.shape), axis=-1)
    return out.reshape(len(kept), -1)


def as_gemm(call: Any, dense: Any) -> list[Any]:
    """The call as two statements: A written out into ``dense``, all of a tile (M, K) in shared memory, and a
    product of that."""
    a, b, c, clears, e = call.args
    m, k = dense_shape(call)
    i, j = tirx.Var("i", "int32"), tirx.Var("j", "int32")
    each = COVERED[_dtype(e)]
    word = tirx.Cast("int32", _element(e, i, j // each))
    four = tirx.bitwise_and(tirx.shift_right(word, j % each // 4 * 4), _int32(15))
    pair = j // 4 * 2
    kept = [_element(a, *((pair + h, i) if call.attrs["trans_a"] else (i, pair + h))) for h in (0, 1)]
    zero = tirx.const(0, str(kept[0].ty))
    second = tirx.Select(tirx.EQ(tirx.shift_right(four, _int32(2)), j % 4), kept[1], zero)
    value = tirx.Select(tirx.EQ(tirx.bitwise_and(four, _int32(3)), j % 4), kept[0], second)
    store = tirx.BufferStore(dense.source, value, [i, j], call.span)
    parallel = {"ts.kind": "parallel"}
    inner = tirx.For(
        j, _int32(0), _int32(k), tirx.ForKind.PARALLEL, store, annotations={"ts.depth": 1}, span=call.span
    )
    nest = tirx.For(
        i,
        _int32(0),
        _int32(m),
        tirx.ForKind.PARALLEL,
        inner,
        annotations={"ts.depth": 2, **parallel},
        span=call.span,
    )
    attrs = {**dict(call.attrs), "trans_a": 0}
    return [
        nest,
        tirx.Evaluate(
            ir.Call("ts.gemm", [dense, b, c, clears], attrs=attrs, ret_ty=VOID, span=call.span), call.span
        ),
    ]


def _int32(value: int) -> Any:
    return tirx.IntImm("int32", value)


def _dtype(region: Any) -> str:
    dt = region.source.ty.dtype
    return str(getattr(dt, "dtype", dt))


def _element(region: Any, row: Any, column: Any) -> Any:
    """An element of a matrix."""
    at = dict(zip(matrix_axes(region), (row, column), strict=True))
    return tirx.BufferLoad(
        region.source, [r.min + at[k] if k in at else r.min for k, r in enumerate(region.region)]
    )


def written_out(program: TileProgram) -> TileProgram:
    """The program with every T.gemm_sp as a product of a tile that its left operand is written out into: for
    targets without such products."""

    def change(s: Any) -> Any:
        call = s.value
        if not isinstance(call, ir.Call) or call.op.name != "ts.gemm_sp":
            return s
        var = tirx.decl_buffer(
            dense_shape(call), _dtype(call.args[0]), "dense", scope="shared", data_alignment=64, layout=None
        )
        whole = tirx.BufferRegion(
            var, [ir.Range.from_min_extent(tirx.IntImm("int32", 0), e) for e in var.ty.shape]
        )
        return sequence([tirx.AllocBuffer(var, {}, call.span), *as_gemm(call, whole)])

    body = structural_map(program.func.body, (tirx.Evaluate, change))
    return program if body.same_as(program.func.body) else program.with_body(body)
