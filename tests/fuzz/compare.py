"""Runs a drawn program on the simulator and on the CPU target, and says where they disagree."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from tests.fuzz.picks import judged
from tests.fuzz.programs import Program
from tests.kernels import run, scheduled
from tests.ranks.harness import RanksFailed, run_ranks
from tilescale.compiler.checks.run import launch


class Difference(AssertionError):
    """Two runs of one program disagree, or one found a fault in a program that has none."""


def kernel_of(text: str) -> Any:
    """The kernel that a module's text defines."""
    stem = "p" + hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    path = Path(_folder().name) / f"{stem}.py"  # stays while the process lives: errors show its lines
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(stem, path)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[stem] = made
    spec.loader.exec_module(made)
    return _Traced(made.main)


class _Traced:
    """A kernel that is traced once, for all its runs."""

    def __init__(self, kernel: Any):
        self.name, self.params, self.program = kernel.name, kernel.params, kernel.trace()

    def trace(self) -> Any:
        return self.program


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="tilescale-fuzz-")


def forget() -> None:
    """Removes the files of this process's kernels."""
    if _folder.cache_info().currsize:
        _folder().cleanup()


def compare(program: Program) -> None:
    """The simulator, for every fourth seed against the adversary too and, where loops are pipelined, at the
    scheduled level; then the CPU.

    Raises:
        Difference: a finding, results that differ between schedules or levels at all, or from the CPU's by
        more than the bound. Anything else: the program was refused, or the implementation failed.
    """
    kernel = kernel_of(program.text)
    want = simulated(kernel, program)
    if program.seed % 4 == 0:
        agree(
            program,
            want,
            simulated(kernel, program, order="adversary", seed=program.seed),
            "against the adversary",
            exact=True,
        )
    if program.pipelined:
        depth = 1 + program.seed % 3
        agree(
            program,
            want,
            simulated(scheduled(kernel, depth), program),
            f"scheduled with rings of {depth}",
            exact=True,
        )
    args = program.args(0)
    run(kernel)(*args.values())
    agree(program, want, [args], "on the CPU")
    if program.pipelined and program.seed % 4 == 0:
        args = program.args(0)
        run(kernel, depth=3)(*args.values())
        agree(program, want, [args], "on the CPU with rings of 3")


def compare_ranks(programs: Sequence[Program]) -> list[str | None]:
    """Programs for one number of ranks: the simulator in turn, at random and against the adversary, then the
    CPU, all on one group of processes. Why each fails; None where all agree."""
    out: list[str | None] = []
    ready: list[tuple[Any, ...]] = []
    for program in programs:
        out.append(why(lambda program=program: ready.append(_of_ranks(program))))
    if ready:
        try:
            got = run_ranks(
                ready[0][0].ranks, _all, [(p, made) for p, made, _ in ready], timeout=20.0 + 2 * len(ready)
            )
        except RanksFailed as failure:
            if len(programs) > 1:  # one of them: each by itself
                return [compare_ranks([p])[0] for p in programs]
            return [f"RanksFailed: {failure}"]
        for k, (program, _, want) in enumerate(ready):
            out[programs.index(program)] = why(
                lambda k=k, p=program, want=want: agree(p, want, [g[k] for g in got], "on the CPU")
            )
    return out


def _of_ranks(program: Program) -> tuple[Any, ...]:
    kernel = kernel_of(program.text)
    want = simulated(kernel, program)
    for order in ("adversary", "random"):
        agree(
            program,
            want,
            simulated(kernel, program, order=order, seed=program.seed),
            f"with the schedule {order}",
            exact=True,
        )
    return program, run(kernel), want


def _all(ready: Sequence[tuple[Program, Any]]) -> list[dict[str, Any]]:
    """On one rank of many: runs all kernels, gives what each wrote."""
    from tilescale import comm

    comm.init()
    out = []
    for program, kernel in ready:
        args: list[Any] = []
        for p in program.params:
            if p.kind == "symm":
                args.append(comm.zeros(p.shape, p.dtype))
            else:
                args.append(comm.signals(p.shape) if p.kind == "signal" else p.data(comm.rank()))
        kernel(*args, *program.scalars.values())
        out.append({p.name: a for p, a in zip(program.params, args) if p.val is not None})
    return out


def why(attempt: Callable[[], Any]) -> str | None:
    """Why an attempt fails, in words; None where it does not."""
    try:
        attempt()
    except Difference as e:
        return f"Difference: {e}"
    except Exception as e:  # noqa: BLE001  # whatever it is, it is what the fuzzer looks for
        return f"{type(e).__name__}: {e}"
    return None


def simulated(kernel: Any, program: Program, **how: Any) -> list[dict[str, Any]]:
    """Every rank's arguments as the simulator leaves them."""
    ranks = range(program.ranks)
    each = [program.args(r) for r in ranks]
    with judged(Difference):
        done = launch(
            kernel, program.ranks, {name: [each[r][name] for r in ranks] for name in each[0]}, **how
        )
    if not done.report:
        raise Difference(f"a finding in a program without fault:\n{done.report}")
    return done.arrays


def agree(
    program: Program, want: list[dict[str, Any]], got: list[dict[str, Any]], how: str, *, exact: bool = False
) -> None:
    """Whether what a program writes is the same, within what is known of it."""
    for rank in range(program.ranks):
        for p in program.params:
            if p.val is None:
                continue
            a, b = want[rank][p.name].astype(_wide(p.dtype)), got[rank][p.name].astype(_wide(p.dtype))
            bad = ~same(a, b) if exact or p.val.same else ~near(a, b, p.val.err)
            if bad.any():
                at = tuple(int(k) for k in np.argwhere(bad)[0])
                bound = "exactly" if exact or p.val.same else f"within {p.val.err:.3g}"
                raise Difference(
                    f"{p.name}{list(at)} of rank {rank} is {a[at]!r}, and {how} {b[at]!r}; {int(bad.sum())} of {bad.size} elements "
                    f"disagree, which should agree {bound}"
                )


def _wide(dtype: str) -> Any:
    return np.float64 if "float" in dtype else np.dtype(dtype)


def same(a: Any, b: Any) -> Any:
    """Elementwise: one value, NaN like any other."""
    return (a == b) | ((a != a) & (b != b))


def near(a: Any, b: Any, err: float) -> Any:
    with np.errstate(invalid="ignore"):
        return same(a, b) | (np.abs(a - b) <= err)
