"""What a program's body says as a whole, asked before it is made ready for the simulator."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.ir.operations import effects_of, find
from tilescale.compiler.ir.scales import SCALES, WIDTHS
from tilescale.compiler.tvm_compat import ir, is_expr, structural_walk, tirx
from tilescale.language.dtypes import BITS


def role(s: Any) -> str | None:
    return str(s.node.value) if isinstance(s, tirx.AttrStmt) and s.attr_key == "ts.role" else None


def forks(body: Any) -> bool:
    found: list[Any] = []
    structural_walk(
        body,
        (
            tirx.AttrStmt,
            lambda s: (
                found.append(s) if s.attr_key == "ts.scale" and SCALES[int(s.value.value)] in WIDTHS else None
            ),
        ),
    )
    return bool(found)


def own_registers(body: Any) -> set[Any]:
    """Buffers in registers that nobody but the executor which allocates them can touch: no executor below it
    names them, and no engine, atomic operation or view does. Their accesses collide with nothing."""
    own: set[Any] = set()

    def allocated(s: Any) -> None:
        if s.buffer.ty.storage_scope.startswith("local"):
            own.add(s.buffer)

    def forks(s: Any) -> None:
        if role(s) is None and not (s.attr_key == "ts.scale" and SCALES[int(s.value.value)] in WIDTHS):
            return
        inside: set[Any] = set()
        structural_walk(s.body, (tirx.AllocBuffer, lambda a: inside.add(a.buffer)))
        structural_walk(s.body, (ir.Var, lambda v: None if v in inside else own.discard(v)))

    def by_others(call: Any) -> None:
        op = find(call)
        if op is None or (
            call.op.name != "ts.atomic"
            and not op.fills
            and not op.queue(call)
            and not any(a.asynchronous for a in effects_of(call))
        ):
            return
        structural_walk(call, (ir.Var, own.discard))

    structural_walk(body, (tirx.AllocBuffer, allocated))
    structural_walk(body, (tirx.AttrStmt, forks))
    structural_walk(body, (ir.Call, by_others))
    structural_walk(body, (tirx.DeclBuffer, lambda s: own.difference_update((s.buffer, s.data.args[0]))))
    return own


def cell_bits(body: Any) -> dict[Any, int]:
    """For buffers that are viewed, and their views: the width of the narrowest element under which the memory
    is seen."""
    roots: dict[Any, Any] = {}
    narrow: dict[Any, int] = {}

    def bits(var: Any) -> int:
        return BITS[str(getattr(var.ty.dtype, "dtype", var.ty.dtype))]

    def note(s: Any) -> None:
        old = s.data.args[0]
        root = roots.setdefault(s.buffer, roots.get(old, old))
        narrow[root] = min(narrow.get(root, bits(root)), bits(s.buffer))

    structural_walk(body, (tirx.DeclBuffer, note))
    return {**{view: narrow[root] for view, root in roots.items()}, **narrow}


def floats_decide(body: Any) -> bool:
    """Whether something that is no float is made of floats: by a comparison, a conversion, an operation that
    reads floats and writes other numbers, or a view."""
    found: list[bool] = []

    def is_float(dtype: Any) -> bool:
        return str(dtype).startswith(("float", "bfloat"))

    def call(c: Any) -> None:
        if find(c) is None:
            found.append(not is_float(c.ty) and any(is_float(a.ty) for a in c.args if is_expr(a)))
            return
        touched = [(a.mode, a.region.source.ty) for a in effects_of(c)]
        reads = any(is_float(ty.dtype) for mode, ty in touched if mode != "write")
        tiles = [ty for mode, ty in touched if mode != "read" and not ty.storage_scope.endswith("signal")]
        found.append(reads and any(not is_float(ty.dtype) for ty in tiles))

    def view(s: Any) -> None:
        found.append(is_float(s.data.args[0].ty.dtype) != is_float(s.buffer.ty.dtype))

    comparisons = (tirx.EQ, tirx.NE, tirx.LT, tirx.LE, tirx.GT, tirx.GE)
    structural_walk(body, (comparisons, lambda e: found.append(is_float(e.a.ty))))
    structural_walk(body, (tirx.Cast, lambda e: found.append(is_float(e.value.ty) and not is_float(e.ty))))
    structural_walk(body, (ir.Call, call))
    structural_walk(body, (tirx.DeclBuffer, view))
    return any(found)


def updated(body: Any) -> set[Any]:
    """Buffers that atomic operations update."""
    found: set[Any] = set()
    structural_walk(
        body, (ir.Call, lambda c: found.add(c.args[0].source) if c.op.name == "ts.atomic" else None)
    )
    return found
