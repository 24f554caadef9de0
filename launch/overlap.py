"""What a timeline of real times says in numbers: how busy each rank's blocks were with products, copies and
waits, how much of its copying ran under products, and how fast each link was."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tilescale.compiler.sim.timeline import Slice, Timeline

Interval = tuple[float, float]
#: kinds of slices → what their time is
COPIES = ("copy", "put_packets")
WAITS = ("wait", "barrier", "get_packets")


@dataclass
class Activity:
    """One rank's time in one launch, or in several: intervals in µs, of all its blocks. Products are one
    entry for each slice, without the waits that lie inside of them; copies and waits of one block's threads
    at the same time are one."""

    products: list[Interval] = field(default_factory=list)
    copies: list[Interval] = field(default_factory=list)
    waits: list[Interval] = field(default_factory=list)
    blocks: list[Interval] = field(default_factory=list)
    #: for how long products waited for stages of rings, µs
    stalled: float = 0


@dataclass(frozen=True)
class Share:
    """Of the time of a rank's blocks, in per cent: what they spent in products, copies, waits, and in
    products that wait for stages of rings (roles of a block work side by side, so the sum may be more than
    100; a producer may wait for another rank, and a product for that producer). None: the log has no blocks,
    as on the CPU."""

    rank: int
    launches: int
    mean: float
    products: float | None
    copies: float | None
    waits: float | None
    stalled: float | None
    #: of the time in which a copy was under way: in how much of it the rank had a product under way
    overlap: float | None
    #: and of how many of its blocks, on average
    meanwhile: float | None


@dataclass(frozen=True)
class Link:
    """From one rank to another: bytes, and µs in which a copy of them was under way."""

    source: int
    target: int
    bytes: int
    time: float

    @property
    def rate(self) -> float:
        """GB/s while copies were under way; 0 where no time passed."""
        return self.bytes / self.time / 1e3 if self.time else 0.0


# ---- intervals


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same times without overlaps, in order."""
    out: list[Interval] = []
    for begin, end in sorted(intervals):
        if out and begin <= out[-1][1]:
            out[-1] = out[-1][0], max(out[-1][1], end)
        elif end > begin:
            out.append((begin, end))
    return out


def both(a: list[Interval], b: list[Interval]) -> list[Interval]:
    """The times that two unions share."""
    out, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        begin, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if begin < end:
            out.append((begin, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return out


def without(a: list[Interval], b: list[Interval]) -> list[Interval]:
    """The times of union ``a`` that are not in union ``b``."""
    out = []
    for begin, end in a:
        at = begin
        for low, high in both([(begin, end)], b):
            if low > at:
                out.append((at, low))
            at = high
        if end > at:
            out.append((at, end))
    return out


def covered(intervals: Iterable[Interval], by: list[Interval]) -> float:
    """How much of each interval lies in a union, all intervals together."""
    begins, before = [begin for begin, _ in by], [0.0]
    for begin, end in by:
        before.append(before[-1] + end - begin)

    def below(t: float) -> float:
        k = bisect_right(begins, t)
        return before[k] - max(0.0, by[k - 1][1] - t) if k else 0.0

    return sum(below(end) - below(begin) for begin, end in intervals)


def length(intervals: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)


# ---- of a timeline


def under_way(timeline: Timeline) -> list[tuple[Slice, Interval]]:
    """Each copy to or from another rank, and from when to when it was under way. One that puts is, until its
    block's next signal of the same launch to the same rank is out, where there is one: what a signal releases
    has arrived, stores have only been issued. A block may have warps that signal for others. Of a log without
    blocks a thread's signal counts that it logged next."""
    told: dict[tuple[tuple[int, Any], int], list[Interval]] = defaultdict(list)
    runs: dict[tuple[int, Any], list[Interval]] = defaultdict(list)
    lanes: dict[tuple[int, int], list[float]] = defaultdict(list)
    for s in timeline.slices:
        if s.kind == "kernel":
            runs[_block(s)].append((s.start, s.end))
        else:
            lanes[s.rank, s.thread].append(s.start)
        if s.kind == "signal":
            told[_block(s), s.more.get("peer", s.rank)].append((s.start, s.end))
    for times in (*told.values(), *runs.values(), *lanes.values()):
        times.sort()  # type: ignore[attr-defined]
    out = []
    for s in timeline.slices:
        if s.kind not in COPIES or (peer := s.more.get("peer", s.rank)) == s.rank:
            continue
        end = s.end
        if s.more.get("direction") != "pull":
            signals = told.get((_block(s), peer), [])
            k = bisect_left(signals, (s.end,))
            if blocks := runs.get(_block(s)):
                last = blocks[bisect_right(blocks, (s.start, float("inf"))) - 1][1]
            else:
                lane = lanes[s.rank, s.thread]
                last = lane[min(bisect_right(lane, s.start), len(lane) - 1)]
            if k < len(signals) and signals[k][0] <= last:
                end = signals[k][1]
        out.append((s, (s.start, end)))
    return out


def activities(timeline: Timeline, window: Interval | None = None) -> dict[int, Activity]:
    """What each rank did; of what began in ``window`` alone, where one is given."""
    low, high = window or (float("-inf"), float("inf"))
    found: dict[int, Activity] = defaultdict(Activity)
    waits: dict[tuple[int, int], list[Interval]] = defaultdict(list)
    of_block: dict[str, dict[tuple[int, Any], list[Interval]]] = {
        "copies": defaultdict(list), "waits": defaultdict(list)
    }  # fmt: skip
    for s in timeline.slices:
        if not low <= s.start < high:
            continue
        own = found[s.rank]
        if s.kind in WAITS:
            waits[s.rank, s.thread].append((s.start, s.end))
            of_block["waits"][_block(s)].append((s.start, s.end))
        elif s.kind == "kernel":
            own.blocks.append((s.start, s.end))
    merged = {lane: union(times) for lane, times in waits.items()}
    for s in timeline.slices:
        if s.kind == "gemm" and low <= s.start < high:
            found[s.rank].products += without([(s.start, s.end)], merged.get((s.rank, s.thread), []))
            found[s.rank].stalled += s.more.get("waited for stages", 0.0)
    for s, interval in under_way(timeline):
        if low <= s.start < high:
            of_block["copies"][_block(s)].append(interval)
    for what, blocks in of_block.items():
        for (rank, _), times in blocks.items():
            getattr(found[rank], what).extend(union(times))
    return dict(sorted(found.items()))


def _block(s: Slice) -> tuple[int, Any]:
    """Whose slice it is: a block of a rank; a log without blocks has threads."""
    return s.rank, s.more.get("block", ("thread", s.thread))


def launches(timeline: Timeline) -> list[Interval]:
    """From when to when each launch ran, on all ranks: the n-th time that a rank's block 0 runs belongs to
    launch n, and so does another block's that ran as often. Launches may have fewer blocks than others: then
    a block's run is of the last launch whose block 0 began before that run ended. Empty where the log has no
    blocks."""
    runs: dict[tuple[int, int], list[Interval]] = defaultdict(list)
    for s in timeline.slices:
        if s.kind == "kernel":
            runs[s.rank, s.more["block"]].append((s.start, s.end))
    firsts = {rank: sorted(times) for (rank, block), times in runs.items() if block == 0}
    out: dict[int, Interval] = {}
    for (rank, _), times in runs.items():
        begins = [begin for begin, _ in firsts.get(rank, times)]
        for k, (begin, end) in enumerate(sorted(times)):
            n = k if len(begins) == len(times) else max(bisect_left(begins, end) - 1, 0)
            low, high = out.get(n, (begin, end))
            out[n] = min(low, begin), max(high, end)
    return [out[n] for n in sorted(out)]


def shares(timeline: Timeline) -> list[Share]:
    """Each rank's."""
    runs = launches(timeline)
    mean = length(runs) / len(runs) if runs else timeline.end - timeline.start
    out = []
    for rank, own in activities(timeline).items():
        whole = length(own.blocks)

        def part(of: float, whole: float = whole) -> float | None:
            return 100 * of / whole if whole else None

        copying = union(own.copies)
        hidden = length(both(copying, union(own.products)))
        there, busy = covered(own.blocks, copying), covered(own.products, copying)
        out.append(
            Share(
                rank,
                len(runs),
                mean,
                part(length(own.products) - own.stalled),
                part(length(own.copies)),
                part(length(own.waits)),
                part(own.stalled),
                100 * hidden / length(copying) if copying else None,
                100 * busy / there if there else None,
            )
        )
    return out


def links(timeline: Timeline) -> list[Link]:
    """Those over which copies went; signals' bytes are not counted."""
    nbytes: dict[tuple[int, int], int] = defaultdict(int)
    times: dict[tuple[int, int], list[Interval]] = defaultdict(list)
    for s, interval in under_way(timeline):
        peer = s.more["peer"]
        link = (peer, s.rank) if s.more.get("direction") == "pull" else (s.rank, peer)
        nbytes[link] += s.more.get("bytes", 0)
        times[link].append(interval)
    return [Link(*link, nbytes[link], length(union(times[link]))) for link in sorted(nbytes)]


def report(timeline: Timeline) -> list[str]:
    """Lines for people; none where nothing was computed or copied."""
    lines = []
    for s in shares(timeline):
        parts = ((s.products, "products"), (s.copies, "copies"), (s.waits, "waits"))
        words = [f"{x:.0f} % {what}" for x, what in parts if x is not None]
        if s.stalled:
            words.append(f"{s.stalled:.0f} % products that wait for their tiles")
        if s.overlap is not None:
            of = "" if s.meanwhile is None else f" of {s.meanwhile:.0f} % of its blocks"
            words.append(f"{s.overlap:.0f} % of copying under products{of}")
        if words:
            lines.append(f"    rank {s.rank}: {', '.join(words)}")
    if runs := launches(timeline):
        times = sorted(end - begin for begin, end in runs)
        told = f"1 launch of {times[0]:,.1f} µs"
        if len(runs) > 1:
            median = times[len(times) // 2]
            told = f"{len(runs)} launches of {times[0]:,.1f} to {times[-1]:,.1f} µs, median {median:,.1f}"
        lines.insert(0, f"  {told}; of the time of their blocks:")
    elif lines:
        lines.insert(0, "  of the time of copies:")
    rates = [
        f"{k.source} → {k.target} {k.rate:,.1f} GB/s ({k.bytes:,} bytes in {k.time:,.1f} µs)"
        for k in links(timeline)
        if k.time
    ]
    if rates:
        lines += ["  links while copies were under way:", *(f"    {rate}" for rate in rates)]
    return lines
