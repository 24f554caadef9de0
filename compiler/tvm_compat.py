"""The only module that imports TVM: an exact version check, an import without side effects, the names that we
use.

``from tilescale.compiler.tvm_compat import ir, tirx, tvm``
"""

from __future__ import annotations

import importlib
import os
import sys
import types
from collections.abc import Callable
from importlib import metadata
from typing import Any

from tilescale.errors import TileError

TVM_VERSION = "0.27.0.post1"


def _check_version() -> None:
    """TVM's IR changes between releases without notice, so anything but the exact version is refused before
    it can break."""
    try:
        found = metadata.version("apache-tvm")
    except metadata.PackageNotFoundError:
        raise TileError(
            "compiling a kernel needs apache-tvm, which is not installed",
            expected=f"apache-tvm=={TVM_VERSION}",
            hint=f"pip install apache-tvm=={TVM_VERSION}",
        ) from None
    if found != TVM_VERSION:
        raise TileError(
            f"apache-tvm {found} is installed, which this version of TileScale does not know",
            expected=f"apache-tvm=={TVM_VERSION}",
            hint=f"pip install apache-tvm=={TVM_VERSION}",
        )


_DISCO = "tvm.runtime.disco"


def _import_tvm() -> types.ModuleType:
    """``import tvm`` in 0.2 s instead of 1.5 s and without its excepthook (which hides errors and kills child
    processes)."""
    if "tvm" in sys.modules:
        return sys.modules["tvm"]
    hook = sys.excepthook
    # tvm_ffi and tvm.relax import torch where it is installed (0.8 s); None makes that import fail, which
    # both allow.
    hide_torch = "torch" not in sys.modules
    # tvm.relax (graphs of tensor operators, 0.2 s) is of no use here; it is imported after all when someone
    # asks for it.
    hide_relax = "tvm.relax" not in sys.modules
    # Its own back ends for GPUs and others (0.1 s of Python) are not used: TVM's own switch leaves them out.
    switch = "TVM_DEVICE_BACKEND_AUTOLOAD"
    asked = os.environ.get(switch)
    os.environ[switch] = "0"
    if hide_torch:
        sys.modules["torch"] = None  # type: ignore[assignment]
    if hide_relax:
        sys.modules["tvm.relax"] = types.ModuleType("tvm.relax")
    # Nor is its runtime of many processes. tvm does without where it cannot be imported; where its library is
    # not installed, it finds that out by an error with a backtrace, which takes 0.2 s to make.
    sys.modules.setdefault(_DISCO, None)  # type: ignore[arg-type]
    try:
        module = importlib.import_module("tvm")
    finally:
        sys.excepthook = hook
        os.environ.pop(switch)
        if asked is not None:
            os.environ[switch] = asked
        if hide_torch:
            del sys.modules["torch"]
        if hide_relax:
            del sys.modules["tvm.relax"]
        if sys.modules[_DISCO] is None:
            del sys.modules[_DISCO]
    if hide_relax:
        vars(module).pop("relax", None)

        def load_relax(name: str) -> types.ModuleType:
            if name != "relax":
                raise AttributeError(f"module 'tvm' has no attribute {name!r}")
            return importlib.import_module("tvm.relax")

        module.__getattr__ = load_relax  # type: ignore[method-assign]
    return module


_check_version()
tvm = _import_tvm()
tirx = importlib.import_module("tvm.tirx")
ir = importlib.import_module("tvm.ir")
sym = importlib.import_module("tvm.sym")
tvm_ffi = importlib.import_module("tvm_ffi")
transform = importlib.import_module("tvm.tirx.transform")

_ffi_of_structure = importlib.import_module("tvm_ffi._ffi_api")
_POSTORDER = int(tvm_ffi.WalkOrder.POSTORDER)
#: a type that callbacks are given for → its number in TVM's FFI. Asked of tvm_ffi itself, this was a tenth of
#: compiling a kernel.
_numbers: dict[Any, int] = {}


def _numbered(callbacks: Any) -> list[tuple[int, Callable[[Any], Any]]]:
    """Callbacks as TVM's FFI takes them: ``(type, f)``, ``((type, …), f)``, a sequence of such pairs, or a
    function of everything."""
    if type(callbacks) is tuple and len(callbacks) == 2:  # most are one type and one function
        number = _numbers.get(callbacks[0])
        if number is not None:
            return [(number, callbacks[1])]
    if callable(callbacks):
        callbacks = (Any, callbacks)
    pairs = (
        [callbacks]
        if isinstance(callbacks, tuple) and len(callbacks) == 2 and callable(callbacks[1])
        else callbacks
    )
    made = []
    for types_of, call in pairs:
        for each in types_of if isinstance(types_of, tuple) else (types_of,):
            number = _numbers.get(each)
            if number is None:
                annotation = Any if each is object else each
                number = _numbers[each] = tvm_ffi.core.TypeSchema.from_annotation(
                    annotation
                ).origin_type_index
                assert number >= 0 or annotation is Any, f"{each} has no number"
            made.append((number, call))
    return made


def structural_walk(root: Any, callbacks: Any) -> Any:
    """Calls the first callback of a value's type for every value in ``root``, children first
    (tvm_ffi.structural_walk)."""
    return _ffi_of_structure.StructuralWalk(root, _numbered(callbacks), [], _POSTORDER)


def structural_map(root: Any, callbacks: Any) -> Any:
    """``root`` with what callbacks make of values of their types, children first (tvm_ffi.structural_map)."""
    return _ffi_of_structure.StructuralMap(root, _numbered(callbacks), [], _POSTORDER)


def structural_mutate(root: Any, callbacks: Any) -> Any:
    """``root`` with what callbacks ``(value, mutator)`` make of values of their types; they go on into
    children themselves. (tvm_ffi.structural_mutate asks each callback for its signature at every call, which
    was a tenth of compiling a kernel for the CPU.)"""
    entries = [(number, call, False) for number, call in _numbered(callbacks)]
    return _ffi_of_structure.StructuralMutate(root, entries)


def same_structure(a: Any, b: Any) -> bool:
    """Whether two programs are alike but for the names of what they bind."""
    return bool(tvm_ffi.structural_equal(a, b, map_free_vars=True))


def same_expression(a: Any, b: Any) -> bool:
    """Whether two expressions are written alike, over the same variables."""
    return bool(tvm_ffi.structural_equal(a, b))


is_expr = ir.is_prim_expr


#: the classes of expressions with two operands, ``a`` and ``b``
BINARY = (
    "Add", "Sub", "Mul", "Div", "Mod", "FloorDiv", "FloorMod", "Min", "Max", "LT", "LE", "GT",
    "GE", "EQ", "NE", "And", "Or", "LShift", "RShift", "BitwiseAnd", "BitwiseOr", "BitwiseXor",
)  # fmt: skip
#: names of operations that passes look for; asked of TVM, since its namespaces are no contract
IF_THEN_ELSE: str = tirx.if_then_else(
    tirx.Var("c", "bool"), tirx.Var("x", "int32"), tirx.Var("y", "int32")
).op.name
_REINTERPRET = tirx.reinterpret("int32", tirx.Var("x", "float32")).op
REINTERPRET: str = _REINTERPRET.name
EXTERN_CALLS: frozenset[str] = frozenset(
    call("int32", "f").op.name for call in (tirx.call_extern, tirx.call_pure_extern)
)


def hidden(value: Any) -> Any:
    """A value behind a reinterpretation as itself, which is no instruction, and of which TVM's analyses know
    nothing."""
    return ir.Call(_REINTERPRET, [value], ret_ty=value.ty)


def is_buffer_var(value: Any) -> bool:
    """Whether a value is the variable of a buffer."""
    return isinstance(value, ir.Var) and bool(tirx.is_buffer_var(value))


def guard_equality(check: Callable[[types.FrameType], None]) -> None:
    """Calls ``check(frame)`` with the asking frame before the truth of a deferred ``==`` or ``!=`` of
    expressions is given.

    TVM answers by identity of the operands, which its own Python relies on; in a kernel's helper ``1 if x ==
    2 else 0`` would silently choose a branch.
    """
    for kind in (tirx.expr.EqualOp, tirx.expr.NotEqualOp):
        answer = kind.__bool__

        def truth(self: Any, answer: Callable[[Any], bool] = answer) -> bool:
            check(sys._getframe(1))
            return answer(self)

        kind.__bool__ = truth


def guard_iteration(refuse: Callable[[Any], Any]) -> None:
    """Calls ``refuse(expression)`` where Python would go through an expression (``*x``, ``a, b = x``,
    ``sum(x)``): by its subscripts, that is, for ever or into an error of TVM's."""
    ir.Expr.__iter__ = refuse


def give_words(dtype: Callable[[Any], Any], astype: Callable[[Any, Any], Any]) -> None:
    """What a value may be asked for: ``x.dtype``, ``x.astype(dtype)``."""
    of_buffer = ir.Var.dtype.fget  # a buffer's variable has one already
    ir.Expr.dtype = property(dtype)
    ir.Var.dtype = property(lambda e: dtype(e) if isinstance(e.ty, ir.PrimType) else of_buffer(e))
    ir.Expr.astype = astype


#: TVM's older name of its expressions, which programs write in annotations
if not hasattr(tirx, "PrimExpr"):
    setattr(tirx, "PrimExpr", ir.Expr)  # noqa: B010  # no name that a checker finds there


def register_op(name: str, *, pure: bool = False) -> None:
    """Registers an operation of the tile language, printed by its own name. Impure ones are never moved or
    removed by TVM."""
    kind = tirx.CallEffectKind.Pure if pure else tirx.CallEffectKind.Opaque
    ir.register_op_attr(name, "TCallEffectKind", kind.value)
    ir.register_op_attr(name, "TScriptPrinterName", name, level=20)


__all__ = [
    "EXTERN_CALLS",
    "IF_THEN_ELSE",
    "REINTERPRET",
    "TVM_VERSION",
    "give_words",
    "guard_equality",
    "guard_iteration",
    "hidden",
    "ir",
    "is_buffer_var",
    "is_expr",
    "register_op",
    "same_expression",
    "same_structure",
    "structural_map",
    "structural_walk",
    "sym",
    "tirx",
    "transform",
    "tvm",
    "tvm_ffi",
]
