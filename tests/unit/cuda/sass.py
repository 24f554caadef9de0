"""Reads a kernel's machine code, as nvdisasm or cuobjdump print it, and says what is wrong with its products
of warpgroups.

    for fault in sass.faults(sass.disassembled(cubin)):
        print(fault)

What is looked for, along every way through the code:

- *early*: an instruction touches an accumulator while products that write it are in flight. ptxas is free to
  move instructions of other basic blocks over `wgmma.wait_group`, whatever the source says of the order.
- *operand*: an instruction writes registers that products in flight read (the left operand).
- *left*: products are in flight where a kernel ends.
- *fence*: MEMBAR of the GPU or the system in an innermost loop that multiplies. It drains all that is under
  way.
- *serial*: ptxas awaits each product before the next (warnings C7510 to C7519); the group that it closes
  apart is empty.
- *spill*: registers that live in local memory.

HGMMA is wgmma.mma_async; ``gsb0`` behind its operands ends a group (wgmma.commit_group), and
`WARPGROUP.DEPBAR.LE gsb0, n` waits until no more than n groups are in flight. The state of a way is the queue
of its groups; blocks are walked until no way brings a new state.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

#: groups that one way may have in flight before it counts as endless
MOST_GROUPS = 32
Registers = frozenset[int]


@dataclass(frozen=True)
class Instruction:
    """One line of machine code. ``labels``: where it may go to."""

    address: int
    guard: str
    opcode: str
    operands: str
    labels: tuple[str, ...]

    def __str__(self) -> str:
        return f"/*{self.address:04x}*/ {self.guard + ' ' if self.guard else ''}{self.opcode} {self.operands}".rstrip()


@dataclass(frozen=True)
class Fault:
    """What is wrong, and at which instruction."""

    kind: str
    text: str
    at: Instruction

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}: {self.at}"


@dataclass(frozen=True)
class Product:
    """Registers that a product writes (its accumulator), and those that it reads beside them."""

    to: Registers
    reads: Registers


@dataclass(frozen=True)
class Queue:
    """Products in flight: of groups that were closed, the oldest first, and of the one that is not."""

    closed: tuple[frozenset[Product], ...] = ()
    open: frozenset[Product] = frozenset()

    def products(self) -> Iterator[Product]:
        for group in self.closed:
            yield from group
        yield from self.open


@dataclass
class Function:
    """A kernel's instructions in blocks, and which block may follow which."""

    name: str
    blocks: list[list[Instruction]]
    follows: list[list[int]] = field(default_factory=list)

    @property
    def instructions(self) -> list[Instruction]:
        return [i for block in self.blocks for i in block]

    @property
    def products(self) -> int:
        """How many instructions multiply."""
        return sum(product(i) is not None for i in self.instructions)


# ---- reading

LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][A-Z0-9_.a-z]*)\s*([^;]*?)\s*;")
LABEL = re.compile(r"^\s*(\.L_\w+|[A-Za-z_$][\w$]*):\s*$")
BEGINS = re.compile(r"^\s*(?:\.text\.([\w$]+):|Function : ([\w$]+))\s*$")
TARGET = re.compile(r"`\(([^)]+)\)|(?<![\w\[])(0x[0-9a-f]+)\s*$")
#: where a block ends
FORKS = ("BRA", "BRX", "JMP", "EXIT", "RET", "BSYNC", "BSSY", "WARPSYNC")


def functions(text: str) -> list[Function]:
    """The kernels of a disassembly."""
    parts: list[tuple[str, list[Instruction | str]]] = []
    for line in text.splitlines():
        if begins := BEGINS.match(line):
            parts.append((begins[1] or begins[2], []))
        elif parts and (label := LABEL.match(line)):
            parts[-1][1].append(label[1])
        elif parts and (found := LINE.search(line)):
            parts[-1][1].append(_instruction(found))
    return [_cut(name, lines) for name, lines in parts]


def _instruction(found: re.Match[str]) -> Instruction:
    address, guard, opcode, operands = found.groups()
    jumps = opcode.split(".")[0] in ("BRA", "BSSY", "WARPSYNC", "BRX", "JMP")
    labels = tuple(a or b for a, b in TARGET.findall(operands)) if jumps else ()
    return Instruction(int(address, 16), guard or "", opcode, operands, labels)


def _cut(name: str, lines: list[Instruction | str]) -> Function:
    """Instructions into blocks, which end where the way may fork, or where a label is."""
    plain = [x for x in lines if isinstance(x, Instruction)]
    places = {hex(i.address): i.address for i in plain}  # cuobjdump names addresses, nvdisasm labels
    waiting: list[str] = []
    for x in lines:
        if isinstance(x, str):
            waiting.append(x)
        else:
            places.update(dict.fromkeys(waiting, x.address))
            waiting = []
    heads = {places[t] for i in plain for t in i.labels if t in places}
    blocks: list[list[Instruction]] = []
    for i in plain:
        if not blocks or i.address in heads or blocks[-1][-1].opcode.split(".")[0] in FORKS:
            blocks.append([])
        blocks[-1].append(i)
    begins = {block[0].address: k for k, block in enumerate(blocks)}
    made = Function(name, blocks)
    for k, block in enumerate(blocks):
        last = block[-1]
        nexts = {begins[places[t]] for t in last.labels if t in places and not last.opcode.startswith("BSSY")}
        if not _ends(last) and k + 1 < len(blocks):
            nexts.add(k + 1)
        made.follows.append(sorted(nexts))
    _join(made, {label: begins[at] for label, at in places.items() if at in begins})
    return made


def _join(f: Function, begins: dict[str, int]) -> None:
    """BSYNC of a register goes where the BSSY said that set the register on the way there."""
    here: list[frozenset[tuple[str, int]]] = [frozenset()] * len(f.blocks)
    todo = list(range(len(f.blocks)))
    while todo:
        k = todo.pop()
        last, known = f.blocks[k][-1], here[k]
        register = last.operands.split(",")[0].strip()
        if last.opcode.startswith("BSSY"):
            known = frozenset(x for x in known if x[0] != register) | {
                (register, begins[label]) for label in last.labels
            }
        elif last.opcode.startswith("BSYNC"):
            f.follows[k] = sorted({block for name, block in known if name == register}) or f.follows[k]
        for n in f.follows[k]:
            if not known <= here[n]:
                here[n] |= known
                todo.append(n)


def _ends(i: Instruction) -> bool:
    """Whether nothing behind an instruction is reached from it."""
    if i.guard not in ("", "@PT"):
        return False
    name = i.opcode.split(".")[0]
    return (
        name in ("EXIT", "RET", "BRX", "JMP")
        or name == "BRA"
        and not re.search(r"\bU?P\d", i.operands)
        and "DIV" not in i.opcode
    )


# ---- registers

REGISTER = re.compile(r"(?<![\w.])R(\d+)((?:\.\w+)*)")
GMMA = re.compile(r"^[HIQB]GMMA(?:\.SP)?\.64x(\d+)x\d+\.(\w+)")
PREDICATE = re.compile(r"^!?U?P(\d|T)$")
#: what has no result in registers
STORES = (
    "ST",
    "REDG",
    "RED.",
    "SYNCS",
    "UTMA",
    "UBLK",
    "BAR",
    "R2UR",
    "BRX",
    "WARPSYNC",
    "ISETP",
    "FSETP",
    "DSETP",
    "HSETP2",
    "PLOP3",
)
#: registers of mma.sync's operands, D, A, B, C
MMA = {
    "16816.F32": (4, 4, 2, 4),
    "16816.F16": (2, 4, 2, 2),
    "1688.F32": (4, 2, 1, 4),
    "1684.F32": (4, 2, 1, 4),
    "16832": (4, 4, 2, 4),
}


def product(i: Instruction) -> Product | None:
    """What a product writes and reads in registers; None for other instructions, and for the product of
    nothing that closes a group."""
    found = GMMA.match(i.opcode)
    if found is None or i.operands.startswith("RZ"):
        return None
    size = int(found[1]) // (4 if found[2] == "F16" else 2)
    operands = [o.strip() for o in i.operands.split(",")]
    to = set(_span(operands[0], size))
    reads: set[int] = set()
    if not operands[1].startswith("gdesc"):
        reads |= set(_span(operands[1], 4))
    for o in operands[2:]:  # the accumulator again, and the selector of a sparse operand
        reads |= set(_span(o, size if ".SP" not in i.opcode or o == operands[0] else 1))
    return Product(frozenset(to), frozenset(reads - to))


def _span(operand: str, size: int) -> range:
    found = REGISTER.search(operand)
    return range(int(found[1]), int(found[1]) + size) if found else range(0)


def touched(i: Instruction) -> tuple[Registers, Registers]:
    """The registers that an instruction reads or writes, and those that it writes: its first operand, where
    that is a register."""
    operands = [
        o.strip() for o in re.findall(r"[\w.]*\[[^\]]*\](?:\[[^\]]*\])*|[^,\[\]]+", i.operands) if o.strip()
    ]
    values = [o for o in operands if "[" not in o and not PREDICATE.match(o)]
    every: set[int] = set()
    for o in operands:
        for number, suffix in REGISTER.findall(o):
            size = (2 if ".64" in suffix else 1) if "[" in o else _size(i.opcode, values.index(o))
            every |= set(range(int(number), int(number) + size))
    stores = i.opcode.startswith(STORES) or not values or "[" in operands[0]
    return frozenset(every), frozenset() if stores else frozenset(_span(values[0], _size(i.opcode, 0)))


def _size(name: str, which: int) -> int:
    """How many registers an operand outside brackets has."""
    base, _, rest = name.partition(".")
    if base in ("HMMA", "IMMA", "QMMA"):
        found = next((sizes for shape, sizes in MMA.items() if rest.startswith(shape)), (4, 4, 2, 4))
        return found[min(which, 3)]
    if base in ("LDSM", "STSM"):
        return int(rest[-1]) if rest[-1:].isdigit() else 1
    if base == "CS2R":
        return 1 if rest.startswith("32") else 2
    if base.startswith(("LD", "ST", "ATOM", "RED")) and base != "REDUX":
        return 4 if "128" in rest else 2 if "64" in rest.split(".") else 1
    if "WIDE" in rest:
        return 2 if which in (0, 3) else 1
    return 2 if base in ("DADD", "DFMA", "DMUL", "DSETP", "DMNMX") else 1


# ---- what is wrong


def faults(text: str) -> list[Fault]:
    """All faults of all kernels of a disassembly, each once."""
    found: dict[Fault, None] = {}
    for f in functions(text):
        for fault in (*_flights(f), *_fences(f), *_plain(f)):
            found.setdefault(fault)
    return list(found)


def _plain(f: Function) -> Iterator[Fault]:
    for i in f.instructions:
        if i.opcode.split(".")[0] in ("STL", "LDL"):
            yield Fault("spill", "local memory", i)
        if GMMA.match(i.opcode) and i.operands.startswith("RZ"):
            yield Fault("serial", "an empty group, since each product is awaited before the next", i)


def _flights(f: Function) -> Iterator[Fault]:
    """Walks all ways with their queues."""
    seen: set[tuple[int, Queue]] = set()
    todo = [(0, Queue())] if f.blocks else []
    while todo:
        at, queue = todo.pop()
        if (at, queue) in seen:
            continue
        seen.add((at, queue))
        for i in f.blocks[at]:
            yield from _against(i, queue)
            queue = _behind(i, queue)
        if len(queue.closed) > MOST_GROUPS:
            yield Fault("left", f"more than {MOST_GROUPS} groups of products in flight", f.blocks[at][-1])
            continue
        todo += [(k, queue) for k in f.follows[at]]


def _against(i: Instruction, queue: Queue) -> Iterator[Fault]:
    """What an instruction does to products in flight."""
    flying = list(queue.products())
    if not flying:
        return
    mine = product(i)
    if i.opcode == "EXIT" and not i.guard:
        yield Fault("left", "products are in flight where the kernel ends", i)
    if mine is not None:
        for p in flying:
            if mine.to & p.to and mine.to != p.to:
                yield Fault(
                    "early", f"a product into {_named(mine.to)} while one into {_named(p.to)} is in flight", i
                )
            if bad := mine.reads & p.to:
                yield Fault("early", f"a product reads {_named(bad)} before it is awaited", i)
            if bad := mine.to & p.reads:
                yield Fault("operand", f"a product writes {_named(bad)}, which one in flight reads", i)
        return
    if GMMA.match(i.opcode):
        return
    every, writes = touched(i)
    for p in flying:
        if bad := every & p.to:
            yield Fault("early", f"{_named(bad)} of an accumulator in flight", i)
        if bad := writes & p.reads:
            yield Fault("operand", f"{_named(bad)} is read by a product in flight", i)


def _behind(i: Instruction, queue: Queue) -> Queue:
    """The queue behind an instruction."""
    if GMMA.match(i.opcode):
        mine = product(i)
        opened = queue.open if mine is None else queue.open | {mine}
        return Queue((*queue.closed, opened)) if "gsb0" in i.operands else Queue(queue.closed, opened)
    if i.opcode.startswith("WARPGROUP.DEPBAR"):
        left = int(i.operands.split(",")[1], 16)
        return Queue(queue.closed[max(0, len(queue.closed) - left) :] if left else (), queue.open)
    return queue


def _named(registers: Registers) -> str:
    low, high = min(registers), max(registers)
    return f"R{low}" if low == high else f"R{low}…R{high}"


def _fences(f: Function) -> Iterator[Fault]:
    """MEMBAR beyond the block in the innermost loop around a product."""
    loops = sorted(_loops(f), key=len)
    inner: list[set[int]] = []
    for k, block in enumerate(f.blocks):
        if any(product(i) for i in block):
            inner += [loop for loop in loops if k in loop][:1]
    for k in sorted(set().union(*inner)) if inner else []:
        for i in f.blocks[k]:
            if re.match(r"MEMBAR(\.\w+)*\.(GPU|SYS|VC)\b", i.opcode):
                yield Fault("fence", "a fence of the whole GPU in a loop that multiplies", i)


def _loops(f: Function) -> list[set[int]]:
    """Natural loops: the blocks from which the end of an edge back to a dominator is reached without passing
    that."""
    count = len(f.blocks)
    before: list[list[int]] = [[] for _ in range(count)]
    for k, nexts in enumerate(f.follows):
        for n in nexts:
            before[n].append(k)
    dominators = [set(range(count)) for _ in range(count)]
    dominators[0] = {0}
    changed = True
    while changed:
        changed = False
        for k in range(1, count):
            known = [dominators[p] for p in before[k]]
            new = {k} | (set.intersection(*known) if known else set())
            if new != dominators[k]:
                dominators[k], changed = new, True
    bodies: dict[int, set[int]] = {}
    for k, nexts in enumerate(f.follows):
        for head in nexts:
            if head in dominators[k]:
                body, todo = bodies.setdefault(head, {head}), [k]
                while todo:
                    n = todo.pop()
                    if n not in body:
                        body.add(n)
                        todo += before[n]
    return list(bodies.values())


# ---- nvdisasm


def find_nvdisasm() -> str | None:
    """nvdisasm on the PATH, or that of NVIDIA's wheel (nvidia-cuda-nvdisasm); None where there is none."""
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    wheels = [str(p) for folder in folders for p in sorted(folder.glob("*/bin/nvdisasm"))]
    return next(filter(None, map(shutil.which, ("nvdisasm", *wheels))), None)


def disassembled(cubin: bytes) -> str:
    """The text of a cubin's machine code."""
    program = find_nvdisasm()
    assert program is not None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([program, "-c", file.name], capture_output=True, text=True, check=True).stdout
