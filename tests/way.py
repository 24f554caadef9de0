"""The way of one operation through the compiler, counted: ``python -m tests.way copy``, ``… gemm``;
``--list`` names each step.

A kernel with a pipelined product is compiled for sm_90a under `sys.setprofile`. A step of the way is a call
of a function of the compiler that is given the operation: an IR node whose place is the operation's line
(what a pass makes of it keeps its place), or a record that holds one. What is counted: the files and the
functions that the operation comes through, and how often the next step is in another file than the one
before.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from pathlib import Path
from typing import Any

import tilescale.language as T
from tilescale.compiler import driver

ROOT = Path(__file__).resolve().parents[1]


@T.prim_func
def product(
    A: T.Tensor((512, 512), "bfloat16"),
    B: T.Tensor((512, 512), "bfloat16"),
    C: T.Tensor((512, 512), "bfloat16"),
):
    with T.Kernel(4, 4, threads=256) as (bx, by):
        a, b = T.alloc_shared((128, 64), "bfloat16"), T.alloc_shared((64, 128), "bfloat16")
        c = T.alloc_fragment((128, 128), "float32")
        T.clear(c)
        for k in T.Pipelined(8, num_stages=4):
            T.copy(A[by * 128, k * 64], a)
            T.copy(B[k * 64, bx * 128], b)
            T.gemm(a, b, c)
        T.copy(c, C[by * 128, bx * 128])


#: which line of the kernel is followed
LINES = {"copy": "T.copy(A[", "gemm": "T.gemm(a, b, c)", "store": "T.copy(c, C["}


def line_of(what: str) -> int:
    lines, first = inspect.getsourcelines(sys.modules[__name__])
    return max(first, 1) + next(k for k, text in enumerate(lines) if text.strip().startswith(LINES[what]))


def steps(what: str) -> list[tuple[str, str]]:
    """(file, function) of every step of an operation's way."""
    line, found = line_of(what), []
    places: dict[int, bool] = {}
    kept: list[Any] = []  # so that no other object gets an id that was looked at

    def is_it(value: Any) -> bool:
        key = id(value)
        if key not in places:
            span = getattr(value, "span", None)
            kept.append(value)
            places[key] = (
                span is not None
                and getattr(span, "line", None) == line
                and str(span.source_name.name) == __file__
            )
        return places[key]

    def holds(value: Any) -> bool:
        module = type(value).__module__
        if module.startswith(("tvm", "tvm_ffi")):
            return is_it(value)
        if module.startswith("tilescale.compiler") and hasattr(value, "call"):
            return holds(value.call)
        return False

    def on(frame: Any, event: str, arg: Any) -> None:
        if (
            event != "call"
            or "/compiler/" not in frame.f_code.co_filename
            or not frame.f_code.co_filename.startswith(str(ROOT))
        ):
            return
        code = frame.f_code
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if code.co_name.startswith("<") or not any(holds(frame.f_locals.get(n)) for n in names):
            return
        found.append(
            (
                str(Path(code.co_filename).relative_to(ROOT)),
                code.co_qualname if sys.version_info >= (3, 11) else code.co_name,
            )
        )

    program = product.trace()
    driver.source_text(program, "cuda", "cuda:sm_90a")  # what is loaded or cached once is no step
    sys.setprofile(on)
    try:
        driver.source_text(product.trace(), "cuda", "cuda:sm_90a")
    finally:
        sys.setprofile(None)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=sorted(LINES))
    parser.add_argument("--list", action="store_true", help="name each step")
    options = parser.parse_args()
    way = steps(options.what)
    if options.list:
        print(*(f"{file}: {function}" for file, function in way), sep="\n")
    changes = sum(a[0] != b[0] for a, b in zip(way, way[1:], strict=False))
    print(
        f"{options.what}: {len({f for f, _ in way})} files, {len(set(way))} functions, {changes} changes of file, {len(way)} steps"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
