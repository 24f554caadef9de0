"""The numbers and the picture that `tilescale trace` makes of real times, from timelines made by hand."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from tests.runtime import with_runtime
from tilescale import cuda
from tilescale.compiler.sim.timeline import Slice, Timeline, Traffic
from tilescale.launch import overlap, picture
from tilescale.launch.cli import commands
from tilescale.launch.trace import _clocks, merged
from tilescale.native.gpu_log import GpuLog, Sample, Span

#: names of SVG's elements
SVG = "{http://www.w3.org/2000/svg}"


def slice_(kind: str, rank: int, thread: int, begin: float, end: float, **more: Any) -> Slice:
    return Slice(kind, "x", rank, thread, begin, end - begin, "f.py", 1, {"block": 0, **more})


def two_ranks() -> Timeline:
    """Rank 0 computes from 10 to 60 but for a wait from 30 to 40, and puts from 50 to 70, of which the signal
    is out at 80. Rank 1 waits all the time, and pulls from 20 to 30."""
    timeline = Timeline("k", Traffic(2), "µs")
    timeline.slices += [
        slice_("kernel", 0, 0, 0, 100),
        slice_("gemm", 0, 0, 10, 60, **{"waited for stages": 5.0}),
        slice_("wait", 0, 0, 30, 40),
        slice_("copy", 0, 1, 50, 70, peer=1, bytes=30_000, direction="put"),
        slice_("signal", 0, 1, 70, 80, peer=1, bytes=8),
        slice_("kernel", 1, 0, 0, 100),
        slice_("wait", 1, 0, 0, 100),
        slice_("copy", 1, 1, 20, 30, peer=0, bytes=5_000, direction="pull"),
        slice_("copy", 1, 1, 30, 95, bytes=1),
    ]
    return timeline


def test_shares_and_overlap():
    first, second = overlap.shares(two_ranks())
    assert (first.launches, first.mean) == (1, 100)
    assert first.products == pytest.approx(35) and first.copies == pytest.approx(30)
    assert first.waits == pytest.approx(10) and first.stalled == pytest.approx(5)
    assert first.overlap == pytest.approx(100 * 10 / 30) and first.meanwhile == pytest.approx(100 * 10 / 30)
    assert (second.products, second.copies, second.waits, second.overlap) == (0, 10, 100, 0)


def test_a_copy_is_under_way_until_its_block_signals_in_the_same_launch():
    """Another warp may signal; a later launch's signals say nothing; what is pulled has come when it ends."""
    timeline = Timeline("k", Traffic(2), "µs")
    put, pull = ({"peer": 1, "bytes": 8, "direction": way} for way in ("put", "pull"))
    timeline.slices += [
        slice_("kernel", 0, 0, 0, 40),
        slice_("copy", 0, 1, 10, 12, **put),
        slice_("copy", 0, 2, 10, 13, **pull),
        slice_("signal", 0, 3, 15, 20, peer=0),
        slice_("signal", 0, 3, 21, 30, peer=1),
        slice_("copy", 0, 1, 31, 33, **put),
        slice_("kernel", 0, 0, 50, 80),
        slice_("signal", 0, 3, 60, 70, peer=1),
    ]
    assert [interval for _, interval in overlap.under_way(timeline)] == [(10, 30), (10, 13), (31, 33)]


def test_launches_of_unequally_many_blocks_are_told_apart():
    """A block's first run is of the first launch that has such a block."""
    timeline = Timeline("k", Traffic(2), "µs")
    for begin, blocks in ((0, 1), (50, 3), (90, 2)):
        for rank in range(2):
            timeline.slices += [
                slice_("kernel", rank, b, begin + b, begin + b + 10, block=b) for b in range(blocks)
            ]
    assert overlap.launches(timeline) == [(0, 10), (50, 62), (90, 101)]
    assert "3 launches of 10.0 to 12.0 µs, median 11.0" in overlap.report(timeline)[0]


def test_threads_of_a_block_that_copy_or_wait_at_once_count_once():
    """Warps have rows of their own: a block is in copies while any of them is; two blocks are two."""
    timeline = Timeline("k", Traffic(2), "µs")
    for block in range(2):
        timeline.slices.append(slice_("kernel", 0, 8 * block, 0, 100, block=block))
        for warp in range(8):
            more = {"peer": 1, "bytes": 1, "direction": "put", "block": block}
            timeline.slices.append(slice_("copy", 0, 8 * block + warp, 10 + warp, 50 + warp, **more))
            timeline.slices.append(slice_("wait", 0, 8 * block + warp, 60, 80, block=block))
    (own,) = overlap.shares(timeline)
    assert (own.copies, own.waits) == (pytest.approx(47), pytest.approx(20))


def test_heights_are_of_the_blocks_at_once_not_of_all_launches():
    timeline = Timeline("k", Traffic(1), "µs")
    for launch in range(4):
        timeline.slices.append(slice_("kernel", 0, 0, 100 * launch, 100 * launch + 100))
        timeline.slices.append(slice_("gemm", 0, 0, 100 * launch, 100 * launch + 100))
    drawn = picture._rank(0, overlap.activities(timeline)[0], (0, 400), 0, None)
    assert f"M{picture.LEFT} {picture.HIGH - 2}v{-(picture.HIGH - 4)}h" in "".join(drawn)


def test_links_count_bytes_over_the_time_of_copies():
    """A put lasts until its signal is out; a pull's bytes go from the rank that is read."""
    (link,) = overlap.links(two_ranks())
    assert (link.source, link.target, link.bytes, link.time) == (0, 1, 35_000, 40)
    assert link.rate == pytest.approx(35_000 / 40e-6 / 1e9)
    text = "\n".join(overlap.report(two_ranks()))
    assert "1 launch of 100.0 µs" in text and "33 % of copying under products of 33 % of its blocks" in text
    assert "0 → 1 0.9 GB/s (35,000 bytes in 40.0 µs)" in text


def test_launches_are_told_apart_by_how_often_a_block_ran():
    timeline = Timeline("k", Traffic(2), "µs")
    for rank, late in ((0, 0), (1, 3)):
        for launch in range(2):
            for block in range(2):
                begin = 100 * launch + block + late
                timeline.slices.append(slice_("kernel", rank, block, begin, begin + 50, block=block))
    assert overlap.launches(timeline) == [(0, 54), (100, 154)]


def test_intervals():
    assert overlap.union([(5, 6), (0, 2), (1, 3), (3, 4), (7, 7)]) == [(0, 4), (5, 6)]
    assert overlap.both([(0, 4), (6, 9)], [(2, 7), (8, 10)]) == [(2, 4), (6, 7), (8, 9)]
    assert overlap.covered([(0, 5), (2.5, 9), (11, 12)], [(2, 3), (4, 8)]) == 1 + 1 + 0.5 + 4
    assert overlap.without([(0, 10)], [(2, 3), (5, 12)]) == [(0, 2), (3, 5)]


def test_a_log_without_blocks_has_an_overlap_and_no_shares():
    timeline = two_ranks()
    timeline.slices = [s for s in timeline.slices if s.kind != "kernel"]
    first, _ = overlap.shares(timeline)
    assert first.products is None and first.overlap == pytest.approx(100 * 10 / 30)
    assert "of the time of copies" in overlap.report(timeline)[0]


# ---- the picture


def test_the_picture_is_small_xml_and_the_same_each_time():
    text = picture.svg([two_ranks()])
    root = ElementTree.fromstring(text)
    assert root.tag == f"{SVG}svg" and text == picture.svg([two_ranks()])
    told = [e.text for e in root.iter(f"{SVG}text")]
    assert {"rank 0", "rank 1", "products", "copies", "waits", "0 → 1"} <= set(told)
    assert "33 % of copying" in told
    timeline = Timeline("<many> & more", Traffic(8), "µs")
    for rank in range(8):
        for k in range(600):  # heights that change with every point
            timeline.slices.append(
                slice_("gemm", rank, k, (k * 37) % 1000, (k * 37) % 1000 + 1 + k % 90, block=k)
            )
            timeline.slices.append(
                slice_(
                    "copy",
                    rank,
                    k,
                    (k * 53) % 1000,
                    (k * 53) % 1000 + 1 + k % 40,
                    peer=(rank + 1) % 8,
                    bytes=64,
                )
            )
            timeline.slices.append(slice_("wait", rank, k, (k * 71) % 1000, (k * 71) % 1000 + k % 30))
    large = picture.svg([timeline])
    ElementTree.fromstring(large)
    assert len(large.encode()) < 60_000


def test_density_is_how_many_at_once():
    level = picture.density([(0, 10), (5, 10), (-5, 2.5), (9, 99)], (0, 20), bins=4)
    assert level == pytest.approx([1.5, 2.2, 1, 1])


def test_the_last_launch_of_the_longest_kernel_is_drawn():
    short, long = two_ranks(), two_ranks()
    long.slices += [slice_("kernel", 0, 0, 200, 340), slice_("gemm", 0, 0, 210, 300)]
    assert picture.chosen([short, long]) == (long, (200, 340))
    assert picture.chosen([Timeline("k", Traffic(1), "µs")]) is None
    with pytest.raises(ValueError, match="nothing was logged"):
        picture.svg([])


# ---- clocks


def test_the_last_launches_of_all_kernels_are_drawn():
    """In the order of their begins, each with its name; shares are those of all of them."""
    first, second = two_ranks(), Timeline("grouped(N=3)", Traffic(2), "µs")
    second.slices += [slice_("kernel", r, 0, 120, 180) for r in range(2)]
    second.slices.append(slice_("gemm", 1, 0, 120, 180))
    third = Timeline("early", Traffic(2), "µs")
    third.slices.append(slice_("kernel", 0, 0, -50, -10))
    whole, window, begins = picture.latest([second, third, first], 2)
    assert window == (0, 180) and begins == [(0, "k"), (120, "grouped")]
    assert len(whole.slices) == len(first.slices) + len(second.slices)
    text = picture.svg([second, third, first], 2)
    words = [t.text for t in ElementTree.fromstring(text).iter(f"{SVG}text")]
    assert "k" in words and "grouped" in words and "early" not in words
    assert any("the last 2 launches: 180.0 µs" in str(w) for w in words)
    assert "early" in picture.svg([second, third, first], 9)
    with pytest.raises(ValueError, match="nothing was logged"):
        picture.svg([], 3)


def test_times_of_a_gpu_follow_both_comparisons():
    """The GPU's clock is 1000 behind at first, and loses 10 in each 1000 that follow."""
    log = GpuLog(0, (), 0, (Sample(5000, 6000, 40), Sample(10_000, 11_050, 60)))
    assert [log.host_ns(t) for t in (5000, 7500, 10_000, 12_500)] == [6000, 8525, 11_050, 13_550]
    assert log.within == 60 and log.drift == pytest.approx((1e4, 2e4))
    once = GpuLog(0, (), 0, (Sample(5000, 6000, 40),))
    assert once.host_ns(9000) == 10_000 and once.drift is None


def test_the_step_of_a_clock_is_what_the_log_shows():
    spans = tuple(Span(1000 + 32 * k, 1000 + 64 * k, 0, 0, -1, 0, 0, 0, 0) for k in range(5))
    assert GpuLog(0, spans, 0, (Sample(0, 0, 1),)).tick == 32
    assert GpuLog(0, (), 0, (Sample(0, 0, 1),)).tick == 0


def test_how_far_clocks_may_be_off_is_told():
    clock = {"device": 3, "within": 900, "drift": None, "tick": 32}
    logs = [{"rank": 1, "clocks": [clock]}, {"rank": 0, "clocks": [clock | {"drift": [-2.5, 0.25]}]}]
    first, second = _clocks(logs)
    assert first == (
        "rank 0: GPU 3's clock, in steps of 32 ns, is known to ± 0.90 µs, drifting by -2.5 ± 0.2 parts in a million"
    )
    assert second.startswith("rank 1: GPU 3") and "its drift is not known" in second


def test_slices_of_equal_times_keep_their_pairs():
    """A clock of coarse steps: two spans of one site that begin where the other ends."""
    same = {"kernel": "k", "block": 0, "rank": -1, "bytes": 0, "thread": 0, "site": 0, "kind": "wait",
            "name": "got", "file": "f.py", "line": 3, "text": "", "waited": 0, "device": 0}  # fmt: skip
    times = [(0, "begin"), (32, "end"), (32, "begin"), (32, "end"), (32, "begin"), (64, "end")]
    events = [same | {"ns": ns, "phase": phase} for ns, phase in times]
    (timeline,) = merged([{"rank": 0, "lost": 0, "events": events}], 1)
    assert [(s.start, s.end) for s in timeline.slices] == [(0, 0.032), (0.032, 0.064), (0.032, 0.032)]


# ---- the command


def test_without_a_gpu_it_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cuda, "FILES", ("/dev/no-such-gpu",))
    script = tmp_path / "program.py"
    script.write_text("raise SystemExit('it ran')\n")
    done = CliRunner().invoke(commands, ["trace", "-n", "2", "--target", "cuda", str(script)])
    assert done.exit_code == 1 and "this machine has no GPU to trace" in done.output
    assert "/dev/no-such-gpu" in done.output and "it ran" not in done.output


def test_bytes_of_launches_that_overlap_are_drawn_once():
    """Rank 1 begins its second launch while rank 0 is in its first."""
    timeline = Timeline("k", Traffic(2), "µs")
    for rank, runs in enumerate((((0, 100), (100, 200)), ((0, 60), (60, 160)))):
        timeline.slices += [slice_("kernel", rank, 0, *run) for run in runs]
    timeline.slices.append(slice_("copy", 1, 1, 70, 80, peer=0, bytes=1_000_000, direction="put"))
    assert "1.00 MB, 100.0 GB/s" in picture.svg([timeline], 2)


def test_simulated_times_are_not_drawn(tmp_path: Path):
    script = tmp_path / "program.py"
    script.write_text("\n")
    done = CliRunner().invoke(commands, ["trace", "-n", "2", "--svg", "x.svg", str(script)])
    assert done.exit_code == 2 and "--target cpu or --target cuda" in done.output
    drawn = CliRunner().invoke(commands, ["trace", "-n", "2", "--svg-launches", "1", str(script)])
    assert drawn.exit_code == 2 and "--svg FILE" in drawn.output


def test_a_run_on_the_cpu_is_drawn(tmp_path: Path):
    example = Path(__file__).resolve().parents[2] / "examples" / "08_ag_gemm.py"
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        "TILESCALE_CACHE_DIR": str(with_runtime(tmp_path / "cache")),
    }
    line = [sys.executable, "-m", "tilescale.launch", "trace", "-n", "2", "--target", "cpu"]
    line += ["-o", str(tmp_path / "trace.json"), "--svg", str(tmp_path / "trace.svg"), str(example)]
    ran = subprocess.run(
        [*line, "--m", "64", "--n", "64", "--k", "64"],
        env=environ,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr
    assert "of copying under products" in ran.stdout and "links while copies were under way" in ran.stdout
    ElementTree.fromstring((tmp_path / "trace.svg").read_text(encoding="utf-8"))
