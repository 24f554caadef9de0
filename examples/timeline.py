"""What the instrumented kernels of all ranks logged: when they computed, when they sent, and how much to
whom."""

from __future__ import annotations

from dataclasses import dataclass

import torch

import tilescale.comm as comm
from tilescale import native


@dataclass(frozen=True)
class Timeline:
    """Times in µs after the first event of any rank, one entry a rank; ``sent[a][b]``: bytes that rank a put
    to (or got from) b."""

    first_product: list[float]
    last_product: list[float]
    last_put: list[float]
    # The share of a rank's products that began before the last put of all ranks ended.
    early_products: list[float]
    sent: list[list[int]]

    @property
    def gather_ended(self) -> float:
        """When the last put of any rank was complete."""
        return max(self.last_put)


def collect() -> Timeline:
    """The log of this process and its peers since the last ``clear``; collective."""
    world, me = comm.world_size(), comm.rank()
    log = native.events()
    if native.lost_events():
        raise RuntimeError(f"{native.lost_events()} events did not fit into the log: trace a smaller problem")
    if not log:
        raise RuntimeError(
            "nothing was logged: is the kernel compiled with instrument=True, and not run on the simulator?"
        )
    products = [e for e in log if e.kind == "gemm"]
    puts = [e for e in log if e.kind == "copy" and e.rank not in (-1, me) and e.phase == "end"]
    begins = [e.ns for e in products if e.phase == "begin"]
    start, last_put = _extreme([e.ns for e in log[:1]], min), _extreme([e.ns for e in puts], max)
    start, ended = min(_share(start)), max(_share(last_put))
    early = sum(ns < ended for ns in begins) * 1000 // max(1, len(begins))
    micro = [
        [(ns - start) / 1e3 for ns in _share(value)] for value in (min(begins), products[-1].ns, last_put)
    ]
    sent = [_share(sum(e.bytes for e in puts if e.rank == r)) for r in range(world)]
    return Timeline(
        *micro, [e / 1000 for e in _share(early)], [[sent[b][a] for b in range(world)] for a in range(world)]
    )


def clear() -> None:
    """Forgets what was logged so far."""
    native.clear_events()


def _extreme(values: list[int], which: object) -> int:
    return which(values) if values else 0  # type: ignore[operator]


def _share(value: int) -> list[int]:
    """Every rank's value, on every rank."""
    mine = comm.full((1,), value, torch.int64)
    comm.barrier()  # everyone's value is written
    values = [int(comm.peer(mine, r).item()) for r in range(comm.world_size())]
    comm.barrier()  # everyone has read it
    return values


def show(expected: int) -> int:
    """Prints the timeline on rank 0. 0 where each pair of ranks moved ``expected`` bytes, once, and every
    rank computed before the gather ended; else 1."""
    t, world = collect(), comm.world_size()
    once = all(t.sent[a][b] == (expected if a != b else 0) for a in range(world) for b in range(world))
    overlapped = world == 1 or max(t.first_product) < t.gather_ended
    if comm.rank() == 0:
        for r in range(world):
            print(
                f"  rank {r}: first product at {t.first_product[r]:.0f} µs, its last put ended at "
                f"{max(0.0, t.last_put[r]):.0f} µs, "
                f"last product at {t.last_product[r]:.0f} µs; sent to ranks 0…{world - 1}: {t.sent[r]} bytes"
            )
        if world > 1:
            print(
                f"  gather ended at {t.gather_ended:.0f} µs: {min(t.early_products):.0%} to "
                f"{max(t.early_products):.0%} of each rank's "
                f"products had begun by then; {expected} bytes a pair of ranks "
                f"{'moved once' if once else 'expected, NOT what moved'}",
                flush=True,
            )
    return 0 if once and overlapped else 1
