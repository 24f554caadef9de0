"""A launch of a timeline, or the last few of all kernels, as a picture: for each rank the share of its blocks
that compute, copy and wait, over time, and the links with what went over them. Plain SVG, the same for the
same timeline."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import TYPE_CHECKING

from tilescale.launch import overlap
from tilescale.launch.overlap import Interval

if TYPE_CHECKING:
    from tilescale.compiler.sim.timeline import Timeline

#: what is drawn of each rank: the name, and the colour
LANES = (("products", "#2f7d4f"), ("copies", "#2b6cb0"), ("waits", "#c05621"))
#: points of time; pixels of one, of a lane, and of what stands beside them
BINS, STEP, HIGH, LEFT, RIGHT, TOP = 240, 3, 26, 130, 120, 62
#: characters of a kernel's name
TITLE = 90
#: ranks and links that are drawn, at most
RANKS, LINKS = 16, 16


def density(intervals: Iterable[Interval], window: Interval, bins: int = BINS) -> list[float]:
    """How many intervals are under way on average in each of ``bins`` equal parts of a window."""
    low, high = window
    width = (high - low) / bins or 1.0
    out = [0.0] * bins
    for begin, end in intervals:
        first, last = (min(max((t - low) / width, 0.0), float(bins)) for t in (begin, end))
        for k in range(int(first), min(int(last) + 1, bins)):
            out[k] += max(0.0, min(last, k + 1) - max(first, k))
    return out


def chosen(timelines: list[Timeline]) -> tuple[Timeline, Interval] | None:
    """The last launch of the kernel that took the most time in all; the first launches of a job also load
    code. A kernel without blocks in its log is one launch. None where nothing was logged."""
    best = max((t for t in timelines if t.slices), key=lambda t: _total(t), default=None)
    if best is None:
        return None
    return best, (overlap.launches(best) or [(best.start, best.end)])[-1]


def latest(
    timelines: list[Timeline], count: int
) -> tuple[Timeline, Interval, list[tuple[float, str]]] | None:
    """The last ``count`` launches of all kernels as one timeline, when they were, and when which one began.
    None where nothing was logged."""
    from dataclasses import replace

    runs = [
        (window, t) for t in timelines if t.slices for window in overlap.launches(t) or [(t.start, t.end)]
    ]
    runs = sorted(runs, key=lambda run: run[0])[-count:]
    if not runs:
        return None
    window = runs[0][0][0], max(high for (_, high), _ in runs)
    # ranks begin and end at different times, so windows overlap: a slice is drawn and counted once
    windows = {id(t): [w for w, other in runs if other is t] for _, t in runs}
    slices = [
        s
        for t in timelines
        for s in t.slices
        if any(low <= s.start < high for low, high in windows.get(id(t), ()))
    ]
    whole = replace(runs[0][1], name=f"the last {len(runs)} launches", slices=slices, arrows=[], flight=[])
    return whole, window, [(low, t.name.partition("(")[0]) for (low, _), t in runs]


def _total(timeline: Timeline) -> float:
    runs = overlap.launches(timeline)
    return overlap.length(runs) if runs else timeline.end - timeline.start


def svg(timelines: list[Timeline], launches: int = 1) -> str:
    """The picture: of the last launch of the kernel that took longest, or of the last ``launches`` of all.

    Raises:
        ValueError: nothing was logged.
    """
    begins: list[tuple[float, str]] = []
    if launches == 1:
        found = chosen(timelines)
    elif (several := latest(timelines, launches)) is not None:
        *found, begins = several  # type: ignore[assignment]
    else:
        found = None
    if found is None:
        raise ValueError("nothing was logged, so there is nothing to draw")
    timeline, window = found
    ranks = list(overlap.activities(timeline, window).items())
    rates = overlap.links(_of(timeline, window))
    hidden = {s.rank: s.overlap for s in overlap.shares(_of(timeline, window))}
    foot = TOP + min(len(ranks), RANKS) * (len(LANES) * HIGH + 14)
    body, y = [*_axis(window, foot), *_names(begins, window, foot)], TOP
    for rank, own in ranks[:RANKS]:
        body += _rank(rank, own, window, y, hidden.get(rank))
        y += len(LANES) * HIGH + 14
    y += 40
    busiest = max((k.bytes for k in rates), default=0)
    for link in rates[:LINKS]:
        wide = max(1, round(BINS * STEP * 0.5 * link.bytes / busiest)) if busiest else 1
        told = f"{link.bytes / 1e6:,.2f} MB, {link.rate:,.1f} GB/s"
        body.append(_text(LEFT - 8, y + 11, f"{link.source} → {link.target}", "end"))
        body.append(f'<rect x="{LEFT}" y="{y + 2}" width="{wide}" height="10" fill="{LANES[1][1]}"/>')
        body.append(_text(LEFT + wide + 6, y + 11, told))
        y += 16
    left_out = [f"{len(ranks) - RANKS} ranks"] * (len(ranks) > RANKS)
    left_out += [f"{len(rates) - LINKS} links"] * (len(rates) > LINKS)
    if left_out:
        body.append(_text(LEFT, y + 11, f"not drawn: {' and '.join(left_out)}"))
        y += 16
    wide = LEFT + BINS * STEP + RIGHT
    name = timeline.name if len(timeline.name) <= TITLE else f"{timeline.name[: TITLE - 1]}…"
    told = f"{window[1] - window[0]:,.1f} µs; the share of each rank's blocks, over time"
    title = f"{name}: {told}" if begins else name
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{y + 12}" '
            f'viewBox="0 0 {wide} {y + 12}" font-family="sans-serif" font-size="11">',
            f'<rect width="{wide}" height="{y + 12}" fill="#ffffff"/>',
            _text(LEFT, 18, title, size=14),
            *([] if begins else [_text(LEFT, 35, told)]),
            *body,
            "</svg>",
            "",
        ]
    )


def _of(timeline: Timeline, window: Interval) -> Timeline:
    """What began in a window."""
    from dataclasses import replace

    return replace(timeline, slices=[s for s in timeline.slices if window[0] <= s.start < window[1]])


def _rank(rank: int, own: overlap.Activity, window: Interval, y: int, hidden: float | None) -> list[str]:
    out = [_text(8, y + 17, f"rank {rank}", size=13)]
    most = max(density(own.blocks, window), default=0.0)  # launches follow each other: blocks at once
    for name, colour in LANES:
        level = density(getattr(own, name), window)
        top = most or max(level, default=0.0) or 1.0  # a log without blocks: of the most that it has at once
        heights = [min(HIGH - 4, round((HIGH - 4) * x / top)) for x in level]
        out.append(_text(LEFT - 8, y + 17, name, "end"))
        out.append(f'<path d="{_area(heights, y + HIGH - 2)}" fill="{colour}"/>')
        out.append(
            f'<path d="M{LEFT} {y + HIGH - 2}h{BINS * STEP}" stroke="#cccccc" fill="none" stroke-width="1"/>'
        )
        y += HIGH
    if hidden is not None:
        beside = LEFT + BINS * STEP + 8
        out.append(_text(beside, y - 2 * HIGH + 17 - HIGH // 2, f"{hidden:.0f} % of copying"))
        out.append(_text(beside, y - 2 * HIGH + 31 - HIGH // 2, "under products"))
    return out


def _names(begins: list[tuple[float, str]], window: Interval, y: int) -> list[str]:
    """Where launches begin, and what they are: names on three lines, each where there is room, since short
    launches follow each other closely."""
    out, ends = [], [0.0] * 3
    for begin, name in begins:
        x = LEFT + round(BINS * STEP * (begin - window[0]) / (window[1] - window[0] or 1.0))
        line = next((k for k, end in enumerate(ends) if end <= x), ends.index(min(ends)))
        ends[line] = x + 6 * len(name) + 4
        out.append(f'<path d="M{x} {TOP - 8}V{y}" stroke="#999999" fill="none" stroke-width="1"/>')
        out.append(_text(x + 2, TOP - 9 - 10 * line, name, size=9))
    return out


def _area(heights: list[int], floor: int) -> str:
    """A step for each change of height."""
    path, at, run = f"M{LEFT} {floor}", 0, 0
    for h in [*heights, 0]:
        if h == at:
            run += STEP
            continue
        path += (f"h{run}" if run else "") + f"v{at - h}"
        at, run = h, STEP
    return path + "z"


def _axis(window: Interval, y: int) -> list[str]:
    """Ticks at round times."""
    whole = window[1] - window[0]
    step = 1.0
    while whole / step > 10:
        step *= 2.5 if str(step).startswith("2") else 2
    while step > 1e-3 and whole / step < 4:
        step /= 2
    out, k = [], 0
    while k * step <= whole and whole > 0:
        x = LEFT + round(BINS * STEP * k * step / whole)
        out.append(f'<path d="M{x} {TOP - 8}V{y}" stroke="#eeeeee" fill="none" stroke-width="1"/>')
        out.append(_text(x, y + 14, f"{k * step:g}", "middle"))
        k += 1
    return [*out, _text(LEFT + BINS * STEP + 8, y + 14, "µs")]


def _text(x: int, y: int, text: str, anchor: str = "start", size: int = 0) -> str:
    more = f' font-size="{size}"' if size else ""
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}"{more}>{escape(text)}</text>'
