"""``python -m tests.fuzz --seeds 0:10000 --jobs 2``: draws programs and compares the simulator with the CPU
target.

Prints the seeds that fail and writes each kernel's text, as drawn and made smaller, under ``--out``. A seed
gives one program, whatever else is run. Exit code 1 where something failed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.fuzz.pool import Outcome, run_seeds


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("--seeds", default="0:1000", help="FIRST:BEHIND, or one seed")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=1, help="programs of that many ranks")
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="ends after so long, however far it got"
    )
    parser.add_argument("--out", type=Path, default=Path("fuzz-failures"))
    parser.add_argument("--no-shrink", action="store_true")
    parser.add_argument(
        "--record", action="store_true", help="write the figures to tests/bench/results/fuzz_RANKS.json"
    )
    given = parser.parse_args()
    first, _, behind = given.seeds.partition(":")
    seeds = range(int(first), int(behind) if behind else int(first) + 1)

    def show(outcome: Outcome) -> None:
        if outcome.failure is None:
            return
        given.out.mkdir(parents=True, exist_ok=True)
        path = given.out / f"seed_{outcome.seed}.py"
        path.write_text(outcome.text)
        print(f"seed {outcome.seed}: {outcome.failure}\n  {path}", flush=True)

    done = run_seeds(
        seeds, given.jobs, ranks=given.ranks, shrinks=not given.no_shrink, show=show, minutes=given.minutes
    )
    print(done)
    if given.record:
        from tests.bench.record import record

        record(f"fuzz_{given.ranks}", done.figures)
    return 1 if done.failed else 0


if __name__ == "__main__":
    sys.exit(main())
