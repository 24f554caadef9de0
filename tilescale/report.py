"""What a kernel takes of a GPU and how fast it can be at most, for people: `Kernel.report`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tilescale.errors import TileValueError
from tilescale.launching import Launchable

if TYPE_CHECKING:
    from tilescale.compiler.cost import Count, Machine, Roofline


@dataclass(frozen=True)
class ResourceReport:
    """A kernel's resources, the work of one launch, and its bound.

    Attributes:
        resources: as `Kernel.resources`; empty on other targets.
        count: the work, counted from the tile program; None for a kernel that was loaded from a file, which
        holds none. machine, roofline: the GPU that its architecture stands for, and the bound there; None
        where there are no figures.
        waves: how often the machine fills with blocks; None where that is not known.
        latency: milliseconds of a measured call, where given or known. copies, loops: on GPUs: how each
        T.copy of a tensor goes, and the stages that pipelined loops have; each a dict, see
            `tilescale.compiler.cuda.account`. mechanisms: what the compiler has for some kernels, of which
            this is one, by the names that TILESCALE_WITHOUT takes (docs/ARCHITECTURE.md). notes: what the
            compiler did that the author may not expect, and why.
    """

    title: str
    resources: dict[str, Any]
    count: Count | None
    machine: Machine | None
    roofline: Roofline | None
    latency: float | None
    copies: list[dict[str, Any]] = field(default_factory=list)
    loops: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    mechanisms: list[str] = field(default_factory=list)

    @property
    def waves(self) -> float | None:
        if self.count is None or self.machine is None or not self.resources.get("blocks"):
            return None
        return self.count.blocks / (self.machine.sms * self.resources["blocks"])

    @property
    def share(self) -> float | None:
        """Of the bound that the measured call reaches: 1 is the machine's peak."""
        return (
            self.roofline.seconds * 1e3 / self.latency if self.roofline is not None and self.latency else None
        )

    def __str__(self) -> str:
        rows = [*self._taken(), *self._scheduled(), *self._launched(), *self._worked(), *self._bounded()]
        width = max((len(name) for name, _ in rows), default=0)
        return "\n".join([self.title, *(f"  {name:{width}}  {text}".rstrip() for name, text in rows)])

    def _taken(self) -> list[tuple[str, str]]:
        r = self.resources
        if not r:
            return []
        spills = (
            "spills unknown"
            if "spill_stores" not in r
            else f"spills {r['spill_stores']} B stored, {r['spill_loads']} B loaded"
        )
        out = [
            ("registers", f"{r['registers']} a thread; {spills}; stack {r['stack']} B"),
            ("shared memory", f"{r['shared'] + r['dynamic_shared']:,} B a block"),
        ]
        if "blocks" in r:
            held = f"{r['blocks']} block{'' if r['blocks'] == 1 else 's'} a multiprocessor"
            out.append(
                (
                    "occupancy",
                    f"{held} of {r['threads']} threads ({r['occupancy']:.0%} of its threads), limited by "
                    f"{r['bound']}",
                )
            )
        return out

    def _scheduled(self) -> list[tuple[str, str]]:
        out = [("copy", f"{c['of']} {c['how']} (line {c['line']})") for c in self.copies]
        out += [("stages", f"{_stages(loop)} (line {loop['line']})") for loop in self.loops]
        out += [("mechanisms", ", ".join(self.mechanisms))] if self.mechanisms else []
        return [*out, *(("note", note) for note in self.notes)]

    def _launched(self) -> list[tuple[str, str]]:
        if self.count is None:
            return []
        grid = " × ".join(map(str, self.count.grid))
        text = f"{grid} = {self.count.blocks:,} blocks" if len(self.count.grid) > 1 else f"{grid} blocks"
        if self.waves is not None and self.machine is not None:
            full = -(-self.waves // 1)
            used = f"{self.waves:.2f} waves, {self.waves / full if full else 0:.0%} of {full:.0f} used"
            text += f" on {self.machine.sms} multiprocessors: {used}"
        if self.count.longest > 1.005:
            text += f"; the longest block has {self.count.longest:.2f} × the mean work"
        return [("grid", text)]

    def _worked(self) -> list[tuple[str, str]]:
        if self.count is None:
            return []
        total, out = self.count.total, []
        for dtype in dict.fromkeys(g.dtype for g in total.matrix):
            flops = sum(g.flops * n for g, n in total.matrix.items() if g.dtype == dtype)
            tiles = ", ".join(dict.fromkeys(f"{g.m}×{g.n}×{g.k}" for g in total.matrix if g.dtype == dtype))
            out.append(("products", f"{_si(flops, 'FLOP')} of {dtype}, in tiles of {tiles}"))
        if total.element or total.special:
            special = f" and {_si(total.special)} special functions" if total.special else ""
            out.append(("lanes", f"{_si(total.element)} operations{special}"))
        read, written = (
            sum(min(n, self.count.tensors[t]) for t, n in amounts.items())
            for amounts in (total.read, total.written)
        )
        text = f"{_bytes(read)} read and {_bytes(written)} written at least; tiles move {_bytes(total.moved)}"
        out.append(
            ("memory", text + (f", and {_bytes(total.remote)} of other ranks" if total.remote else ""))
        )
        for loop in self.count.loops:
            rounds = f"{loop.rounds:.4g} rounds of {_bytes(loop.work.moved)}"
            known = any(loop.loc is not None and own["line"] == loop.loc.line for own in self.loops)
            stages = "" if known else f", {loop.stages} stage{'' if loop.stages == 1 else 's'} asked for"
            out.append(
                ("pipeline", rounds + stages + (f" (line {loop.loc.line})" if loop.loc is not None else ""))
            )
        out += [("note", note) for note in self.count.notes]
        return out

    def _bounded(self) -> list[tuple[str, str]]:
        if self.roofline is None or self.machine is None:
            return []
        bound = self.roofline
        parts = ", ".join(f"{part} {_time(seconds)}" for part, seconds in bound.parts.items() if seconds)
        out = [
            (
                "intensity",
                f"{bound.intensity:.4g} FLOP/B; {self.machine.name} is balanced at {bound.balance:.4g}",
            ),
            (
                "bound",
                f"{_time(bound.seconds)}, by {bound.bound} at the peak of {self.machine.name} ({parts})",
            ),
        ]
        if self.share is not None and self.latency is not None:
            rate = f" ({bound.flops / self.latency / 1e9:.4g} TFLOP/s)" if bound.flops else ""
            out.append(("measured", f"{_time(self.latency / 1e3)}{rate}: {self.share:.0%} of the bound"))
        return out


def _stages(loop: dict[str, Any]) -> str:
    """The stages that a loop has, and those that it was to have."""
    asked, counts = loop["asked"], loop["stages"]
    if not loop["ahead"]:
        return f"none of the {asked} asked for: each round copies, then computes"
    if len(set(counts.values())) == 1:
        held = str(next(iter(counts.values())))
    else:
        held = ", ".join(f"{n} of {names}" for names, n in counts.items())
    return held if all(n == asked for n in counts.values()) else f"{held}, of {asked} asked for"


def report(kernel: Launchable, extents: dict[str, int], latency: float | None) -> ResourceReport:
    """See `Kernel.report`."""
    resources = kernel.resources if kernel.device.gpu else {}
    count = machine = bound = None
    known = {
        *kernel.symbols,
        *(p["name"] for p in kernel.params if p["kind"] == "scalar" and "float" not in p["dtype"]),
    }
    if unknown := sorted(set(extents) - known):
        raise TileValueError(
            f"{kernel.label} has no extent {unknown[0]!r}",
            expected=", ".join(sorted(known)) or "none: all its extents are constants",
        )
    for name, value in extents.items():
        if not hasattr(value, "__index__") or (name in kernel.symbols and value < 0):
            what = "a number of elements, 0 or more" if name in kernel.symbols else "an integer"
            raise TileValueError(f"{kernel.label} has no report with {name}={value!r}", expected=what)
    if kernel.has_program:
        from tilescale.compiler import cost

        count = cost.count(kernel.program(), extents)
        machine = cost.machine_of(kernel.built_for.partition(":")[2])
        bound = None if machine is None else cost.roofline(count, machine)
    latency = kernel.latency if latency is None else latency
    held = kernel.compiled
    return ResourceReport(
        f"{kernel.label} for {kernel.built_for}", resources, count, machine, bound, latency,
        held.get("copies", []), held.get("loops", []), held.get("notes", []), held.get("mechanisms", []),
    )  # fmt: skip


def _si(amount: float, unit: str = "") -> str:
    """``1.5 MB`` of 1,500,000 bytes, ``1.5 M`` without a unit."""
    for power, name in ((12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if amount >= 10**power:
            return f"{amount / 10**power:.4g} {name}{unit}"
    return f"{amount:.4g} {unit}".rstrip()


def _bytes(amount: float) -> str:
    return _si(amount, "B")


def _time(seconds: float) -> str:
    for scale, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= scale:
            return f"{seconds / scale:.4g} {name}"
    return f"{seconds * 1e9:.3g} ns"
