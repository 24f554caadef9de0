"""A program at any level as text for people: what passes have decided about it, then its statements.

Statements are those of TVM's printer, with operations in the form ``tma_load(A[…], a[…], ring=0)``. An
operation's executor and reach are left out where they are the block.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from tilescale.compiler.ir.program import TileProgram

_CALL = re.compile(r'T\.Call\("ts\.([\w.]+)", ')
_ATTR = re.compile(r'"(\w+)": ("(?:[^"\\]|\\.)*"|\[[^\]]*\]|[^,}]+)')
_PLACES = ('executor="block"', 'reach="block"')


def text(program: TileProgram) -> str:
    """The program, which may have no schedule, layouts or places yet."""
    lines = [line for line in program.func.script().splitlines() if not line.startswith("# ")]
    body = "\n".join(_operations(line) for line in lines).strip("\n")
    return "\n".join(f"# {line}" for line in _decided(program)) + f"\n{body}\n"


def _decided(program: TileProgram) -> Iterator[str]:
    """What stands beside the statements, a line each."""
    launch = program.launch
    grid = " × ".join(map(str, launch.grid))
    yield f"{program.name} for {program.target}: {grid} blocks of {launch.threads} threads" + _clusters(
        launch.cluster
    )
    if program.schedule is not None:
        yield f"roles: {', '.join(program.schedule.roles)}"
        for r in program.schedule.rings:
            shared = f", shared by the cluster along {r.shared}" if r.shared else ""
            yield (
                f"ring {r.number} ({r.form}): {', '.join(r.buffers)} in {r.depth} of {r.asked} stages{shared}"
            )
    for var, layout in program.layouts.items():
        at = program.arena.get(var)
        yield f"{var.name}: {_layout(layout)}" + ("" if at is None else f"; at byte {at[0]} of shared memory")
    for note in program.notes:
        yield f"note: {note}"


def _layout(layout: Any) -> str:
    """Where elements (i, j, …) lie, digit by digit: ``i / 8 % 2 → slot × 2``."""
    if not hasattr(layout, "pieces"):
        return f"{tuple(layout.shape)} by strides {tuple(layout.strides)}"
    out = []
    for p in layout.pieces:
        index = "" if p.axis is None else "ijklmn"[p.axis]
        digit = (
            f"{index}{f' / {p.unit}' if p.unit > 1 else ''} % {p.extent}" if index else f"{p.extent} copies"
        )
        out.append(f"{digit} → {p.to}{f' × {p.stride}' if p.stride != 1 else ''}")
    swizzle = getattr(layout, "swizzle", 0)
    return f"{tuple(layout.shape)}: " + ", ".join(out) + (f", swizzled by {swizzle} bytes" if swizzle else "")


def _clusters(cluster: tuple[int, ...]) -> str:
    return "" if all(n == 1 for n in cluster) else f" in clusters of {' × '.join(map(str, cluster))}"


def _operations(line: str) -> str:
    """A line with its operations in short."""
    out, at = "", 0
    while (found := _CALL.search(line, at)) is not None:
        args, end = _bracketed(line, found.end())
        rest = line[end:]
        attrs = ""
        if rest.startswith(", attrs="):
            attrs, end = _bracketed(line, end + len(", attrs="))
        end = line.index(")", line.index("ret_ty=", end)) + 1
        words = [f"{name}={value}" for name, value in _ATTR.findall(attrs)]
        operands = [_operations(args)] if args else []
        out += (
            line[at : found.start()]
            + f"{found[1]}({', '.join([*operands, *(w for w in words if w not in _PLACES)])})"
        )
        at = end
    return out + line[at:]


def _bracketed(line: str, start: int) -> tuple[str, int]:
    """What stands between the bracket at ``start`` and its partner, and the place behind that."""
    depth, quoted = 0, False
    for k in range(start, len(line)):
        c = line[k]
        if c == '"' and line[k - 1] != "\\":
            quoted = not quoted
        elif not quoted and c in "[{(":
            depth += 1
        elif not quoted and c in "]})":
            depth -= 1
            if not depth:
                return line[start + 1 : k], k + 1
    return line[start:], len(line)
