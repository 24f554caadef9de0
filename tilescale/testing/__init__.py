"""A pytest plugin: the fixture ``ranks``, with which one test body runs on simulated ranks and on processes.

    def test_ring(ranks):
        arrays = ranks(4).run(ring(1024), {"A": lambda rank: numpy.full(1024, rank, "float32")})
        assert (arrays[1]["B"] == 0).all()

    pytest                 # on the simulator: every race, deadlock, read of unwritten memory … fails the
    test, by name and line pytest --target cpu    # for real: one process a rank

Installed with tilescale (the entry point ``pytest11``); in a plain checkout tests/conftest.py names it in
``pytest_plugins``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tilescale.errors import FindingError, TileTypeError
from tilescale.jit import compile
from tilescale.kernel import Kernel
from tilescale.language.funcs import PrimFunc

TARGETS = ("sim", "cpu")
_MARKS = (
    "main", "requires_cuda", "requires_cuda_compute_version", "requires_cuda_compute_version_eq",
    "requires_cuda_compute_version_ge", "requires_cuda_compute_version_gt",
    "requires_cuda_compute_version_le",
    "requires_cuda_compute_version_lt", "requires_cuda_or_cdna", "requires_cdna", "requires_gfx950",
    "requires_metal", "requires_package", "requires_rocm", "set_random_seed", "torch_assert_close",
)  # fmt: skip


def __getattr__(name: str) -> Any:
    """TileLang's names (marks.py), loaded when they are asked for."""
    if name not in _MARKS:
        raise AttributeError(f"module 'tilescale.testing' has no attribute {name!r}")
    from tilescale.testing import marks

    return getattr(marks, name)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tilescale")
    group.addoption(
        "--target",
        choices=TARGETS,
        default="sim",
        help="what the fixture `ranks` runs on: the simulator, or processes (default: sim)",
    )


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Iterator[Callable[..., Ranks]]:
    """``ranks(n)``: n ranks, simulated ones or, with ``--target cpu``, processes. ``ranks(n, target="cpu")``
    whatever the option says."""
    chosen: str = request.config.getoption("--target")

    def make(n: int, *, target: str | None = None) -> Ranks:
        return Ranks(n, target or chosen)

    yield make


class Ranks:
    """``n`` ranks to run kernels and functions on.

    Attributes:
        target: "sim" or "cpu", for tests that have to know.
    """

    def __init__(self, n: int, target: str):
        if target not in TARGETS:
            raise ValueError(f"target {target!r} is none of {', '.join(TARGETS)}")
        self.n, self.target = n, target

    def run(
        self,
        kernel: Any,
        args: dict[str, Any] | None = None,
        *,
        schedule: str = "adversary",
        seeds: int = 3,
        timeout: float = 60.0,
    ) -> list[dict[str, Any]]:
        """One launch of a kernel on every rank.

        Args:
            kernel: a ``@T.prim_func``, or what ``@tilescale.jit`` and ``tilescale.compile`` give.
            args: by parameter name a tensor (torch's, NumPy's) or a number for all ranks, a list of one a
                rank, or a function of the rank. Tensors are copied. Symmetric ones and signals are plain
                arrays here. A NumPy masked array says which elements nobody has written. What is left out:
                signals are zero, tensors that the kernel only reads are random numbers of the rank, all
                others are unwritten memory.
            schedule, seeds: what else is run on the simulator to find faults, beside one run in turn.
                timeout: of processes, in seconds.

        Returns:
            for each rank its tensors as the launch left them, by parameter, as NumPy arrays.

        Raises:
            FindingError: something is wrong with the kernel (on the simulator). RanksFailed: a rank failed
            (processes).
        """
        from tilescale.arrays import arguments
        from tilescale.compiler.checks.run import Launch, each_rank
        from tilescale.compiler.passes.pipeline import tile_level
        from tilescale.compiler.sim.prepare import prepare

        __tracebackhide__ = True  # a failure shows the test's line and the finding
        given = each_rank(arguments(args or {}), self.n)
        launch = Launch(prepare(tile_level(_program(kernel))), given)
        if self.target == "cpu":
            from tilescale.testing.processes import run_ranks

            compiled = _compiled(kernel)
            return run_ranks(self.n, lambda: _launch(compiled, launch), timeout=timeout)
        done = launch.run()
        if done.report:
            launch.explore(schedule, seeds, done.report)
        if not done.report:
            raise FindingError(done.report)
        return done.arrays

    def call(
        self,
        fn: Callable[..., Any],
        *args: Any,
        schedule: str = "adversary",
        seeds: int = 3,
        timeout: float = 60.0,
    ) -> list[Any]:
        """``fn(*args)`` on every rank, a program of its own that uses tilescale.comm and calls kernels; its
        results in rank order.

        On the simulator ranks are threads of this process that take turns: what is global (modules, the
        environment) they share. The arguments schedule, seeds and timeout are those of :meth:`run`.

        Raises:
            FindingError: something is wrong with a kernel that was launched, or with how ranks launch. What
            the first rank that failed raised (on processes RanksFailed, with everyone's).
        """
        __tracebackhide__ = True
        if self.target == "cpu":
            from tilescale.testing.processes import run_ranks

            return run_ranks(self.n, fn, *args, timeout=timeout)
        from tilescale import simulator

        checking = simulator.Checking(schedule, seeds)
        endings = simulator.world(self.n, checking).run(lambda rank: fn(*args))
        if not checking.report:
            raise FindingError(checking.report)
        for ending in endings:
            if ending.told is not None:
                assert ending.error is not None
                raise ending.error
        return [ending.value for ending in endings]


def _program(kernel: Any) -> Any:
    if isinstance(kernel, Kernel):
        return kernel.program()
    if hasattr(kernel, "trace") or hasattr(kernel, "schedule"):
        return kernel
    raise TileTypeError(
        f"ranks(n).run takes a kernel, and this is a {type(kernel).__name__}",
        expected="a @T.prim_func or a Kernel",
    )


def _compiled(kernel: Any) -> Kernel:
    made = compile(kernel, target="cpu") if isinstance(kernel, PrimFunc) else kernel
    if made.target != "cpu":
        raise TileTypeError(
            f"{made.name} is compiled for the target {made.target}, and --target is cpu", hint='target="auto"'
        )
    return made


def _launch(kernel: Kernel, launch: Any) -> dict[str, Any]:
    """This process's part of a launch, from the arguments that the simulator would begin with."""
    import numpy

    from tilescale import comm

    comm.init()
    bound = launch.bound[comm.rank()]
    given: dict[str, Any] = {}
    for p in kernel.params:
        name = p["name"]
        if p["kind"] == "scalar":
            given[name] = bound.numbers[name]
            continue
        values = bound.arrays[name]
        if p["kind"] == "tensor":
            given[name] = values.copy()
        elif p["kind"] in ("signal", "packets"):
            given[name] = comm.signals(values.shape, like="numpy")
            given[name][...] = values
        else:
            given[name] = comm.empty(values.shape, p["dtype"], like="numpy")
            given[name][...] = values
    if any(p["kind"] == "packets" for p in kernel.params):
        comm.barrier()  # their launches may begin on one rank while another one still fills its box
    outputs = kernel(**{name: given[name] for name in kernel.inputs})
    for k, value in zip(kernel.out_idx, outputs if isinstance(outputs, tuple) else (outputs,), strict=False):
        given[kernel.params[k]["name"]] = numpy.asarray(value)
    return {p["name"]: numpy.array(given[p["name"]]) for p in kernel.params if p["kind"] != "scalar"}
