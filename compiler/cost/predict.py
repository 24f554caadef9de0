"""How long a launch should take, from its counted work alone: what ranks configurations before any of them is
compiled.

A multiprocessor works its blocks off round by round. A round takes as long as the busiest of its units
(tensor cores, shared memory, lanes, special functions, the path from L2), or, where a ring has few stages, as
long as the latency of its loads divided by its stages; each tile adds a prologue and an epilogue. Memory
bounds the whole. What is particular:

- A product of a warpgroup reads both operands from shared memory, 64 rows of A with all columns of B each
  time, and what TMA brings is written there: with 128 bytes a clock this, and not the tensor cores, bounds
  tiles that are narrow (PTX ISA, "wgmma.mma_async", and the H100 whitepaper for the width).
- Where all multiprocessors multiply at once the clock falls: `BUSY`.
- Rows that begin within a line of L2 take two lines for each 128 bytes.
- A load's latency grows where L2 does not hold what is read.

The constants below were fitted to tests/bench/results/gemm_configs.json; ranks and not times are what they
are good for.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilescale.compiler.cost.count import Count, Gemm, Work
from tilescale.compiler.cost.machine import Machine
from tilescale.language.dtypes import canonical

CLOCK = 1.65e9  # hertz under load
BUSY = 1.25  # how much longer products take where all tensor cores work
# Seconds of a load that L2 holds, and what memory adds to it where every block reads its own.
LATENCY, FAR = (
    1.0e-6,
    0.84e-6,
)
LATE = 0.24  # of a stage that waits to be released while its products are in flight
# Read by a launch: below the one L2 holds it, above the other it does not.
NEAR_BYTES, FAR_BYTES = (
    25e6,
    125e6,
)
LAUNCH, TILE = 1.0e-6, 0.6e-6  # seconds of a launch, and of a tile beside its loads and stores
L2_LANE = 62  # bytes a clock that reach a multiprocessor
STORE = 64  # bytes a clock that a block's results leave at
HBM_SHARE = 0.81  # of the peak that memory gives
AGAIN = 0.61  # of what a wave of blocks reads anew, although one before it did: what L2 no longer holds
PLAIN = 0.55  # of the tensor cores' peak where products are not wgmma's
SPARE = 26  # registers of a thread beside its fragments


@dataclass(frozen=True)
class Prediction:
    """Seconds of a launch, blocks that a multiprocessor holds, and why a configuration cannot run (then
    ``seconds`` is infinite)."""

    seconds: float
    blocks: int
    refused: str = ""


@dataclass(frozen=True)
class _Block:
    """How a block is laid out: its threads with the producer's, registers of a thread, whether wgmma
    multiplies."""

    threads: int
    registers: int
    wgmma: bool
    held: int


def predict(count: Count, machine: Machine, arch: str) -> Prediction:
    """The time of a launch on a machine.

    Args:
        count: with ``shared_reads`` (`cost.count(…, neighbours=machine.sms)`).
        arch: such as "sm_90a"; wgmma and TMA are counted on where it is Hopper's.
    """
    block = _layout(count, arch)
    if block.held == 0:
        return Prediction(
            float("inf"),
            0,
            f"{count.shared_bytes} bytes of shared memory and {block.registers} registers a thread",
        )
    sms = machine.sms
    most = -(-count.blocks // sms)  # blocks of the busiest multiprocessor
    busy = min(1.0, count.blocks / sms)
    latency = LATENCY + FAR * _own_share(count) * min(
        1.0, max(0.0, (_footprint(count) - NEAR_BYTES) / (FAR_BYTES - NEAR_BYTES))
    )
    full, rest = divmod(most, block.held)
    seconds = full * _together(count, machine, block, block.held, busy, latency)
    seconds += _together(count, machine, block, rest, busy, latency) if rest else 0.0
    if (
        count.longest > 1.05
    ):  # blocks differ: those that are free take the next, and the longest one ends last
        seconds *= (count.blocks / sms + count.longest - 1) / most
    spilled = max(0.0, block.registers - 232) / 64
    return Prediction(LAUNCH + max(seconds * (1 + spilled), _memory(count, machine)), block.held)


def _footprint(count: Count) -> float:
    return float(sum(min(n, count.tensors[name]) for name, n in count.total.read.items()))


def _own_share(count: Count) -> float:
    """Of what is read, how much no neighbour reads in the same round."""
    read = count.work.read
    alone = sum(n * count.shared_reads.get(name, 1.0) for name, n in read.items())
    return float(alone / max(1.0, sum(read.values())))


def _memory(count: Count, machine: Machine) -> float:
    """Seconds of memory: what neighbours read alike comes once a wave, and nothing comes less than once."""
    total, bytes_ = count.total, 0.0
    for name, n in total.read.items():
        least = min(n, count.tensors[name])
        bytes_ += (
            least
            if _footprint(count) < 0.6 * machine.l2
            else max(least, n * count.shared_reads.get(name, 1.0) * AGAIN)
        )
    bytes_ += sum(total.written.values())
    return float(bytes_) / (machine.hbm * HBM_SHARE)


def _layout(count: Count, arch: str) -> _Block:
    gemms = list(count.work.matrix)
    pipelined = any(loop.stages > 1 for loop in count.loops)
    wgmma = (
        arch.startswith("sm_90")
        and pipelined
        and bool(gemms)
        and all(g.m % 64 == 0 and canonical(g.dtype).bytes <= 2 for g in gemms)
    )
    own = count.fragment_bytes / 4 / count.threads + SPARE
    extra = 0 if not wgmma else 32 if count.threads <= 128 else 128
    threads = count.threads + extra
    # Two warpgroups and more share out all registers of the multiprocessor (setmaxnreg).
    registers = 65536 // threads // 8 * 8 if extra == 128 else int(own)
    shared = -(-(count.shared_bytes + 1024) // 128) * 128
    held = min(
        2048 // threads,
        32,
        65536 // (max(min(registers, 255), 24) * threads),
        233472 // shared if shared <= 233472 else 0,
    )
    return _Block(threads, int(own), wgmma, held)


def _together(count: Count, machine: Machine, block: _Block, n: int, busy: float, latency: float) -> float:
    """Seconds in which a multiprocessor works off ``n`` blocks side by side."""
    seconds, outside = 0.0, Work()
    outside.add(count.work, 1.0)
    for loop in count.loops:
        lines = sum(n * (1 + (name in count.straddling)) for name, n in loop.work.read.items())
        one = _round(loop.work, lines, machine, block, count.threads, 1.0 + (BUSY - 1.0) * busy)
        waiting = (latency + one) / (loop.stages - LATE if loop.stages > 1 else 1)
        seconds += loop.entries * loop.rounds * max(n * one, waiting)
        # A producer runs ahead across tiles.
        seconds += latency if loop.entries <= 1 else latency + (loop.entries - 1) * 0.2 * latency
        outside.add(loop.work, -loop.entries * loop.rounds)
    tiles = max([1.0, *(loop.entries for loop in count.loops)])
    stored = sum(outside.written.values()) / STORE / CLOCK
    read = sum(outside.read.values()) / (L2_LANE / 2) / CLOCK
    lanes = (outside.element / machine.lanes + outside.special / machine.special) / CLOCK
    return float(seconds + tiles * TILE + n * (stored + read + lanes))


def _round(work: Work, lines: float, machine: Machine, block: _Block, threads: int, slow: float) -> float:
    """Seconds of the busiest unit for one round of one block. ``lines``: bytes that its loads take of L2's
    lines."""
    tensor = shared = 0.0
    for g, n in work.matrix.items():
        rate = machine.matrix_rate(g.dtype) / machine.sms / machine.clock  # flops a clock
        tensor += n * g.flops / rate / (1.0 if block.wgmma or g.dtype not in machine.matrix else PLAIN)
        shared += n * _operand_bytes(g, threads)
    loaded = sum(work.read.values())
    clocks = max(
        tensor * slow, (shared + loaded) / machine.shared, lines / L2_LANE,
        work.element / machine.lanes + work.special / machine.special + 0.5 * tensor * bool(work.special),
    )  # fmt: skip
    return float(clocks) / CLOCK


def _operand_bytes(g: Gemm, threads: int) -> float:
    """Bytes of shared memory that a product reads: each warpgroup 64 rows of A and its columns of B at a
    time."""
    rows = max(1, g.m // 64)
    cuts = max(1, (threads // 128) // rows, -(-g.n // 256))
    return float(canonical(g.dtype).bytes * g.k * rows * (64 * cuts + g.n))
