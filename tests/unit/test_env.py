"""tilescale.env: read lazily, refused by name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tilescale import env
from tilescale.errors import TileValueError

ROOT = Path(__file__).resolve().parents[2]


def test_read_when_asked(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TILESCALE_WAIT_TIMEOUT", raising=False)
    assert env.WAIT_TIMEOUT.get() == 120.0
    monkeypatch.setenv("TILESCALE_WAIT_TIMEOUT", "2.5")
    assert env.WAIT_TIMEOUT.get() == 2.5
    monkeypatch.setenv("TILESCALE_WAIT_TIMEOUT", "")
    assert env.WAIT_TIMEOUT.get() == 120.0


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        ("64K", 64 << 10),
        ("64KiB", 64 << 10),
        ("512M", 512 << 20),
        ("1.5G", 3 << 29),
        ("2 gb", 2 << 30),
        ("1T", 1 << 40),
    ],
)
def test_sizes(text: str, size: int):
    assert env.HEAP_SIZE.get({"TILESCALE_HEAP_SIZE": text}) == size


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("WAIT_TIMEOUT", "soon"),
        ("WAIT_TIMEOUT", "0"),
        ("WAIT_TIMEOUT", "inf"),
        ("NUM_THREADS", "0"),
        ("NUM_THREADS", "two"),
        ("HEAP_SIZE", "12 potatoes"),
        ("HEAP_SIZE", "0"),
        ("LOG", "loud"),
        ("CC", "gcc 'unclosed"),
        ("JOB", "../x"),
        ("JOB", "a-b"),
    ],
)
def test_refused_by_name(name: str, text: str):
    with pytest.raises(TileValueError, match=re.escape(f"TILESCALE_{name} is {text!r}")) as caught:
        getattr(env, name).get({f"TILESCALE_{name}": text})
    assert "expected: " in str(caught.value)


def test_folders_and_commands(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert env.CACHE_DIR.get({}) == Path("/x/tilescale")
    assert env.CACHE_DIR.get({"TILESCALE_CACHE_DIR": "~/c"}) == Path.home() / "c"
    assert env.CC.get({"TILESCALE_CC": "ccache clang -m64"}) == ["ccache", "clang", "-m64"]
    assert env.LOG.get({"TILESCALE_LOG": "INFO"}) == "info"
    assert env.DUMP.get({}) is None


def test_misspelt_variables_are_found():
    assert env.unknown({"TILESCALE_WAIT": "1", "TILESCALE_LOG": "info", "PATH": ""}) == ["TILESCALE_WAIT"]


def test_all_lists_every_variable_and_nobody_reads_around_it():
    assert [var for var in vars(env).values() if isinstance(var, env.Var)] == list(env.ALL)
    known = {var.name for var in env.ALL}
    for folder in ("tilescale", "compiler", "comm", "launch"):
        for path in (ROOT / folder).rglob("*.py"):
            strangers = set(re.findall(r"TILESCALE_[A-Z_]+[A-Z]", path.read_text())) - known
            assert not strangers, f"{path}: {strangers} belong into tilescale/env.py"


def test_the_docs_have_the_table():
    docs = (ROOT / "docs" / "LANGUAGE.md").read_text()
    head = env.table().splitlines()[0]
    assert docs.count(head) == 1, "docs/LANGUAGE.md lacks the table of variables"
    found = docs[docs.index(head) :].partition("\n\n")[0]
    assert found == env.table(), "the docs say something else than tilescale/env.py: put env.table() there"
