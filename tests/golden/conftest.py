"""Golden tests compare printed IR with the files beside them; ``pytest tests/golden --renew-golden`` writes
them anew, to be reviewed in the diff."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--renew-golden", action="store_true", help="write the golden files instead of comparing with them"
    )


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """``golden(name, text)``: the text is what tests/golden/<name> holds."""

    def check(name: str, text: str) -> None:
        path, text = HERE / name, text.rstrip() + "\n"
        if request.config.getoption("--renew-golden", default=False):
            path.write_text(text)
            return
        if not path.exists():
            pytest.fail(f"{path} is missing: pytest tests/golden --renew-golden")
        want = path.read_text()
        if text != want:
            diff = "".join(
                difflib.unified_diff(
                    want.splitlines(True), text.splitlines(True), f"{name} (golden)", f"{name} (now)"
                )
            )
            pytest.fail(f"{diff}\nIf this is meant: pytest tests/golden --renew-golden, and review the diff.")

    return check
