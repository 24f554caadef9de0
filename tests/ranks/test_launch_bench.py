"""`tilescale bench` on processors: the table, the figures, what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.runtime import with_runtime
from tilescale import cuda
from tilescale.errors import TileValueError
from tilescale.launch import bench, bench_ranks, held_out
from tilescale.ops import RANK_MODULES, load_ranks

COMMAND = [sys.executable, "-m", "tilescale.launch", "bench"]


def run(env: dict[str, str], *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *args], env=env, capture_output=True, text=True, timeout=120)


def test_a_table_and_figures(clean_env: dict[str, str], tmp_path: Path):
    out = tmp_path / "figures.json"
    options = ["--device", "cpu", "--replays", "3", "--every-way", "--json", str(out)]
    done = run(
        clean_env, "-n", "3", *options, "all_gather_matmul", "all_reduce", "--only", "M=5", "--only", "size=5"
    )
    assert done.returncode == 0, done.stderr
    assert "3 ranks, processors" in done.stdout and "× gloo" in done.stdout
    made = json.loads(out.read_text())
    assert made["machine"]["ranks"] == 3 and made["command"].startswith("tilescale bench -n 3")
    line, *sums = made["figures"]["cases"]
    ways = ("fused", "apart", "engine")
    assert [s["shape"]["how"] for s in sums] == ["packets", "two_packets", "one_shot", "two_shot"]
    assert all(s["right"] for s in sums)
    assert line["op"] == "all_gather_matmul" and line["shape"]["M"] == 5 and line["right"]
    assert set(line["us"]) == {"ours", "library", "alone", *(f"ours, {way}" for way in ways)}
    assert line["way"] == "apart" and line["fastest_way"] in ways
    assert line["ratio_to_library"] == pytest.approx(
        line["us"]["library"]["median"] / line["us"]["ours"]["median"]
    )
    assert "all_gather_matmul" in done.stdout and "relu" in done.stdout


@pytest.mark.slow
def test_every_operation_in_a_shape_of_ones_own(clean_env: dict[str, str], tmp_path: Path):
    out = tmp_path / "figures.json"
    options = ["--device", "cpu", "--replays", "1", "--json", str(out)]
    flat = ["all_gather", "reduce_scatter"]
    products = ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"]
    for shape, names in (("rows=30,columns=20", flat), ("M=33,N=16,K=24,bias=true", products)):
        done = run(clean_env, "-n", "2", *options, "--shape", shape, *names)
        assert done.returncode == 0, done.stdout + done.stderr
        cases = json.loads(out.read_text())["figures"]["cases"]
        assert [c["op"] for c in cases] == names and all(c["right"] for c in cases)


def test_what_tuning_finds_is_kept_for_later(clean_env: dict[str, str], tmp_path: Path):
    out, cache = tmp_path / "figures.json", with_runtime(tmp_path / "cache")
    env = {**clean_env, "TILESCALE_CACHE_DIR": str(cache)}
    options = ["-n", "2", "--device", "cpu", "--replays", "1", "--shape", "rows=30,columns=20"]
    for more in (["--tune"], []):
        done = run(env, *options, *more, "--json", str(out), "all_gather")
        assert done.returncode == 0, done.stdout + done.stderr
        (line,) = json.loads(out.read_text())["figures"]["cases"]
        assert line["right"] and set(line["tuned"]) == {"how", "blocks"} and "(tuned)" in done.stdout
        assert line["way"] == line["tuned"]["how"]
    (kept,) = (cache / "tuned").glob("ranks-2-on-1-of-1-*.json")
    assert json.loads(kept.read_text()) == {"all_gather": {"size=600": line["tuned"]}}


def test_a_shape_that_an_operation_does_not_have_is_told(clean_env: dict[str, str]):
    done = run(clean_env, "-n", "1", "--device", "cpu", "--shape", "rows=3", "all_reduce")
    assert done.returncode == 1 and "rows" in done.stdout


def test_a_words_kind_is_that_of_the_cases():
    op = load_ranks("ranks.gather_gemm")
    bench_ranks.fits(op, {"M": 7, "N": 8, "K": 9, "dtype": "float16", "bias": True})
    with pytest.raises(TileValueError, match="M=abc of all_gather_matmul is no int"):
        bench_ranks.fits(op, {"M": "abc", "N": 8, "K": 9})


def test_extents_of_nothing_are_told():
    with pytest.raises(
        TileValueError, match="K=0 of all_gather_matmul is too small\\n  expected: at least 1"
    ):
        bench_ranks.fits(load_ranks("ranks.gather_gemm"), {"M": 7, "N": 8, "K": 0})
    with pytest.raises(TileValueError, match="M=-7 of all_gather_matmul is too small"):
        bench_ranks.fits(load_ranks("ranks.gather_gemm"), bench.shape_of("M=-7,N=8,K=8"))
    bench_ranks.fits(load_ranks("ranks.spread"), {"size": 7, "root": 0})


@pytest.mark.skipif(cuda.CUDA.may_be_here(), reason="needs a machine without a GPU")
def test_a_gpu_that_is_missing_is_told_once(clean_env: dict[str, str]):
    done = run(clean_env, "-n", "2", "--device", "cuda", "all_reduce")
    assert done.returncode == 1 and "this machine has no GPU" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "args, told",
    [
        (["-n", "2", "matmul"], "there is no operation 'matmul'; there are all_gather"),
        (["-n", "2", "--shape", "M"], "expected NAME=VALUE"),
        (["all_reduce"], "--ranks"),
        (["-n", "1", "--json", "/no/such/folder/f.json"], "there is no folder /no/such/folder"),
        (["-n", "1", "--device", "cpu", "--only", "size=77", "all_reduce"], "no case has size=77 in it"),
        (["-n", "1", "--seconds", "-1"], "--seconds"),
    ],
)
def test_refusals(clean_env: dict[str, str], args: list[str], told: str):
    done = run(clean_env, *args)
    assert done.returncode == 2 and told in done.stderr


def test_the_lists_have_cases_for_both_kinds_of_machine():
    for module in RANK_MODULES:
        plan: dict[str, Any] = {"modules": [module], "only": [], "shapes": [], "held_out": None}
        measured = bench_ranks.cases({**plan, "device": "cuda"})
        assert len(measured) == sum(c.bar is not None for c in load_ranks(module).cases) > 0


def test_a_line_is_computed_from_times():
    op = load_ranks("ranks.gather_gemm")
    us = {
        name: {"median": t}
        for name, t in {"ours": 100.0, "library": 150.0, "alone": 90.0, "torch": 120.0}.items()
    }
    line = bench_ranks.figures(op, {"M": 8192, "N": 2560, "K": 8192}, us, 0.0, 4, 132, {})
    assert line["ratio_to_library"] == 1.5 and line["ratio_to_torch"] == 1.2 and not line["slower"]
    assert line["link_us"] == pytest.approx(3 * 2048 * 8192 * 2 / 370e9 * 1e6)
    assert line["best_us"] == max(90.0, line["link_us"]) and line["way"] == "fused" and line["blocks"] == 132
    assert bench.shape_of("M=5, bias=true,dtype=float16") == {"M": 5, "bias": True, "dtype": "float16"}


def test_shapes_that_are_drawn(clean_env: dict[str, str], tmp_path: Path):
    out = tmp_path / "figures.json"
    options = ["-n", "2", "--device", "cpu", "--replays", "1", "--held-out", "2", "--seed", "3"]
    done = run(clean_env, *options, "--json", str(out), "all_gather", "reduce_scatter")
    assert done.returncode == 0, done.stdout + done.stderr
    cases = json.loads(out.read_text())["figures"]["cases"]
    assert [c["op"] for c in cases] == ["all_gather", "reduce_scatter"] * 2 and all(c["right"] for c in cases)
    below = [c for c in cases if held_out.fastest_peer(c)[1] < held_out.BAR]
    assert f"{len(below)} of 4 shapes are below 0.97 of the fastest peer; 0 failed, 0 were not" in done.stdout
    done = run(clean_env, *options, "--seconds", "0", "all_gather")
    assert done.returncode == 0 and "0 of 0 shapes" in done.stdout and "2 were not measured" in done.stdout


def test_shapes_are_drawn_near_cases_that_all_say_how():
    """Processors have no other ones of all_reduce; what is drawn is left to the choice."""
    plan = {"modules": ["ranks.reduce"], "only": [], "shapes": [], "held_out": 3, "seed": 0, "device": "cpu"}
    assert [("how" in shape, "size" in shape) for _, shape in bench_ranks.cases(plan)] == [(False, True)] * 3


def test_the_way_that_is_told_is_the_one_taken():
    """Packets take no float64."""
    pick = load_ranks("ranks.reduce").pick
    assert [pick(2, 100, dtype).way for dtype in ("float64", "float32")] == ["one_shot", "packets"]
    assert pick(2, 1 << 20, "float64", kept={"how": "two_packets"}).way == "one_shot"


def test_a_way_that_a_shape_asks_for_is_told():
    """A product's Config in words of the shape; rows that packets do not take."""
    for name in ("gather_gemm", "gemm_scatter", "gemm_reduce"):
        pick, shape = load_ranks(f"ranks.{name}").pick, {"M": 8, "N": 8, "K": 8, "bias": True}
        assert pick(2, **shape).way == "apart" and pick(2, **shape, engine=True).way == "engine"
        made = pick(2, **shape, blocks=5, kept={"fused": False})
        assert (made.way, made.blocks) == ("fused", 5)
    pick = load_ranks("ranks.gather").pick
    assert [pick(2, rows=4, columns=k).way for k in (2, 3)] == ["packets", "kernel"]


def test_drawn_shapes_are_near_and_alike_for_a_seed():
    listed = {"a": [{"M": 1000, "hidden": 128, "dtype": "float16"}], "b": [{"size": 1}]}
    found = held_out.drawn(listed, 40, 7)
    assert found == held_out.drawn(listed, 40, 7) != held_out.drawn(listed, 40, 8)
    assert [name for name, _ in found] == ["a", "b"] * 40
    made = [shape for name, shape in found if name == "a"]
    assert all(500 <= s["M"] <= 2000 and s["hidden"] in (64, 128, 192, 256) for s in made)
    assert all(s["dtype"] == "float16" for s in made) and sum(s["M"] % 64 != 0 for s in made) >= 15
    assert all(s["M"] % 64 == 0 for s in made[::2])


def test_the_fastest_peer_counts():
    times = {"ours": {"median": 10.0}, "library": {"median": 12.0}, "torch": {"median": 9.0}}
    assert held_out.fastest_peer({"us": times | {"alone": {"median": 1.0}}}) == ("torch", 0.9)
