"""docs/ARCHITECTURE.md says what is so: its texts of a kernel, its table of passes, the paths that it names."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest

from tests.way import product
from tilescale.compiler import driver
from tilescale.compiler.ir import spec
from tilescale.compiler.passes.pipeline import GPU_PASSES, LOWERED, PASSES

ROOT = Path(__file__).resolve().parents[2]
DOC = (ROOT / "docs" / "ARCHITECTURE.md").read_text()
SHOWN = dict(re.findall(r"^```\w+ step=(\w+)\n(.*?)^```", DOC, re.MULTILINE | re.DOTALL))
GAP = "…"


@functools.cache
def texts() -> dict[str, str]:
    """What the compiler makes of the kernel: its source, the text behind every pass, the printed CUDA."""
    program = product.trace()
    made = dict(driver.steps(program, "cuda:sm_90a"))
    way = (ROOT / "tests" / "way.py").read_text()
    made["source"] = way[way.index("@T.prim_func") : way.index("\n\n\n", way.index("@T.prim_func"))]
    made["cuda"] = driver.source_text(program, "cuda", "cuda:sm_90a")
    return made


def missing(shown: str, text: str) -> str | None:
    """The first lines of ``shown`` that do not follow in ``text``; None if all do. A line of `GAP` alone stands for any number of lines,
    within a line it stands for any characters; lines without a gap between them follow each other."""
    lines, at = text.splitlines(), 0
    for k, part in enumerate(re.split(rf"^\s*{GAP}\n", shown, flags=re.MULTILINE)):
        wanted = [".*".join(map(re.escape, line.split(GAP))) for line in part.splitlines()]
        places = range(at, len(lines) - len(wanted) + 1) if k else [0]
        fits = (
            p
            for p in places
            if all(re.fullmatch(w, line) for w, line in zip(wanted, lines[p:], strict=False))
        )
        if (found := next(fits, None)) is None:
            return part
        at = found + len(wanted)
    return None


def test_all_levels_are_shown():
    assert list(SHOWN) == ["source", "trace", "schedule", GPU_PASSES[-1].name, "cuda"]


@pytest.mark.parametrize("step", SHOWN)
def test_texts_are_what_the_compiler_makes(step: str):
    part = missing(SHOWN[step] if step != "cuda" else f"{GAP}\n{SHOWN[step]}", texts()[step])
    assert part is None, (
        f"not in the text of {step}, or not in this order:\n{part}\nThe text:\n{texts()[step]}"
    )


def test_a_difference_is_found():
    text = "one\ntwo(1)\nthree\nfour\n"
    assert missing("one\n…\nthree\nfour\n", text) is None and missing("one\ntwo(…)\n", text) is None
    assert (
        missing("two(…)\n", text) and missing("one\nthree\n", text) and missing("one\n…\nfour\nthree\n", text)
    )


def test_the_table_of_passes_is_the_list():
    """Every pass with its level, whom it is for and whether it is optional; in both lists' orders."""
    rows = [
        tuple(cell.strip() for cell in row)
        for row in re.findall(r"^\| `(\w+)` \| (\w+) \| ([\w, ]+) \|", DOC, re.MULTILINE)
    ]
    for target, passes in (("cpu", PASSES), ("gpu", GPU_PASSES)):
        own = [
            (n, level, "optional" in whom) for n, level, whom in rows if whom.split(",")[0] in ("all", target)
        ]
        want = [(p.name, p.level, p.optional) for p in passes]
        assert own == want, target
    assert all(f"`{name}`" in DOC for name in LOWERED)


def test_levels_are_those_of_the_table():
    assert re.findall(r"^\| (tile|scheduled|thread) \| [^|]+ \| [^|]+ \|$", DOC, re.MULTILINE) == [
        spec.TILE,
        spec.SCHEDULED,
        spec.THREAD,
    ]


@pytest.mark.parametrize("name", ["ARCHITECTURE.md", "RUNTIME.md"])
def test_named_files_are_there(name: str):
    """Paths from the root, or from compiler/ or tilescale/, with an ending or a folder's slash; NAME is anybody's."""
    prose = re.sub(r"^```.*?^```", "", (ROOT / "docs" / name).read_text(), flags=re.MULTILINE | re.DOTALL)
    named = set(re.findall(r"(?<![\w/.-])((?:[\w-]+/)+(?:[\w-]+\.(?:py|c|h|cuh|md))?)(?![\w/])", prose))
    homes = [ROOT, ROOT / "compiler", ROOT / "tilescale", ROOT / "compiler" / "cuda"]
    gone = [p for p in sorted(named) if "NAME" not in p and not any((h / p).exists() for h in homes)]
    assert not gone
    assert len(named) > 10
