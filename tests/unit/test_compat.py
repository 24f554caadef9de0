"""The measurement of TileLang's programs: which figures belong together, what a call of the command runs, and what
a run that was cut off has kept."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.compat import figures, measure, programs
from tests.compat.__main__ import checked, chosen_programs
from tests.compat.figures import Figure, Meter, pairs
from tests.compat.programs import Program
from tests.compat.runs import Job, Runner
from tests.compat.table import recorded, rows_of, summary, table


def figure(names: str, ms: float) -> Figure:
    return Figure(tuple(names.split()), ms)


def test_figures_of_one_kernel_pair_in_their_order() -> None:
    ours = [figure("fwd", 1.0), figure("bwd", 2.0), figure("fwd", 3.0)]
    theirs = [figure("fwd", 10.0), figure("fwd", 30.0), figure("bwd", 20.0)]
    assert [(a.ms, b.ms) for a, b in pairs(ours, theirs)] == [(1.0, 10.0), (2.0, 20.0), (3.0, 30.0)]


def test_figures_pair_in_order_where_names_differ() -> None:
    ours = [figure("main", 1.0), figure("main_1", 2.0), figure("same", 3.0)]
    theirs = [figure("kernel", 10.0), figure("same", 30.0), figure("kernel", 20.0)]
    assert [(a.ms, b.ms) for a, b in pairs(ours, theirs)] == [(1.0, 10.0), (2.0, 20.0), (3.0, 30.0)]


def test_a_figure_that_one_side_lacks_pairs_with_none() -> None:
    ours = [figure("fwd", 1.0), figure("fwd", 2.0), figure("bwd", 5.0)]
    theirs = [figure("fwd", 10.0), figure("bwd", 50.0)]
    assert [(a.ms, b.ms) for a, b in pairs(ours, theirs)] == [(5.0, 50.0)]


def test_what_calls_no_kernel_is_no_figure() -> None:
    class Kernel:
        def __init__(self, name: str, inner: Kernel | None = None):
            self.name, self.inner = name, inner

        def __call__(self) -> None:
            if self.inner is not None:
                self.inner()

    said: list[dict[str, object]] = []
    meter = Meter(lambda **event: said.append(event), "nobody", brief=True, gpu=False)
    own = Kernel.__call__
    try:
        meter.calls.watch(Kernel, lambda kernel: kernel.name)
        several = Kernel("several", Kernel("part"))
        other = Kernel("other")
        meter.measure(lambda: None)
        meter.measure(lambda: (several(), other()))
    finally:
        Kernel.__call__ = own  # type: ignore[method-assign]
    assert [e["kernels"] for e in said] == [["other", "several"]]


def test_what_a_tuner_measures_is_no_figure() -> None:
    said: list[object] = []
    meter = Meter(lambda **event: said.append(event), "tests.unit.test_compat", brief=True, gpu=False)

    class Kernel:
        def __call__(self) -> None:
            pass

    meter.calls.watch(Kernel, lambda kernel: "kernel")
    kernel = Kernel()
    assert len(meter.measure(kernel)) == 1 and not said  # this module is the tuner


@pytest.mark.parametrize(
    "words, expected",
    [
        ({}, 3.0),
        ({"return_mode": "min"}, 1.0),
        ({"quantiles": [0.0, 1.0]}, [1.0, 6.0]),
        ({"quantiles": [0.5]}, 2.0),
    ],
)
def test_summaries(words: dict[str, object], expected: object) -> None:
    assert figures.summary([6.0, 1.0, 2.0], **words) == expected  # type: ignore[arg-type]


def test_measurement_entries_are_called_as_tilelang_does(tmp_path: Path) -> None:
    (tmp_path / "regression_a.py").write_text(
        "import tilelang.testing\n"
        "def regression_one():\n"
        "    tilelang.testing.process_func(one.run_regression_perf, 'name', n=2 * 3, dtype=torch.float16)\n"
        "def regression_two():\n"
        "    tilelang.testing.process_func(two.run_regression_perf)\n"
    )
    assert measure.calls(tmp_path / "one.py") == [{"n": "2 * 3", "dtype": "torch.float16"}]
    assert measure.calls(tmp_path / "two.py") == [{}] == measure.calls(tmp_path / "none.py")
    seen: list[object] = []
    module = {"run_regression_perf": lambda n, dtype: seen.append((n, str(dtype)))}
    assert measure.of_program(module, tmp_path / "one.py", lambda **e: pytest.fail(str(e)))
    assert seen == [(6, "torch.float16")]
    assert not measure.of_program({}, tmp_path / "one.py", lambda **e: None)


def test_patterns_and_files_of_patterns(tmp_path: Path) -> None:
    found = [Program(p) for p in ("gemm/a.py", "gemm/b.py", "norm/c.py", "cast/d.py")]
    (tmp_path / "list").write_text("norm/*\n\n")
    picked = chosen_programs(["gemm/b*", f"@{tmp_path / 'list'}"], found)
    assert [p.path for p in picked] == ["gemm/b.py", "norm/c.py"]


@pytest.mark.parametrize("words", [["--no-compile"], ["--speed"], ["--device", "cpu", "--peer-site", "x"]])
def test_command_lines_that_say_nothing(words: list[str]) -> None:
    with pytest.raises(SystemExit):
        checked([".", *words])


def checkout(folder: Path) -> Path:
    """Three programs: one that is right, one that is not, one that never ends."""
    examples = folder / "checkout" / "examples"
    examples.mkdir(parents=True)
    (examples / "a.py").write_text(
        "import tilelang\nif __name__ == '__main__':\n    assert tilelang.__name__ == 'tilescale'\n"
    )
    (examples / "b.py").write_text("import tilelang\nif __name__ == '__main__':\n    assert False, 'wrong'\n")
    (examples / "c.py").write_text(
        "import tilelang\nimport time\nif __name__ == '__main__':\n    time.sleep(100)\n"
    )
    return folder / "checkout"


def runner(folder: Path, seconds: float) -> tuple[Runner, list[str]]:
    lines: list[str] = []
    (folder / "keep").mkdir(exist_ok=True)
    programs.copy(folder / "checkout", folder / "examples")
    made = Runner(folder / "keep", folder / "examples", folder / "originals", jobs=3)
    made.until, made.report = time.monotonic() + seconds, lines.append
    return made, lines


def test_a_run_that_is_cut_off_keeps_what_was_done(tmp_path: Path) -> None:
    found = programs.programs(checkout(tmp_path) / "examples")
    jobs = [Job(p, "cpu") for p in found]
    first, lines = runner(tmp_path, 30.0)
    first.report = lambda line: (
        lines.append(line),
        setattr(first, "until", 0.0) if len(lines) == 2 else None,
    )[0]
    first.run(jobs)
    assert {p for p, _ in first.results} == {"a.py", "b.py"}
    rows = rows_of(found, first.results, "compile", "cpu")
    assert [r["right"] for r in rows] == [True, False, None]
    assert rows[1]["error"] == "AssertionError: wrong"
    assert summary(rows) == "2 of 2 files imported, 1 of 2 programs right"
    assert table(rows, []).count("\n") == 5
    second, lines = runner(tmp_path, 30.0)
    second.limit = 0.5
    second.run(jobs)
    assert len(lines) == 1 and "c.py" in lines[0]  # the others were kept
    assert rows_of(found, second.results, "compile", "cpu")[2]["error"] == "not done after 0 s"
    assert not list((tmp_path / "keep").glob("*.events"))


def test_ratios_are_tilelang_s_time_by_ours() -> None:
    program = Program("a.py", ["kernel"])
    speed = {"kind": "speed", "kernels": ["kernel"]}
    done = [{"kind": "import", "error": None}, {"kind": "run", "error": None}]
    results = {
        ("a.py", "cuda"): done,
        ("a.py", "peer"): [*done[:1], {"kind": "run", "error": "AssertionError"}],
        ("a.py", "time"): [{**speed, "ms": 2.0}, {**speed, "ms": 1.0}],
        ("a.py", "peer-time"): [{**speed, "ms": 1.0}, {**speed, "ms": 3.0}],
    }
    (row,) = rows_of([program], results, "compile", "cuda")
    assert row["right"] and row["peer right"] is False
    assert "| yes | no | 2.0000 | 1.0000 | 0.500 |" in table([row], [])
    assert "2 figures beside TileLang's: median 1.750 of its speed, 1 below 0.95" in summary([row])


def test_what_is_recorded_is_cut_and_never_rounded_up() -> None:
    pair = {"kernels": ("f",), "ms": 3.0, "peer ms": 2.8499}
    rows = [
        {"file": "a.py", "right": True, "error": None, "pairs": [pair]},
        {"file": "b.py", "right": False, "error": "AssertionError: far\noff", "pairs": []},
        {"file": "c.py", "right": None, "error": None, "pairs": []},
    ]
    made = recorded(rows)
    assert (made["programs"], made["right"]) == (2, 1)
    assert made["not right"] == {"b.py": "AssertionError: far"}
    assert made["figures"]["a.py"][0]["TileLang / ours"] == made["median"] == 0.949
    assert (made["below 0.95"], made["of"]) == (1, 1)
