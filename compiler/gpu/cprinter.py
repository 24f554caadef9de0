"""Thread IR as a C-like kernel: names, statements, source lines. A target's printer (`cuda/printer.py`)
overrides the same few methods.

Names are the author's, made unique among those that can be seen. The author's line stands as a comment
wherever it changes, and every printed line knows its place, so that a compiler's complaint becomes one about
the kernel.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import PurePath
from typing import Any, ClassVar

from tilescale import source_text
from tilescale.compiler.gpu.cexpr import Expressions, bits_of, constant, dtype_of
from tilescale.compiler.gpu.kernel import ThreadKernel
from tilescale.compiler.gpu.printed import Printed
from tilescale.compiler.ir.source import loc_of
from tilescale.compiler.ir.walks import mentions
from tilescale.compiler.tvm_compat import EXTERN_CALLS, IF_THEN_ELSE, REINTERPRET, ir, structural_walk, tirx
from tilescale.errors import InternalError, Loc, utf8

#: what no variable may be called: C++'s words, and what the printed code itself uses
RESERVED = frozenset(
    "alignas alignof and and_eq asm auto bitand bitor bool break case catch char char16_t char32_t class "
    "compl const const_cast constexpr "
    "continue decltype default delete do double dynamic_cast else enum explicit export extern false float "
    "for friend goto if inline int "
    "long mutable namespace new noexcept not not_eq nullptr operator or or_eq private protected public "
    "register reinterpret_cast return "
    "short signed sizeof static static_assert static_cast struct switch template this thread_local throw "
    "true try typedef typeid typename "
    "union unsigned using virtual void volatile wchar_t while xor xor_eq ts half nv_bfloat16 uint uint2 "
    "uint4 dim3 min max abs "
    "blockIdx threadIdx blockDim gridDim warpSize INFINITY NAN".split()
)

#: what no kernel may be called besides: functions and types that the compiler's own headers declare
DECLARED = frozenset(
    "main acos acosh asin asinh asprintf assert atan atan2 atanh atexit atof atoi bsearch calloc cbrt ceil "
    "clock copysign cos cosh "
    "cospi div erf erfc erfcinv erfcx erfinv exit exp exp10 exp2 expm1 fabs fdim fdivide floor fma fmax "
    "fmin fmod free frexp getenv "
    "hypot ilogb index isfinite isinf isnan j0 j1 jn labs ldexp ldiv lgamma log log10 log1p log2 logb lrint "
    "lround malloc memcpy "
    "memset modf nan nearbyint nextafter norm normcdf pow printf qsort rand rcbrt read realloc remainder "
    "remquo rhypot rint rnorm "
    "round rsqrt scalbln scalbn select signal signbit sin sincos sinh sinpi sqrt srand strlen strtod system "
    "tan tanh tgamma time trap "
    "trunc wait write y0 y1 yn".split()
)


def symbol(name: str) -> str:
    """The function's name in the printed code: the kernel's own, unless C++ has another use for it (or for
    that of float32, expf)."""
    plain = "".join(c if c.isascii() else "_" for c in name)
    taken = RESERVED | DECLARED
    if plain != name or plain in taken or plain.rstrip("fl") in taken or plain.startswith("__"):
        return f"{plain}_kernel"
    return name


#: the attribute of a call of the author's own text, whose pointers may be read as up to 16 bytes at once
EXTERN = "extern"


class CPrinter(Expressions):
    """Prints one kernel."""

    #: bytes of one vector access → the C type that moves them
    words: ClassVar[dict[int, str]]
    #: thread_extent tag → the C expression
    thread_tags: ClassVar[dict[str, str]]

    def __init__(self, kernel: ThreadKernel):
        super().__init__()
        self.kernel = kernel
        self.lines: list[tuple[str, Loc | None]] = []
        self.head: list[str] = []  # what a signature asks to be done first
        self.depth = 0
        self.place: Loc | None = None
        # A local name would hide the function that is called.
        self.scopes: list[set[str]] = [{*RESERVED, *self.functions.values(), *self.double_functions.values()}]
        self.vectors = _moved_as_vectors(kernel.func.body)
        self.unused = _unused(kernel.func.body)

    # -- what targets give
    def signature(self) -> Iterable[str]:
        """The lines in front of the body, the opening brace included."""
        raise NotImplementedError

    def includes(self) -> Iterable[str]:
        """What stands at the head of the text, by ``self.used``; known when the body is printed."""
        raise NotImplementedError

    def arena(self, name: str, size: int) -> str:
        """The declaration of the block's shared memory."""
        raise NotImplementedError

    # -- the whole
    def run(self) -> Printed:
        """Prints the kernel."""
        for line in self.signature():
            self.write(line)
        with self.indented():
            for line in self.head:
                self.write(line)
            self.statement(self.kernel.func.body)
        self.write("}")
        head: list[tuple[str, Loc | None]] = [(line, None) for line in self.includes()]
        lines = head + self.lines
        return Printed("\n".join(t for t, _ in lines) + "\n", self.kernel.name, tuple(p for _, p in lines),
                       bool(self.kernel.remote and self.kernel.team))  # fmt: skip

    # -- lines and names
    def write(self, text: str) -> None:
        self.lines.append(("  " * self.depth + text, self.place))

    @contextmanager
    def indented(self) -> Iterator[None]:
        """A block of statements: one step to the right, with names of its own."""
        self.depth += 1
        self.scopes.append(set())
        yield
        self.scopes.pop()
        self.depth -= 1

    def declare(self, var: Any) -> str:
        """Gives a variable its name, the author's own where nothing visible has it."""
        base = re.sub(r"\W", "_", var.name, flags=re.ASCII) or "v"
        base = f"v{base}" if base[0].isdigit() else base
        name, k = base, 0
        while any(name in scope for scope in self.scopes):
            k += 1
            name = f"{base}_{k}"
        self.scopes[-1].add(name)
        self.names[var] = name
        return name

    def name(self, var: Any) -> str:
        if var not in self.names:
            raise InternalError(f"{var.name} is used before it is declared", loc=self.place)
        return self.names[var]

    def at(self, node: Any) -> None:
        """Notes where a statement comes from; a comment where that is another line than before."""
        loc = loc_of(getattr(node, "span", None))
        if loc is None:
            return
        changed = self.place is None or (loc.file, loc.line) != (self.place.file, self.place.line)
        self.place = loc
        if changed:
            source = source_text.line(loc.file, loc.line).strip().rstrip("\\")
            self.write(f"// {PurePath(utf8(loc.file)).name}:{loc.line}{'  ' + source if source else ''}")

    # -- statements
    def statement(self, s: Any) -> None:
        method = getattr(self, "s_" + type(s).__name__, None)
        if method is None:
            raise InternalError(f"no C for the statement {type(s).__name__}: {str(s)[:200]}", loc=self.place)
        method(s)

    def block(self, s: Any) -> None:
        with self.indented():
            self.statement(s)

    def s_SeqStmt(self, s: Any) -> None:
        seq = list(s.seq)
        for k, each in enumerate(seq):
            if k and self._initializes(seq[k - 1], each):
                continue  # stands in the declaration
            if (
                isinstance(each, tirx.AllocBuffer)
                and k + 1 < len(seq)
                and self._initializes(each, seq[k + 1])
            ):
                self._declare_with_value(each, seq[k + 1])
            else:
                self.statement(each)

    def _initializes(self, declared: Any, store: Any) -> bool:
        """Whether a store is the first value of the variable that is declared right in front of it."""
        if not isinstance(declared, tirx.AllocBuffer) or not isinstance(store, tirx.BufferStore):
            return False
        return (
            store.buffer.same_as(declared.buffer)
            and self._is_variable(declared.buffer)
            and not mentions(store.value, declared.buffer)
        )

    def _is_variable(self, buffer: Any) -> bool:
        ty = buffer.ty
        single = len(ty.shape) == 1 and constant(ty.shape[0]) == 1
        return single and str(ty.storage_scope).startswith("local") and buffer not in self.vectors

    def _declare_with_value(self, s: Any, store: Any) -> None:
        self.at(store)
        value = self.stored(store.value)
        self.scalars.add(s.buffer)
        self.write(f"{self.ctype(str(s.buffer.ty.dtype))} {self.declare(s.buffer)} = {value};")

    def s_AttrStmt(self, s: Any) -> None:
        if s.attr_key != "thread_extent" or s.node.thread_tag not in self.thread_tags:
            raise InternalError(f"the attribute {s.attr_key} at the thread level", loc=self.place)
        var = s.node.var
        if var not in self.names:
            if mentions(s.body, var):
                self.write(f"const int {self.declare(var)} = {self.thread_tags[s.node.thread_tag]};")
            self.analyzer.bind(var, ir.Range.from_min_extent(0, s.value))
        self.statement(s.body)

    def s_For(self, s: Any) -> None:
        self.at(s)
        if s.kind not in (tirx.ForKind.SERIAL, tirx.ForKind.UNROLLED):
            raise InternalError(f"a loop of kind {s.kind} at the thread level", loc=self.place)
        factor = s.annotations.get("unroll") if s.annotations else None
        if factor is not None:
            self.write(f"#pragma unroll {int(factor)}")
        elif s.kind == tirx.ForKind.UNROLLED:
            self.write("#pragma unroll")
        low, high = self.value(s.min), self.value(self.analyzer.simplify(s.min + s.extent), 8)
        self.scopes.append(set())
        var = self.declare(s.loop_var)
        self.analyzer.bind(s.loop_var, ir.Range.from_min_extent(s.min, s.extent))
        step = 1 if s.step is None else constant(s.step)
        more = f"++{var}" if step == 1 else f"{var} += {self.value(s.step)}"
        self.write(f"for ({self.ctype(dtype_of(s.loop_var))} {var} = {low}; {var} < {high}; {more}) {{")
        self.block(s.body)
        self.scopes.pop()
        self.write("}")

    def s_While(self, s: Any) -> None:
        self.at(s)
        self.write(f"while ({self.value(s.condition)}) {{")
        self.block(s.body)
        self.write("}")

    def s_IfThenElse(self, s: Any) -> None:
        self.at(s)
        self.write(f"if ({self.value(s.condition)}) {{")
        self.block(s.then_case)
        while s.else_case is not None:
            s, inner = s.else_case, isinstance(s.else_case, tirx.IfThenElse)
            if not inner:
                self.write("} else {")
                self.block(s)
                break
            self.write(f"}} else if ({self.value(s.condition)}) {{")
            self.block(s.then_case)
        self.write("}")

    def s_Break(self, s: Any) -> None:
        self.write("break;")

    def s_Continue(self, s: Any) -> None:
        self.write("continue;")

    def s_Evaluate(self, s: Any) -> None:
        if constant(s.value) is not None:
            return
        self.at(s)
        notes = s.value.attrs if isinstance(s.value, ir.Call) else None
        why = f"  // {notes['comment']}" if notes is not None and "comment" in notes else ""
        self.write(f"{self.stored(s.value)};{why}")

    def s_Bind(self, s: Any) -> None:
        if s.var in self.unused:
            return
        self.at(s)
        if isinstance(s.var.ty, ir.PointerType):
            target = self.pointer(s.var.ty, s.value)
            self.write(f"{self.pointee(s.var.ty)}* const {self.declare(s.var)} = {target};")
            return
        text = self.value(s.value)
        known = self.analyzer.const_int_bound(s.value) if "int" in dtype_of(s.var) else None
        if known is not None and known.min_value >= 0:  # of use to // and %
            self.analyzer.bind(s.var, s.value)
        self.write(f"const {self.computed_type(dtype_of(s.var))} {self.declare(s.var)} = {text};")

    def computed_type(self, dtype: str) -> str:
        return "float" if dtype.startswith(("float8", "bfloat", "float16")) else self.ctype(dtype)

    # -- memory
    def pointee(self, ty: Any) -> str:
        return self.ctype(str(ty.element_type))

    def pointer(self, ty: Any, value: Any) -> str:
        """An address as a pointer to the type's elements."""
        if isinstance(value, ir.Call) and value.op.name == REINTERPRET:
            value = value.args[0]
        return (
            f"({self.pointee(ty)}*)({self.value(value)})"
            if _is_several(value)
            else f"({self.pointee(ty)}*){self.value(value)}"
        )

    def s_AllocBuffer(self, s: Any) -> None:
        self.at(s)
        buffer, ty = s.buffer, s.buffer.ty
        numel = constant(ty.shape[0]) if len(ty.shape) == 1 else None
        if numel is None:
            raise InternalError(
                f"{buffer.name} is allocated with extents that are no constant", loc=self.place
            )
        if ty.storage_scope == "shared":
            self.write(self.arena(self.declare(buffer), numel))
        elif not ty.storage_scope.startswith("local"):
            raise InternalError(f"{buffer.name} is allocated in the scope {ty.storage_scope}", loc=self.place)
        elif self._is_variable(buffer):
            self.scalars.add(buffer)
            self.write(f"{self.ctype(str(ty.dtype))} {self.declare(buffer)};")
        else:
            # less than the type's own alignment may not be asked for (C++, [dcl.align])
            asked = self.vectors.get(buffer, 0)
            align = f"alignas({asked}) " if 8 * asked >= bits_of(str(ty.dtype)) else ""
            self.write(f"{align}{self.ctype(str(ty.dtype))} {self.declare(buffer)}[{numel}];")

    def s_DeclBuffer(self, s: Any) -> None:
        self.at(s)
        ty = ir.PointerType(ir.PrimType(str(s.buffer.ty.dtype)), s.buffer.ty.storage_scope)
        target = self.pointer(ty, s.data)
        self.write(f"{self.ctype(str(s.buffer.ty.dtype))}* const {self.declare(s.buffer)} = {target};")

    def s_BufferStore(self, s: Any) -> None:
        self.at(s)
        if len(s.indices) == 1 and isinstance(s.indices[0], tirx.Ramp):
            self.write(f"{self.vector(s.buffer, s.indices[0])} = {self._vector_value(s)};")
            return
        self.write(f"{self.element(s.buffer, s.indices)} = {self.stored(s.value)};")

    def vector(self, buffer: Any, index: Any, const: str = "") -> str:
        """Several neighbouring elements as one access."""
        size = access_bytes(buffer, [index])
        if constant(index.stride) != 1 or size not in self.words:
            raise InternalError(f"a vector access of {size} bytes to {buffer.name}: {index}", loc=self.place)
        return f"*({const}{self.words[size]}*)&{self.name(buffer)}[{self.index(index.base)}]"

    def _vector_value(self, s: Any) -> str:
        value, size = s.value, access_bytes(s.buffer, s.indices)
        if isinstance(value, ir.TensorLoad) and isinstance(value.indices[0], tirx.Ramp):
            if str(value.source.ty.dtype) == str(s.buffer.ty.dtype):
                return self.vector(value.source, value.indices[0], "const ")
        if isinstance(value, tirx.Broadcast) and _is_zero(value.value):
            return f"{self.words[size]}{{}}"
        raise InternalError(f"vector arithmetic at the thread level: {value}", loc=self.place)


def _is_several(value: Any) -> bool:
    """Whether an address is printed with an operator, which binds less than a cast."""
    if not isinstance(value, ir.Call):
        return not isinstance(value, (ir.Var, ir.TensorLoad))
    added = value.op.name == "tirx.handle_add_byte_offset" and constant(value.args[1]) != 0
    return added or value.op.name == IF_THEN_ELSE


def _is_zero(e: Any) -> bool:
    return (isinstance(e, tirx.IntImm) and int(e.value) == 0) or (
        isinstance(e, tirx.FloatImm) and float(e.value) == 0.0 and math.copysign(1.0, float(e.value)) > 0
    )


def access_bytes(buffer: Any, indices: Any) -> int:
    """The bytes of one access."""
    lanes = constant(indices[0].lanes) if isinstance(indices[0], tirx.Ramp) else 1
    return bits_of(str(buffer.ty.dtype)) // 8 * (lanes or 0)


def _moved_as_vectors(body: Any) -> dict[Any, int]:
    """Buffers that are accessed several elements at once, and the bytes of their widest access: how arrays
    must be aligned."""
    found: dict[Any, int] = {}

    def note(buffer: Any, indices: Any) -> None:
        if isinstance(indices[0], tirx.Ramp):
            found[buffer] = max(found.get(buffer, 0), access_bytes(buffer, indices))

    def view(s: Any) -> None:  # registers that are also read as wider elements
        at = s.data.args[0] if s.data.op.name == REINTERPRET else None
        held = at.args[0] if isinstance(at, ir.Call) else None
        if held is not None and isinstance(held, ir.Var):
            found[held] = max(found.get(held, 0), access_bytes(s.buffer, [tirx.IntImm("int32", 0)]))

    def call(c: Any) -> None:
        if c.attrs is not None and EXTERN in c.attrs:
            for a in c.args:
                if isinstance(a, ir.Call) and a.op.name == "tirx.address_of":
                    found[a.args[0].source] = 16

    structural_walk(body, (ir.Call, call))
    structural_walk(body, (ir.TensorLoad, lambda e: note(e.source, e.indices)))
    structural_walk(body, (tirx.BufferStore, lambda s: note(s.buffer, s.indices)))
    structural_walk(body, (tirx.DeclBuffer, view))
    return found


def _unused(body: Any) -> set[Any]:
    """Names whose value nobody reads and whose computation does nothing else."""
    binds: list[Any] = []
    uses: Counter[Any] = Counter()
    structural_walk(body, (tirx.Bind, binds.append))
    structural_walk(body, (ir.Var, lambda v: uses.update([v])))
    out: set[Any] = set()
    for s in reversed(binds):
        own: Counter[Any] = Counter()
        calls: list[Any] = []
        structural_walk(s, (ir.Var, lambda v, own=own: own.update([v])))
        structural_walk(
            s.value, (ir.Call, lambda c, calls=calls: calls.append(c) if c.op.name in EXTERN_CALLS else None)
        )
        if uses[s.var] <= own[s.var] and not calls:  # the definition itself is all there is
            out.add(s.var)
            uses.subtract(own)
    return out
