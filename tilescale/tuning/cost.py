"""Which configurations are worth trying: predicted from their tile programs, without compiling or running any
of them.

A configuration is traced and its work counted (two milliseconds); compiler/cost/predict.py says what a GPU
makes of it. The order is what predictions are good for: see tests/bench/results/cost_model.json for how it
agrees with what was measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tilescale.devices import resolve_target
from tilescale.errors import TileError
from tilescale.jit import Factory
from tilescale.jitted import Jit, without_collection

Config = dict[str, Any]


@dataclass(frozen=True)
class Predicted:
    """A configuration and its predicted milliseconds; infinite, with the reason, where it cannot work."""

    config: Config
    latency: float
    error: str = ""


def known_machine(target: Any, tensors: Sequence[Any] = ()) -> tuple[Any, str] | None:
    """The GPU that a target's architecture stands for, and the architecture; None where times cannot be
    predicted."""
    arch = resolve_target(target, tensors).partition(":")[2]
    from tilescale.compiler.cost import machine_of

    machine = machine_of(arch)
    return None if machine is None else (machine, arch)


def rank(
    jitted: Jit, configs: Sequence[Config], args: Sequence[Any] = (), kwargs: Config | None = None, *,
    extents: dict[str, int] | None = None, target: Any = None,
) -> list[Predicted]:  # fmt: skip
    """The configurations of a jitted function, best first; equal ones in the order given.

    Args:
        configs: keyword arguments beside ``args`` and ``kwargs``, which a call would give. extents: of a
            factory's T.dynamic extents.
        target: by default the function's own.

    Raises:
        TileError: the target is no GPU with known figures.
    """
    machine = known_machine(jitted.target if target is None else target, args)
    if machine is None:
        raise TileError(
            "times are predicted for GPUs with known figures alone", expected="cuda:sm_90a or cuda:sm_80"
        )
    with without_collection():
        made = [_predicted(jitted, config, args, kwargs or {}, extents or {}, machine) for config in configs]
    return sorted(made, key=lambda p: p.latency)


def _predicted(
    jitted: Jit,
    config: Config,
    args: Sequence[Any],
    kwargs: Config,
    extents: dict[str, int],
    machine: tuple[Any, str],
) -> Predicted:
    from tilescale.compiler import cost

    try:
        program = jitted.program(*args, **kwargs, **config)
        given = extents if isinstance(jitted, Factory) else _extents(program, jitted, args, kwargs)
        counted = cost.count(program, given, neighbours=machine[0].sms)
    except TileError as error:
        return Predicted(config, math.inf, error.message.splitlines()[0])
    except (ArithmeticError, ValueError) as error:  # a factory's own arithmetic on block sizes
        return Predicted(config, math.inf, str(error))
    found = cost.predict(counted, *machine)
    return Predicted(
        config, found.seconds * 1e3, f"no room for a block: {found.refused}" if found.refused else ""
    )


def _extents(program: Any, jitted: Jit, args: Sequence[Any], kwargs: Config) -> dict[str, int]:
    """The values of an eager kernel's symbolic extents, by the tensors of a call."""
    from tilescale.language.symbolic import Sym, settle

    given = jitted.bound(tuple(args), kwargs).arguments
    out: dict[str, int] = {}
    for p in program.params:
        shape = getattr(given.get(p.name), "shape", ())
        for e, n in zip(getattr(p.spec, "shape", ()), shape, strict=False):
            if isinstance(known := settle(e), Sym):
                out[known.name] = int(n)
    return out
