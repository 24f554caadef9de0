"""The documents can be read: lines of at most 110 columns, and no sentence of more than 40 words, outside of tables and code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

DOCS = sorted((Path(__file__).resolve().parents[2] / "docs").glob("*.md"))
COLUMNS, WORDS = 110, 40
_ITEM = re.compile(r"^\s*(?:[-*]|\d+\.) ")


def prose(text: str) -> Iterator[tuple[int, str]]:
    """Number and text of each line that is neither code nor a table's nor a heading."""
    code = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            code = not code
        elif not code and not line.startswith(("|", "#")):
            yield number, line


def sentences(text: str) -> Iterator[tuple[int, str]]:
    """Each sentence with the line at which its paragraph or its item of a list begins. What stands in backticks is one word."""
    first, last, held = 0, 0, ""
    for number, line in [*prose(text), (-1, "")]:
        if held and (not line.strip() or _ITEM.match(line) or number != last + 1):
            plain = re.sub(r"`[^`]*`", "code", held)
            yield from ((first, one) for one in re.split(r"(?<=[.!?])[)\"*]*\s+", plain))
            held = ""
        if line.strip():
            first, held = (first, f"{held} {line.strip()}") if held else (number, _ITEM.sub("", line))
        last = number


@pytest.mark.parametrize("path", DOCS, ids=lambda p: p.name)
def test_lines_are_short(path: Path):
    long = [
        f"{path.name}:{n}: {len(line)} columns" for n, line in prose(path.read_text()) if len(line) > COLUMNS
    ]
    assert not long, "\n".join(long)


@pytest.mark.parametrize("path", DOCS, ids=lambda p: p.name)
def test_sentences_are_short(path: Path):
    found = (
        (n, s, len([w for w in s.split() if re.search(r"\w", w)])) for n, s in sentences(path.read_text())
    )
    long = [f"{path.name}:{n}: {words} words: {s}" for n, s, words in found if words > WORDS]
    assert not long, "\n".join(long)


def test_the_splitter_finds_what_is_long():
    words = " ".join(["word"] * 41)
    text = f"Short. {words}.\n\n- {words}\n  more\n\n| {words} |\n\n```\n{words}\n```\n`{words}` one word.\n"
    assert [(n, len(s.split())) for n, s in sentences(text) if len(s.split()) > WORDS] == [(1, 41), (3, 42)]
    assert [n for n, line in prose(text) if len(line) > COLUMNS] == [1, 3, 11]
