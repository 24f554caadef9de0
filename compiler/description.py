"""What the runtime and the kernel object must know of a program, as plain integers, strings and dicts: the
same for every target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tilescale.compiler.ir.buffers import buffer_uses, written_buffers
from tilescale.compiler.ir.numbers import constant
from tilescale.compiler.ir.pointed import address_of
from tilescale.compiler.ir.program import TileProgram
from tilescale.compiler.ir.source import location
from tilescale.compiler.ops.participants import as_meta, demands
from tilescale.compiler.ops.print import dtype_code
from tilescale.compiler.passes.residency import shared_bytes, synchronizes_ranks
from tilescale.compiler.tvm_compat import ir, structural_walk, tirx
from tilescale.errors import TileValueError
from tilescale.language.annotations import TensorSpec
from tilescale.language.dtypes import Narrow
from tilescale.language.symbolic import Sym, SymExpr, settle

#: The runtime's contract (docs/RUNTIME.md): kinds of parameters, rules of extents, flags of a kernel.
KINDS = {"tensor": 0, "int": 1, "float": 2, "symm": 3, "signal": 4, "packets": 6, "dense": 7}
SIGNAL_KEPT = 5
EQUALS, DEFINES, SAME, UNCHECKED, DEFINES_MULTIPLE = 0, 1, 2, 3, 4
#: where in the value of DEFINES_MULTIPLE the number stands, above the symbol
MULTIPLE_SHIFT = 32


@dataclass
class Artifact:
    """A compiled kernel beside its code. ``meta`` is JSON: what `tilescale.kernel` needs to call it and to
    explain refusals."""

    meta: dict[str, Any]
    desc: list[int]
    sites: list[str]


class Symbols:
    """Where each symbolic extent gets its value: the first extent or stride, in order of parameters, that is
    it alone."""

    def __init__(self, program: TileProgram):
        self.slots = {name: k for k, name in enumerate(program.symbols)}
        self.multiples = program.multiples
        self.defined: set[str] = set()

    def rule(self, value: Any) -> tuple[int, int]:
        """``(how, value)`` of one extent or stride."""
        known = settle(value)
        if isinstance(known, int):
            return EQUALS, known
        if isinstance(known, Sym):
            slot = self.slots[known.name]
            if known.name in self.defined:
                return SAME, slot
            self.defined.add(known.name)
            multiple = self.multiples.get(known.name, 1)
            if multiple == 1 and known.dtype == "int32":
                return DEFINES, slot
            return DEFINES_MULTIPLE, slot | multiple << MULTIPLE_SHIFT  # 1: an int64, which nothing bounds
        return UNCHECKED, 0  # an expression: the kernel object computes and compares it


def parameter_words(program: TileProgram) -> list[int]:
    """The description's part about the parameters.

    Raises:
        TileValueError: an extent that no call would define.
    """
    written, symbols = written_parameters(program), Symbols(program)
    words = [word for k, p in enumerate(program.params) for word in _parameter(p, k in written, symbols)]
    _require_defined(program, symbols)
    asked = demands(program)
    return [*words, len(asked), *(word for d in asked for word in d.words)] if asked else words


def metadata(program: TileProgram) -> dict[str, Any]:
    """What a kernel object keeps of a program, at any level, as JSON.

    Raises:
        TileValueError: an extent that no call would define.
    """
    parameter_words(program)
    written = written_parameters(program)
    params = [_metadata(p, k in written) for k, p in enumerate(program.params)]
    for k in untouched_parameters(program):
        params[k]["untouched"] = True
    for name, tensors in pointed(program).items():
        next(p for p in params if p["name"] == name)["points"] = tensors
    launch = program.launch
    return {
        "name": program.name,
        "params": params,
        "symbols": list(program.symbols),
        "multiples": dict(program.multiples),
        "returns": list(program.returns),
        "launches": program.launches,
        "loc": location(program.loc),
        "launch_loc": location(launch.loc),
        "collective": any(p["kind"] in ("symm", "signal", "packets") for p in params)
        or synchronizes_ranks(program.func.body),
        "threads": launch.threads,
        "shared_bytes": shared_bytes(program),
        "demands": [as_meta(d) for d in demands(program)],
    }


def _parameter(p: Any, written: bool, symbols: Symbols) -> list[int]:
    code, bits = divmod(dtype_code(str(p.spec.dtype)), 256)
    if not isinstance(p.spec, TensorSpec):
        return [KINDS["float" if p.spec.dtype.is_float else "int"], code, bits, 0, 0, 0]
    kind = SIGNAL_KEPT if p.spec.kind == "signal" and p.spec.keep else KINDS[p.spec.kind]
    kind = KINDS["dense"] if p.spec.dense else kind
    out = [kind, code, bits, int(written), len(p.spec.shape)]
    for extent in p.spec.shape:
        out += symbols.rule(extent)
    out.append(0 if p.spec.strides is None else 1)
    for stride in p.spec.strides or ():
        out += symbols.rule(stride)
    return out


def _require_defined(program: TileProgram, symbols: Symbols) -> None:
    for name in program.symbols:
        if name not in symbols.defined:
            raise TileValueError(
                f"T.dynamic({name!r}) stands alone in no extent or stride of a parameter of {program.name}, "
                "so no call says what it is",
                loc=program.loc,
                expected=f"a tensor parameter with {name} itself as an extent, before any with an "
                "expression of it",
            )


def _metadata(p: Any, written: bool) -> dict[str, Any]:
    out: dict[str, Any] = {
        "name": p.name,
        "dtype": str(p.spec.dtype),
        "loc": location(p.loc),
        "written": written,
        "output": p.output,
    }
    if not isinstance(p.spec, TensorSpec):
        return {**out, "kind": "scalar"}
    out["keep"] = p.spec.kind == "signal" and p.spec.keep
    if p.spec.kind == "packets":
        out |= {
            "slots": [expression(s) for s in p.spec.slots or ()],
            "of": str(p.spec.of),
            "dense": p.spec.dense,
        }
    if isinstance(p.spec.of, Narrow):
        out["of"] = str(p.spec.of)
    if p.spec.pointer:
        out["pointer"] = True
    if p.spec.declared is not None:
        out["declared"] = _extents(p.spec.declared)
    return {**out, "kind": p.spec.kind, **_extents(p.spec)}


def _extents(spec: TensorSpec) -> dict[str, Any]:
    strides = None if spec.strides is None else [expression(s) for s in spec.strides]
    return {"shape": [expression(s) for s in spec.shape], "strides": strides}


#: operations of extents that a call computes, as `expression` has them
_OPERATORS = {tirx.Add: "+", tirx.Sub: "-", tirx.Mul: "*", tirx.FloorDiv: "//"}


def pointed(program: TileProgram) -> dict[str, list[dict[str, Any]]]:
    """What a kernel takes the memory behind its parameters ``p: T.ptr`` for: by parameter, the dtype, shape
    and strides of each tensor that every call makes there. An extent that is more than arithmetic of the
    call's numbers is None."""
    tables = {p.var: p.name for p in program.params if isinstance(p.spec, TensorSpec) and p.spec.pointer}
    if not tables:
        return {}
    numbers = {p.var for p in program.params if not isinstance(p.spec, TensorSpec)}
    numbers |= set(program.symbols.values())
    found: dict[str, list[dict[str, Any]]] = {}
    maybe: list[Any] = []  # made by some calls alone: nothing is asked of the others

    def extent(e: Any) -> Any:
        if (known := constant(e)) is not None:
            return known
        if type(e) in _OPERATORS:
            parts = [extent(e.a), extent(e.b)]
            return None if None in parts else [_OPERATORS[type(e)], *parts]
        return str(e.name) if e in numbers else None

    def made(s: Any) -> None:
        if address_of(s) is None or s.data.args[0] not in tables or any(s.same_as(x) for x in maybe):
            return
        of = s.buffer.ty
        shape, steps = ([extent(e) for e in given] for given in (of.shape, of.strides))
        one = {"dtype": str(of.dtype), "shape": shape, "strides": steps or None}
        found.setdefault(tables[s.data.args[0]], []).append(one)

    def inside(s: Any) -> None:
        structural_walk(s, (tirx.DeclBuffer, maybe.append))

    structural_walk(program.func.body, ((tirx.IfThenElse, tirx.For, tirx.While), inside))
    structural_walk(program.func.body, (tirx.DeclBuffer, made))
    return found


def expression(value: Any) -> Any:
    """A symbolic extent as JSON: an int, a symbol's name, or [operator, a, b]."""
    known = settle(value)
    if isinstance(known, Sym):
        return known.name
    if isinstance(known, SymExpr):
        return [known.op, *(expression(a) for a in known.args)]
    return int(known)


def untouched_parameters(program: TileProgram) -> set[int]:
    """Tensors that nothing in the kernel names, and whose extents decide nothing that others do not say: a
    call may leave them out."""
    uses = buffer_uses(program.func.body)
    tensors = {k: p.spec for k, p in enumerate(program.params) if isinstance(p.spec, TensorSpec)}
    left = {k for k, spec in tensors.items() if spec.kind == "tensor" and program.params[k].var not in uses}
    left -= {k for k in left if tensors[k].pointer or program.params[k].output}
    extents = {k: [settle(e) for e in (*spec.shape, *(spec.strides or ()))] for k, spec in tensors.items()}
    there = [e for k, listed in extents.items() if k not in left for e in listed]
    said = {e.name for e in there if isinstance(e, Sym)}
    asked = set().union(*map(_symbols, there)) | _named(program)
    return {k for k in left if set().union(*map(_symbols, extents[k])) & asked <= said}


def _symbols(extent: Any) -> set[str]:
    if isinstance(extent, Sym):
        return {extent.name}
    return set().union(*map(_symbols, extent.args)) if isinstance(extent, SymExpr) else set()


def _named(program: TileProgram) -> set[str]:
    """The symbols that a kernel's body and its grid name."""
    names, found = {var: name for name, var in program.symbols.items()}, set()
    for part in (program.func.body, *program.launch.grid, *program.launch.cluster):
        structural_walk(part, (ir.Var, lambda v: found.add(names[v]) if v in names else None))
    return found


def written_parameters(program: TileProgram) -> set[int]:
    """Parameters that the kernel may write."""
    touched = written_buffers(program)
    return {k for k, p in enumerate(program.params) if p.var in touched}
