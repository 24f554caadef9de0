"""What the launcher in C must know of a CUDA kernel, as the table of tilescale/native/cuda.c."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.cuda.ops.tma import TensorMap
from tilescale.compiler.gpu.cexpr import bits_of, constant
from tilescale.compiler.gpu.cprinter import access_bytes
from tilescale.compiler.gpu.kernel import Source, ThreadKernel
from tilescale.compiler.ir.program import TileProgram
from tilescale.compiler.tvm_compat import EXTERN_CALLS, ir, is_buffer_var, structural_walk, tirx
from tilescale.errors import InternalError

COOPERATIVE, DEPENDENT, DEVICE, UNORDERED, TEAM, BARE, AWAITED = 1, 2, 4, 8, 16, 32, 64
_SLOT, _FLOAT, _MAP, _FAILURE, _TEAM, _LOG = 0, 1, 2, 3, 4, 5
#: parameters that are no slot of a call
_FORMS = {"map": _MAP, "failure": _FAILURE, "team": _TEAM, "log": _LOG}
_CONST, _LOAD = 0, 1
_OPERATIONS = {"Add": 2, "Sub": 3, "Mul": 4, "FloorDiv": 5, "FloorMod": 6, "Min": 7, "Max": 8}
#: dtype → CUtensorMapDataType
_MAP_TYPES = {
    "bool": 0,
    "uint8": 0,
    "int8": 0,
    "float8_e4m3fn": 0,
    "float8_e5m2": 0,
    "uint16": 1,
    "int16": 1,
    "uint32": 2,
    "int32": 3,
    "uint64": 4,
    "int64": 5,
    "float16": 6,
    "float32": 7,
    "float64": 8,
    "bfloat16": 9,
}
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
_PROMOTIONS = {0: 0, 64: 1, 128: 2, 256: 3}
#: what copies by TMA, cp.async and 16-byte accesses ask of an address
WIDEST = 16
#: bytes of a packet
PACKET = 16
#: functions that take an address as it is
_ADDRESSES = (
    "ts::peer",
    "ts::twin",
    "ts::signal_",
    "ts::wait<",
    "ts::test<",
    "ts::system_",
    "ts::put_packet",
    "ts::get_packet",
    "ts::look_for_packet",
    "ts::put_dense",
    "ts::put_two_dense",
    "ts::look_for_dense",
    "ts::look_for_two_dense",
    "ts::empty_dense",
    "ts::empty_two_dense",
    "ts::await_packets",
    "ts::launch_of_packets",
    "ts::count_packets",
    "ts::log_",
)


def description(
    kernel: ThreadKernel, program: TileProgram, parameters: list[int], fingerprint: int = 0
) -> list[int]:
    """The table. ``parameters``: the words of the program's parameters (`driver`), the same as on the CPU.
    ``fingerprint``: what ranks compare when they launch together."""
    n = len(program.params)
    flags = COOPERATIVE * kernel.cooperative | DEPENDENT * kernel.dependent
    flags |= DEVICE * kernel.device | UNORDERED * (not kernel.ordered) | TEAM * kernel.team
    flags |= BARE * kernel.bare | AWAITED * kernel.awaited
    slots = _slots(kernel, program)
    programs = [word for extent in kernel.grid for word in _grid_program(extent, slots)]
    head = [1, n, len(program.symbols), kernel.threads, kernel.shared_bytes, flags, *kernel.cluster]
    head += [len(kernel.sources), len(kernel.maps), len(programs), fingerprint]
    args = [
        word
        for var, source in zip(kernel.func.params, kernel.sources, strict=True)
        for word in _argument(var, source, n)
    ]
    maps = [word for m in kernel.maps for word in _map(m, program.params[m.param])]
    return [*head, *args, *maps, *programs, *_alignments(kernel, program), *parameters]


def _slot(source: Source, n: int) -> int:
    """Slots: the parameters, rank, world, the symbols."""
    return {"param": source.index, "rank": n, "world": n + 1, "symbol": n + 2 + source.index}[source.kind]


def _slots(kernel: ThreadKernel, program: TileProgram) -> dict[Any, int]:
    """Where the integers that a grid may be computed from lie: the function's variables, and the program's
    own."""
    n = len(program.params)
    found = {var: n + 2 + k for k, var in enumerate(program.symbols.values())}
    found |= {p.var: k for k, p in enumerate(program.params) if not is_buffer_var(p.var)}
    return found | {
        var: _slot(s, n)
        for var, s in zip(kernel.func.params, kernel.sources, strict=True)
        if s.kind not in _FORMS
    }


def _argument(var: Any, source: Source, n: int) -> tuple[int, int]:
    if source.kind in _FORMS:
        return _FORMS[source.kind], source.index
    floating = not is_buffer_var(var) and str(var.ty) in (
        "float32",
        "float16",
        "bfloat16",
        "float8_e4m3fn",
        "float8_e5m2",
    )
    return _FLOAT if floating else _SLOT, _slot(source, n)


def _map(m: TensorMap, p: Any) -> list[int]:
    return [
        m.param,
        _MAP_TYPES[str(p.spec.dtype)],
        len(m.box),
        _SWIZZLES[m.swizzle],
        _PROMOTIONS[m.l2],
        *m.box,
    ]


def _grid_program(extent: Any, slots: dict[Any, int]) -> list[int]:
    """An extent in postfix order: the number of pairs, then (operation, value)."""
    pairs: list[tuple[int, int]] = []

    def emit(e: Any) -> None:
        known = e if isinstance(e, int) else constant(e)
        if known is not None:
            pairs.append((_CONST, known))
        elif isinstance(e, tirx.Cast):
            emit(e.value)
        elif type(e).__name__ in _OPERATIONS:
            emit(e.a)
            emit(e.b)
            pairs.append((_OPERATIONS[type(e).__name__], 0))
        elif isinstance(e, ir.Var) and e in slots:
            pairs.append((_LOAD, slots[e]))
        else:
            raise InternalError(f"the grid's extent {extent} holds {e}, which no call says")

    emit(extent)
    return [len(pairs), *(word for pair in pairs for word in pair)]


def _alignments(kernel: ThreadKernel, program: TileProgram) -> list[int]:
    """How each parameter's memory must be aligned, in bytes: its element, its widest vector access, 16 where
    an instruction takes an address."""
    widest: dict[Any, int] = {}

    def note(buffer: Any, size: int) -> None:
        widest[buffer] = max(widest.get(buffer, 0), size)

    def passed(call: Any) -> None:
        if call.op.name not in EXTERN_CALLS or str(call.args[0].value).startswith(_ADDRESSES):
            return
        name = str(call.args[0].value)
        size = int(name[name.index("<") + 1 : -1]) if name.startswith("ts::cp_async<") else WIDEST
        for a in call.args:
            if isinstance(a, ir.Call) and a.op.name in ("tirx.address_of", "tirx.buffer_data"):
                named = a.args[0].source if isinstance(a.args[0], ir.TensorLoad) else a.args[0]
                note(twins.get(named, named), size)

    def there(s: Any) -> None:
        found: list[Any] = []
        structural_walk(
            s.data, (ir.Call, lambda c: found.append(c.args[0]) if c.op.name == "tirx.buffer_data" else None)
        )
        if str(s.buffer.ty.storage_scope) == "global.symm":
            twins[s.buffer] = found[0]

    twins: dict[Any, Any] = {}  # of another rank's memory: the own tensor, which lies at the same place
    structural_walk(kernel.func.body, (tirx.DeclBuffer, there))
    structural_walk(
        kernel.func.body,
        (ir.TensorLoad, lambda e: note(twins.get(e.source, e.source), access_bytes(e.source, e.indices))),
    )
    structural_walk(
        kernel.func.body,
        (tirx.BufferStore, lambda s: note(twins.get(s.buffer, s.buffer), access_bytes(s.buffer, s.indices))),
    )
    structural_walk(kernel.func.body, (ir.Call, passed))
    out = [bits_of(str(p.spec.dtype)) // 8 for p in program.params]
    for var, source in zip(kernel.func.params, kernel.sources, strict=True):
        if source.kind == "param" and var in widest:
            out[source.index] = max(out[source.index], widest[var])
    for k, p in enumerate(program.params):
        if getattr(p.spec, "kind", "") == "packets":  # each is one access of as many bytes
            out[k] = max(out[k], PACKET)
    for m in kernel.maps:
        out[m.param] = max(out[m.param], WIDEST)
    return out
