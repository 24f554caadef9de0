"""What PTX ISA 9.0 has of matrix instructions, and which of them a kernel prints.

This is a second statement of what compiler/layout/tensor_cores.py says, made from the document alone: a row
there that the hardware lacks is refused here. Products of warpgroups are read from the inline assembly that
is printed for them (`cuda.wgmma.function_text`), not from the name that stands for it; those of a warp stand
in include/ts, so their names are judged.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from tilescale.compiler.cuda.wgmma import function_text
from tilescale.compiler.emulator.copies import EmulationError

#: PTX's types of operands → the dtypes of what holds them
DTYPES = {
    "f16": "float16",
    "bf16": "bfloat16",
    "tf32": "float32",
    "e4m3": "float8_e4m3fn",
    "e5m2": "float8_e5m2",
    "s8": "int8",
    "u8": "uint8",
}
SUMS = {"f32": "float32", "s32": "int32", "f16": "float16"}
HALVES, FLOAT8, INTEGERS = ("f16", "bf16"), ("e4m3", "e5m2"), ("s8", "u8")
#: wgmma.mma_async ("Matrix Shape"): K of a dense product by A's type; a sparse one is twice as deep
#: ("Sparse wgmma.mma_async")
WGMMA_K = {"f16": 16, "bf16": 16, "tf32": 8, "e4m3": 32, "e5m2": 32, "s8": 32, "u8": 32}
#: N of floats; integers lack the odd multiples of 8 from 40 on
WGMMA_N = frozenset(range(8, 257, 8))
WGMMA_N_INTEGERS = frozenset((8, 16, 24, *range(32, 257, 16)))
#: the type of the accumulator by A's type
WGMMA_SUMS = {
    "f16": ("f16", "f32"),
    "bf16": ("f32",),
    "tf32": ("f32",),
    "e4m3": ("f16", "f32"),
    "e5m2": ("f16", "f32"),
    "s8": ("s32",),
    "u8": ("s32",),
}
#: mma.sync of 16 × 8 ("Matrix Fragments for mma.m16n8k4" and the sections behind it): K by A's type
MMA_K = {
    "f16": (8, 16),
    "bf16": (8, 16),
    "tf32": (4, 8),
    "e4m3": (16, 32),
    "e5m2": (16, 32),
    "s8": (16, 32),
    "u8": (16, 32),
}
#: mma.sync with sums of f16 ("mma", .ctype)
MMA_SUMS_F16 = ("f16",)
#: mma.sp of 16 × 8 ("Matrix Fragments for sparse mma.m16n8k16 …")
MMA_SP_K = {
    "f16": (16, 32),
    "bf16": (16, 32),
    "tf32": (8, 16),
    "e4m3": (64,),
    "e5m2": (64,),
    "s8": (32, 64),
    "u8": (32, 64),
}


@dataclass(frozen=True)
class Wgmma:
    """One wgmma.mma_async. m, n, k: its shape. sums, a, b: PTX's types. held: A lies in registers.
    across: whether A and B are transposed. selector: which threads have the places of a sparse A; None: A is
    whole."""

    m: int
    n: int
    k: int
    sums: str
    a: str
    b: str
    held: bool
    across: tuple[bool, bool]
    selector: int | None


def pair(a: str, b: str) -> bool:
    """Whether an instruction multiplies the two types: the same ones, or 8-bit ones of one kind."""
    return a == b and a in DTYPES or {a, b} <= set(FLOAT8) or {a, b} <= set(INTEGERS)


def lacking(i: Wgmma) -> str | None:
    """What PTX ISA says against an instruction; None: it is there."""
    if not pair(i.a, i.b):
        return f"no product of {i.a} by {i.b}"
    if i.sums not in WGMMA_SUMS[i.a]:
        return f"no accumulator of {i.sums} for {i.a}"
    if i.m != 64:
        return f"no {i.m} rows: 64 alone"
    widths = WGMMA_N_INTEGERS if i.a in INTEGERS else WGMMA_N
    if i.n not in widths:
        return f"no N of {i.n} for {i.a}"
    deep = WGMMA_K[i.a] * (1 if i.selector is None else 2)
    if i.k != deep:
        return f"no K of {i.k} for {'' if i.selector is None else 'sparse '}{i.a}: {deep} alone"
    if any(i.across) and i.a not in HALVES:
        return f"no transpose of {i.a}: of 16-bit operands alone"
    if i.held and i.across[0]:
        return "no transpose of an A in registers"
    if i.selector is not None and i.selector not in ((0, 1) if i.a not in (*FLOAT8, *INTEGERS) else (0,)):
        return f"no sparsity selector of {i.selector} for {i.a}"
    return None


_OPCODE = re.compile(
    r"wgmma\.mma_async(?P<sparse>\.sp)?\.sync\.aligned\.m(?P<m>\d+)n(?P<n>\d+)k(?P<k>\d+)"
    r"\.(?P<sums>\w+)\.(?P<a>\w+)\.(?P<b>\w+) \{(?P<d>[^}]*)\}, (?P<rest>.*?);"
)


@functools.cache
def wgmma(name: str) -> Wgmma:
    """The instruction that ``ts::wgmma_…`` is printed as.

    Raises:
        EmulationError: PTX has none such, or other operands.
    """
    text = function_text(name.removeprefix("ts::"))
    code = "".join(re.findall(r'"([^"]*)"', text[: text.index("\n      : ")]))
    kinds = re.findall(r'"(\+?\w)"\(', text[text.index("\n      : ") :])
    if (found := _OPCODE.search(code)) is None:
        raise EmulationError(f"{name} is printed as no wgmma.mma_async: {code}")
    rest = re.findall(r"\{[^}]*\}|[^\s,]+", found["rest"])  # registers in braces are one operand
    held, immediates = rest[0].startswith("{"), [x for x in rest if re.fullmatch(r"-?\d+", x)]
    selector = int(immediates.pop(0)) if found["sparse"] else None
    # What the layouts are made for; which of it is printed depends on the types.
    asked = re.sub(r"_s\d$", "", name).rpartition("_")[2]
    shape = (int(found["m"]), int(found["n"]), int(found["k"]))
    made = Wgmma(
        *shape, found["sums"], found["a"], found["b"], held, (asked[0] == "1", asked[1] == "1"), selector
    )
    what = (
        f"wgmma.mma_async{found['sparse'] or ''} {'m{}n{}k{}'.format(*shape)}.{made.sums}.{made.a}.{made.b}"
    )
    if why := lacking(made):
        raise EmulationError(f"{what} is no instruction of PTX: {why} ({name})")
    registers = [f"%{k}" for k in range(made.n // (4 if made.sums == "f16" else 2))]
    constraint = "+f" if made.sums == "f32" else "+r"
    if re.split(r",\s*", found["d"]) != registers or kinds.count(constraint) != len(registers):
        raise EmulationError(f"{what} has {len(registers)} registers, and others are printed ({name})")
    if immediates != _immediates(made) or "p" not in rest:
        raise EmulationError(f"{what} has other operands than {found['rest']} ({name})")
    return made


def _immediates(i: Wgmma) -> list[str]:
    """The factors of A and B, which are 1, and which of those that lie in shared memory are transposed."""
    if i.a in INTEGERS:
        return []
    return ["1", "1", *(str(int(x)) for x in i.across[i.held :] if i.a in HALVES)]


_MMA = re.compile(
    r"ts::mma_(?P<sparse>sp_)?(?P<sums>f16_)?m(?P<m>\d+)n(?P<n>\d+)k(?P<k>\d+)_(?P<a>[^_]+)(?:_(?P<b>[^_]+))?$"
)


def check(name: str) -> None:
    """Refuses a function that stands for a matrix instruction which PTX has not.

    Raises:
        EmulationError: it has not.
    """
    if name.startswith(("ts::wgmma_m", "ts::wgmma_sp_m")):
        wgmma(name)
    if not name.startswith("ts::mma_"):
        return
    if (found := _MMA.match(name)) is None:
        raise EmulationError(f"{name} names no shape and types of mma.sync")
    a, b = found["a"], found["b"] or found["a"]
    table = MMA_SP_K if found["sparse"] else MMA_K
    m, n, k = (int(found[x]) for x in "mnk")
    sums = not found["sums"] or a in MMA_SUMS_F16
    if not pair(a, b) or (m, n) != (16, 8) or k not in table[a] or not sums:
        opcode = "mma.sp" if found["sparse"] else "mma.sync"
        raise EmulationError(f"{opcode} m{m}n{n}k{k} of {a} by {b} is no instruction of PTX ({name})")
