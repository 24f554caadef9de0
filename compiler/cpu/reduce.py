"""Reductions and scans of tiles along one axis, in an order that depends on shapes alone, so that results
repeat bit for bit.

Along a contiguous axis, lane l of each of `UNROLL` vectors takes its share of the elements l, l + lanes, …;
the vectors are folded in order, the ragged end into the first lanes, then neighbouring lanes pair by pair.
Along any other axis each output is one running value, in order. Small floats accumulate in float32.

In ``max``, ``min`` and ``absmax`` a NaN wins, as in torch.amax; ``fmax``, ``fmin`` and ``absfmax`` leave it
out, as CUDA's fmaxf does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from tilescale.compiler.cpu import convert
from tilescale.compiler.cpu.codegen import host_cpu
from tilescale.compiler.cpu.expr import dtype_of, is_nan, lit, loop, native_cast, select, seq
from tilescale.compiler.cpu.tile import Buf, Context, Expr, Stmt, Tile, add, imm, mul
from tilescale.compiler.tvm_compat import tirx, tvm
from tilescale.errors import TileTypeError, TileValueError

UNROLL = 4
"""Independent accumulators: an addition takes four cycles, and one can start every cycle."""


@dataclass(frozen=True)
class _Op:
    """How one reduction works on accumulators of a dtype. ``combine`` holds no constants, so it serves
    scalars and vectors."""

    combine: Callable[[Expr, Expr], Expr]
    identity: Callable[[str], float | int]
    absolute: bool = False
    only: str = "number"
    """What it is defined for: number, integer or truth (any dtype, taken as zero or not)."""


def _maximum(a: Expr, b: Expr) -> Expr:
    """``b > a ? b : a`` is one instruction and keeps a NaN in ``a``; one in ``b`` is put in. llvm.maximum
    takes twice as many."""
    if not dtype_of(a).startswith("float"):
        return tirx.max(a, b)
    return select(is_nan(b), b, select(tirx.GT(b, a), b, a))


def _minimum(a: Expr, b: Expr) -> Expr:
    if not dtype_of(a).startswith("float"):
        return tirx.min(a, b)
    return select(is_nan(b), b, select(tirx.LT(b, a), b, a))


def _fmax(a: Expr, b: Expr) -> Expr:
    """A NaN in ``b`` loses; accumulators, which start from a number, are none. One instruction."""
    return select(tirx.GT(b, a), b, a)


def _fmin(a: Expr, b: Expr) -> Expr:
    return select(tirx.LT(b, a), b, a)


def _lowest(dtype: str) -> float | int:
    if dtype.startswith("float"):
        return -inf
    return -(2 ** (tvm.DataType(dtype).bits - 1)) if dtype.startswith("int") else 0


def _highest(dtype: str) -> float | int:
    if dtype.startswith("float"):
        return inf
    width = int(tvm.DataType(dtype).bits)
    return (1 << (width - 1 if dtype.startswith("int") else width)) - 1


def _ones(dtype: str) -> int:
    return -1 if dtype.startswith("int") else 2 ** tvm.DataType(dtype).bits - 1


_OPS = {
    "sum": _Op(lambda a, b: a + b, lambda d: 0),
    "prod": _Op(lambda a, b: a * b, lambda d: 1),
    "max": _Op(_maximum, _lowest),
    "min": _Op(_minimum, _highest),
    "fmax": _Op(_fmax, _lowest),
    "fmin": _Op(_fmin, _highest),
    "abssum": _Op(lambda a, b: a + b, lambda d: 0, absolute=True),
    "absmax": _Op(_maximum, lambda d: 0, absolute=True),
    "absfmax": _Op(_fmax, lambda d: 0, absolute=True),
    "bitand": _Op(lambda a, b: a & b, _ones, only="integer"),
    "bitor": _Op(lambda a, b: a | b, lambda d: 0, only="integer"),
    "bitxor": _Op(lambda a, b: a ^ b, lambda d: 0, only="integer"),
    "any": _Op(lambda a, b: a | b, lambda d: 0, only="truth"),
    "all": _Op(lambda a, b: a & b, lambda d: 1, only="truth"),
}
OPS = tuple(_OPS)


def acc_dtype(op: str, src: str, dst: str) -> str:
    """What a reduction from ``src`` into ``dst`` accumulates in: truths in uint8, else float64 or float32
    where either side is a float, else dst's own integers (which wrap).

    Raises:
        TileValueError: an unknown reduction.
        TileTypeError: dtypes that it is not defined for.
    """
    if op not in _OPS:
        raise TileValueError(f"T.reduce: unknown reduction {op!r}", expected=", ".join(OPS))
    if _OPS[op].only == "truth":
        return "uint8"
    if _OPS[op].only == "integer" and (convert.is_float(src) or convert.is_float(dst)):
        raise TileTypeError(f"T.reduce_{op} of {src} into {dst}", expected="integers or bool")
    if convert.is_float(src) and not convert.is_float(dst):
        raise TileTypeError(f"T.reduce_{op} of {src} into {dst}", expected="a float output for a float input")
    if convert.is_float(dst):
        return "float64" if "float64" in (src, dst) else "float32"
    return "uint8" if dst == "bool" else dst


@dataclass(frozen=True)
class _Job:
    """A reduction, its tiles brought to one form: ``dst`` has no reduced axis."""

    src: Tile
    dst: Tile
    axis: int
    op: _Op
    acc: str
    clear: bool

    @property
    def kept(self) -> list[int]:
        return [i for i in range(len(self.src.shape)) if i != self.axis]

    @property
    def extent(self) -> int:
        return self.src.shape[self.axis]

    def first(self) -> Expr:
        return lit(self.op.identity(self.acc), self.acc)

    def value(self, ids: dict[int, Expr], k: Expr) -> Expr:
        """The element k of the row ``ids``, as an accumulator."""
        full = [k if i == self.axis else ids[i] for i in range(len(self.src.shape))]
        value = convert.load(self.src.buf, self.src.index(*full), self.src.dtype)
        return self.prepared(value, self.src.dtype)

    def prepared(self, value: Expr, dtype: str) -> Expr:
        if self.op.only == "truth":
            return native_cast(convert.cast(value, dtype, "bool"), "uint8")
        value = convert.cast(value, dtype, self.acc)
        if self.op.absolute and not self.acc.startswith("uint"):
            return tirx.abs(value)
        return value

    def finish(self, ids: dict[int, Expr], total: Expr) -> Stmt:
        """Stores ``total``, combined with what dst held unless ``clear``."""
        at = self.dst.index(*(ids[i] for i in self.kept))
        if not self.clear:
            old = convert.load(self.dst.buf, at, self.dst.dtype)
            if self.op.only == "truth":
                old = native_cast(convert.cast(old, self.dst.dtype, "bool"), "uint8")
            else:
                old = convert.cast(old, self.dst.dtype, self.acc)
            total = self.op.combine(total, old)
        return convert.store(self.dst.buf, at, convert.cast(total, self.acc, self.dst.dtype), self.dst.dtype)


def _without_axis(src: Tile, dst: Tile, axis: int) -> tuple[Tile, int]:
    rank = len(src.shape)
    if not -rank <= axis < rank:
        raise TileValueError(
            f"T.reduce along axis {axis} of a tile with {rank} axes", expected=f"{-rank} … {rank - 1}"
        )
    axis %= rank
    want = tuple(e for i, e in enumerate(src.shape) if i != axis)
    kept = tuple(1 if i == axis else e for i, e in enumerate(src.shape))
    if dst.shape == kept and dst.shape != want:
        strides = tuple(s for i, s in enumerate(dst.strides) if i != axis)
        dst = Tile(dst.buf, dst.dtype, want, strides, dst.offset)
    elif dst.shape == (1,) and want == ():
        dst = Tile(dst.buf, dst.dtype, (), (), dst.offset)
    if dst.shape != want:
        raise TileValueError(
            f"T.reduce of {list(src.shape)} along axis {axis} into {list(dst.shape)}",
            expected=f"{list(want)} or {list(kept)}",
        )
    return dst, axis


def emit_reduce(cx: Context, src: Tile, dst: Tile, axis: int, op: str, clear: bool = True) -> Stmt:
    """dst = reduce(src) along ``axis``, or dst = dst ∘ reduce(src) unless ``clear``; dst lacks the axis, or
    has it with extent 1.

    ``op``: one of `OPS`. Accumulates in `acc_dtype`; rounds once.

    Raises:
        TileValueError: unknown op, axis out of range, shapes that do not fit.
        TileTypeError: dtypes that the op is not defined for.
    """
    acc = acc_dtype(op, src.dtype, dst.dtype)
    dst, axis = _without_axis(src, dst, axis)
    job = _Job(src, dst, axis, _OPS[op], acc, clear)
    lanes = _lanes(src.dtype, acc)
    if src.strides[axis] == 1 and job.extent > 1:
        lanes = min(lanes, 16)  # the square of vectors in `_group` stays small
        return _nest(job, job.kept[:-1], {}, lambda ids: _along(job, ids, lanes))
    across = [i for i in job.kept if src.strides[i] == 1 and src.shape[i] > 1]
    if across:
        outer = [i for i in job.kept if i != across[0]]
        return _nest(job, outer, {}, lambda ids: _across(job, ids, across[0], lanes))
    return _nest(job, job.kept, {}, lambda ids: _one_by_one(job, ids))


def _lanes(src: str, acc: str) -> int:
    """By the wider of the two dtypes, as both are in registers."""
    widths = [convert.compute_dtype(src), acc]
    return min(host_cpu().lanes("uint8" if w == "bool" else w) for w in widths)


def _nest(job: _Job, axes: list[int], ids: dict[int, Expr], body: Callable[[dict[int, Expr]], Stmt]) -> Stmt:
    if not axes:
        return body(ids)
    return loop("i", job.src.shape[axes[0]], lambda v: _nest(job, axes[1:], {**ids, axes[0]: v}, body))


def _local(numel: int, dtype: str) -> Buf:
    return tirx.decl_buffer((numel,), dtype, "acc", layout=None, scope="local", data_alignment=64)


def _fold(value: Expr) -> Expr | int:
    return int(value.value) if isinstance(value, tirx.IntImm) else value


def _vectors(lanes: int, body: Callable[[Expr], Stmt]) -> Stmt:
    return loop("v", lanes, body, kind=tirx.ForKind.VECTORIZED)


def _along(job: _Job, ids: dict[int, Expr], lanes: int) -> Stmt:
    """Rows contiguous along the reduced axis: as many at a time as there are lanes, then one at a time.

    Each row is first folded to one vector. ``lanes`` such vectors are folded together: a round takes
    neighbouring lanes of two vectors to the two halves of one, so the last vector holds one row's result in
    each lane. A single row is folded in the same order, so that its result does not depend on its company.
    """
    rows = job.kept[-1] if job.kept else None
    count = job.src.shape[rows] if rows is not None else 1
    steps = []
    if rows is not None and count >= lanes:
        steps.append(loop("g", count // lanes, lambda g: _group(job, ids, rows, mul(_fold(g), lanes), lanes)))
    done = count // lanes * lanes if rows is not None else 0

    def single(r: Expr) -> Stmt:
        place = ids if rows is None else {**ids, rows: add(done, _fold(r))}
        held = _local(lanes, job.acc)
        steps = [tirx.AllocBuffer(held), _row_vector(job, place, held, 0, lanes)]
        total = _bind(steps, _load(held, 0, lanes))
        width = lanes
        while width > 1:
            width //= 2
            even = _bind(steps, tirx.Shuffle([total], [imm(2 * i) for i in range(width)]))
            odd = _bind(steps, tirx.Shuffle([total], [imm(2 * i + 1) for i in range(width)]))
            total = job.op.combine(even, odd)
            if width > 1:
                total = _bind(steps, total)
        # Through memory: TVM expands a chain of scalar integer bindings while it generates code.
        steps.append(tirx.BufferStore(held, total, [imm(0)]))
        return seq([*steps, job.finish(place, tirx.BufferLoad(held, [imm(0)]))])

    if count > done:
        steps.append(loop("r", count - done, single))
    return seq(steps)


def _group(job: _Job, ids: dict[int, Expr], rows: int, base: Expr | int, lanes: int) -> Stmt:
    held = _local(lanes * lanes, job.acc)

    def row(r: Expr) -> Stmt:
        return _row_vector(job, {**ids, rows: add(base, _fold(r))}, held, mul(_fold(r), lanes), lanes)

    steps = [tirx.AllocBuffer(held), loop("r", lanes, row)]
    vectors = [_bind(steps, _load(held, i * lanes, lanes)) for i in range(lanes)]
    d = 1
    while d < lanes:
        low = [imm(i if not i & d else lanes + i - d) for i in range(lanes)]
        high = [imm(i + d if not i & d else lanes + i) for i in range(lanes)]
        folded = []
        for a, b in zip(vectors[::2], vectors[1::2], strict=True):
            first, second = _bind(steps, tirx.Shuffle([a, b], low)), _bind(steps, tirx.Shuffle([a, b], high))
            folded.append(_bind(steps, job.op.combine(first, second)))
        vectors, d = folded, 2 * d
    steps.append(tirx.BufferStore(held, vectors[0], [tirx.Ramp(imm(0), imm(1), imm(lanes))]))
    out = _vectors(
        lanes, lambda v: job.finish({**ids, rows: add(base, _fold(v))}, tirx.BufferLoad(held, [v]))
    )
    return seq([*steps, out])


def _load(buf: Buf, at: int, lanes: int) -> Expr:
    return tirx.BufferLoad(buf, [tirx.Ramp(imm(at), imm(1), imm(lanes))])


def _row_vector(job: _Job, ids: dict[int, Expr], held: Buf, at: Expr | int, lanes: int) -> Stmt:
    """held[at : at + lanes] = one row folded to a vector, the ragged end included."""
    unroll = max(1, min(UNROLL, job.extent // lanes))
    regs = _local(unroll * lanes, job.acc)
    step = unroll * lanes

    def take(buf: Buf, slot: Expr | int, base: Expr | int, width: int) -> Stmt:
        def lane(v: Expr) -> Stmt:
            place = add(slot, _fold(v))
            new = job.op.combine(tirx.BufferLoad(buf, [place]), job.value(ids, add(base, _fold(v))))
            return tirx.BufferStore(buf, new, [place])

        return _vectors(width, lane)

    steps: list[Stmt] = [tirx.AllocBuffer(regs)]

    def cleared(slot: int) -> Stmt:
        return _vectors(lanes, lambda v: tirx.BufferStore(regs, job.first(), [add(slot * lanes, _fold(v))]))

    steps += [cleared(u) for u in range(unroll)]
    full = job.extent // step
    if full:

        def round_(k: Expr) -> Stmt:
            return seq(
                [take(regs, u * lanes, add(mul(_fold(k), step), u * lanes), lanes) for u in range(unroll)]
            )

        steps.append(loop("k", full, round_))
    done = full * step
    for u in range((job.extent - done) // lanes):
        steps.append(take(regs, u * lanes, done, lanes))
        done += lanes
    total = _bind(steps, _load(regs, 0, lanes))
    for u in range(1, unroll):
        total = _bind(steps, job.op.combine(total, _load(regs, u * lanes, lanes)))
    steps.append(tirx.BufferStore(held, total, [tirx.Ramp(add(at), imm(1), imm(lanes))]))
    width, lane0 = lanes, 0
    while done < job.extent:
        while width > job.extent - done:
            width //= 2
        steps.append(take(held, add(at, lane0), done, width))
        done, lane0 = done + width, lane0 + width
    return seq(steps)


def _bind(steps: list[Stmt], value: Expr) -> Expr:
    """A vector held in a local slot: TVM would substitute one binding into the next, doubling the expression
    each time."""
    dtype = dtype_of(value)
    scalar, _, lanes = dtype.partition("x")
    slot = _local(int(lanes or 1), scalar)
    place = [tirx.Ramp(imm(0), imm(1), imm(int(lanes)))] if lanes else [imm(0)]
    var = tirx.Var("r", dtype)
    steps += [
        tirx.AllocBuffer(slot),
        tirx.BufferStore(slot, value, place),
        tirx.Bind(var, tirx.BufferLoad(slot, place)),
    ]
    return var


def _across(job: _Job, ids: dict[int, Expr], vector_axis: int, lanes: int) -> Stmt:
    """Rows side by side: a few vectors of outputs run down the reduced axis together."""
    steps: list[Stmt] = []
    extent, done = job.src.shape[vector_axis], 0
    while done < extent:
        while lanes > extent - done:
            lanes //= 2
        slots = min(UNROLL, (extent - done) // lanes)
        count = (extent - done) // (slots * lanes)

        def group(g: Expr, done: int = done, slots: int = slots, lanes: int = lanes) -> Stmt:
            return _columns(job, ids, vector_axis, add(done, mul(_fold(g), slots * lanes)), slots, lanes)

        steps.append(loop("g", count, group))
        done += count * slots * lanes
    return seq(steps)


def _columns(job: _Job, ids: dict[int, Expr], vector_axis: int, base: Expr, slots: int, lanes: int) -> Stmt:
    regs = _local(slots * lanes, job.acc)

    def each(body: Callable[[Expr, dict[int, Expr]], Stmt]) -> Stmt:
        def slot(u: int) -> Stmt:
            def lane(v: Expr) -> Stmt:
                at = add(u * lanes, _fold(v))
                return body(at, {**ids, vector_axis: add(base, at)})

            return _vectors(lanes, lane)

        return seq([slot(u) for u in range(slots)])

    def take(k: Expr) -> Stmt:
        return each(
            lambda at, row: tirx.BufferStore(
                regs, job.op.combine(tirx.BufferLoad(regs, [at]), job.value(row, k)), [at]
            )
        )

    return seq(
        [
            tirx.AllocBuffer(regs),
            each(lambda at, row: tirx.BufferStore(regs, job.first(), [at])),
            loop("k", job.extent, take),
            each(lambda at, row: job.finish(row, tirx.BufferLoad(regs, [at]))),
        ]
    )


def _one_by_one(job: _Job, ids: dict[int, Expr]) -> Stmt:
    regs = _local(1, job.acc)
    zero = [imm(0)]

    def take(k: Expr) -> Stmt:
        return tirx.BufferStore(regs, job.op.combine(tirx.BufferLoad(regs, zero), job.value(ids, k)), zero)

    start = tirx.BufferStore(regs, job.first(), zero)
    return seq(
        [
            tirx.AllocBuffer(regs),
            start,
            loop("k", job.extent, take),
            job.finish(ids, tirx.BufferLoad(regs, zero)),
        ]
    )


def emit_cumsum(cx: Context, src: Tile, dst: Tile, axis: int, reverse: bool = False, op: str = "sum") -> Stmt:
    """dst[…, k, …] = src[…, 0, …] ∘ … ∘ src[…, k, …] (from the far end with ``reverse``), in order; src and
    dst may be one tile.

    ``op``: sum, max or min. Accumulates in `acc_dtype`, rounds each output.

    Raises:
        TileValueError: unknown op, axis out of range, different shapes.
        TileTypeError: dtypes that the op is not defined for.
    """
    if op not in ("sum", "max", "min"):
        raise TileValueError(f"T.cumsum: unknown scan {op!r}", expected="sum, max or min")
    rank = len(src.shape)
    if src.shape != dst.shape:
        raise TileValueError(
            f"T.cumsum of {list(src.shape)} into {list(dst.shape)}", expected="tiles of one shape"
        )
    if not -rank <= axis < rank:
        raise TileValueError(
            f"T.cumsum along axis {axis} of a tile with {rank} axes", expected=f"{-rank} … {rank - 1}"
        )
    axis %= rank
    acc = acc_dtype(op, src.dtype, dst.dtype)
    job = _Job(src, dst, axis, _OPS[op], acc, True)
    across = [i for i in job.kept if src.strides[i] == 1 and src.shape[i] > 1]
    inner = across[0] if across else None
    outer = [i for i in job.kept if i != inner]

    def scan(ids: dict[int, Expr], base: Expr | int, lanes: int) -> Stmt:
        regs = _local(lanes, acc)

        def each(body: Callable[[Expr, dict[int, Expr]], Stmt]) -> Stmt:
            def lane(v: Expr) -> Stmt:
                return body(v, ids if inner is None else {**ids, inner: add(base, _fold(v))})

            return _vectors(lanes, lane)

        def step(k: Expr) -> Stmt:
            k = _fold(k)
            place = add(job.extent - 1, mul(k, -1)) if reverse else add(k)

            def one(v: Expr, row: dict[int, Expr]) -> Stmt:
                return tirx.BufferStore(
                    regs, job.op.combine(tirx.BufferLoad(regs, [v]), job.value(row, place)), [v]
                )

            def put(v: Expr, row: dict[int, Expr]) -> Stmt:
                at = dst.index(*(place if i == axis else row[i] for i in range(rank)))
                return convert.store(
                    dst.buf, at, convert.cast(tirx.BufferLoad(regs, [v]), acc, dst.dtype), dst.dtype
                )

            return seq([each(one), each(put)])

        start = each(lambda v, row: tirx.BufferStore(regs, job.first(), [v]))
        return seq([tirx.AllocBuffer(regs), start, loop("k", job.extent, step)])

    def rows(ids: dict[int, Expr]) -> Stmt:
        if inner is None:
            return scan(ids, 0, 1)
        steps: list[Stmt] = []
        done, lanes = 0, _lanes(src.dtype, acc)
        while done < src.shape[inner]:
            while lanes > src.shape[inner] - done:
                lanes //= 2
            count = (src.shape[inner] - done) // lanes

            def group(g: Expr, done: int = done, lanes: int = lanes) -> Stmt:
                return scan(ids, add(done, mul(_fold(g), lanes)), lanes)

            steps.append(loop("g", count, group))
            done += count * lanes
        return seq(steps)

    return _nest(job, outer, {}, rows)
