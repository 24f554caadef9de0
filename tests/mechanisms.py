"""Which of the compiler's mechanisms for some kernels fires for whom: ``python -m tests.mechanisms``.

Compiles what tests/printed_code.py prints for sm_90a and sm_80, and says for each mechanism that
TILESCALE_WITHOUT may leave out how many kernels have it, and of which examples and operations.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from concurrent.futures import ProcessPoolExecutor

from tests.printed_code import GPUS, made
from tilescale.compiler import driver
from tilescale.compiler.passes.pipeline import GPU_PASSES, LOWERED

NAMES = (*(p.name for p in GPU_PASSES if p.optional), *LOWERED)


def fired(target: str, group: str) -> Counter[str]:
    """How many kernels of a group have each; "" counts all."""
    found: Counter[str] = Counter()
    for _, make in made(target, group):
        try:
            lowered = driver.lower(make().trace(), target)
        except Exception:  # noqa: BLE001  what is refused for a target has none
            continue
        found.update({"", *lowered.program.fired})
    return found


def main() -> int:
    from tilescale.ops import MODULES

    jobs = [(f"cuda:{arch}", group) for arch in GPUS for group in (*MODULES, "examples")]
    table: dict[str, dict[str, int]] = defaultdict(dict)
    with ProcessPoolExecutor(2) as pool:
        for (target, group), counts in zip(jobs, pool.map(fired, *zip(*jobs, strict=True)), strict=True):
            for name, count in counts.items():
                table[name][f"{group} {target.partition('_')[2]}"] = count
    for name in ("", *NAMES):
        whom = ", ".join(f"{group}: {count}" for group, count in table[name].items())
        print(f"{name or 'all kernels'}: {sum(table[name].values())} ({whom})")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
