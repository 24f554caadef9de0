"""What a program asks of the GPU's generation, by TileLang's names."""

from __future__ import annotations

from typing import Any


def get_target_compute_version(target: Any = None) -> str:
    """The compute capability that a target stands for, "9.0" for "cuda:sm_90a"; by default this machine's
    GPU's, or sm_90a's where there is none; so is a target's that is no GPU."""
    from tilescale.devices import named, parse_target

    _, arch = parse_target("cuda" if target is None else target)
    digits = "".join(c for c in (arch or named("cuda").partition(":")[2]) if c.isdigit())
    return f"{digits[:-1]}.{digits[-1]}"


def parse_compute_version(version: str) -> tuple[int, int]:
    """``"9.0"`` as ``(9, 0)``."""
    major, _, minor = version.partition(".")
    return int(major), int(minor or 0)
