"""Measures a kernel and compares it with a reference, on inputs made from what its parameters declare."""

from __future__ import annotations

import enum
import inspect
import statistics
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

from tilescale import agree, compat, devices, log
from tilescale.arrays import numpy_dtype
from tilescale.device import RUN_HERE
from tilescale.errors import LaunchError, TileTypeError, TileValueError
from tilescale.explain import declaration, is_torch, place
from tilescale.launching import Launchable

#: TileLang's ways to take a time; here there is one, by the clock, of calls that end together
BACKENDS = ("event", "cupti", "cudagraph")
RETURN_MODES = ("median", "mean", "min", "max", "all")
#: A sample shorter than this says more about the clock than about the kernel: calls are timed together up to
#: it.
_SAMPLE_MS = 0.05
_GPU_SAMPLE_MS = 2.0
_MAX_SAMPLES = 10_000
#: rtol, atol and the share of elements that may differ, by default, of TileLang's `assert_allclose`: its
#: programs count as right by them
AS_TILELANG = 0.01
#: dtype → default rtol and atol of `compare`; integers and bool must be equal
TOLERANCES = {
    "float64": 1e-9,
    "float32": 1e-4,
    "float16": 1e-2,
    "bfloat16": 2e-2,
    "float8_e4m3fn": 1e-1,
    "float8_e5m2": 2e-1,
}


class TensorSupplyType(enum.Enum):
    """How inputs are filled, by TileLang's names: ``get_profiler(TensorSupplyType.Integer)`` or
    ``get_profiler("integer")``."""

    Auto = "auto"
    Normal = "normal"
    Randn = "randn"
    Uniform = "uniform"
    Integer = "integer"
    Zero = "zero"
    One = "one"


class Profiler:
    """What `Kernel.get_profiler` returns.

    Args:
        kernel: the kernel.
        tensor_supply: "auto" (default) and "uniform": floats in [-1, 1); "normal": of mean -1 and deviation
            1, as TileLang's Normal is; "randn": of mean 0; "integer": whole numbers from -2 to 2, whose sums
            are exact; "zero"; "one"; or a function that takes a parameter (a dict: name, kind, dtype, shape
            with every extent a number) and gives an argument. Integers are the same for all but the last
            three, from 0 to 2 where they have no sign.
        extents: T.dynamic extents and scalar parameters, by name (scalars are 1 otherwise).

    Raises:
        TileValueError: an extent that is unknown; one that is missing where inputs are asked for.
    """

    def __init__(self, kernel: Launchable, tensor_supply: Any = None, extents: dict[str, Any] | None = None):
        self.kernel = kernel
        self.supply = (
            tensor_supply.value if isinstance(tensor_supply, TensorSupplyType) else tensor_supply or "auto"
        )
        if not callable(self.supply) and self.supply not in {t.value for t in TensorSupplyType}:
            raise TileValueError(
                f"tensor_supply={tensor_supply!r}",
                expected=", ".join(t.value for t in TensorSupplyType) + " or a function",
            )
        self.extents = dict(extents or {})
        symbols = kernel.symbols
        scalars = [p["name"] for p in kernel.params if p["kind"] == "scalar"]
        for name in self.extents:
            if name not in symbols and name not in scalars:
                raise TileValueError(
                    f"{kernel.name} has no T.dynamic({name!r})",
                    expected=", ".join([*symbols, *scalars]) or "no extents",
                )
        for name, value in self.extents.items():
            if name in symbols and (not hasattr(value, "__index__") or value < 0):
                raise TileValueError(
                    f"{kernel.name} has no inputs with {name}={value!r}",
                    expected="a number of elements, 0 or more",
                )
        #: Whether the kernel talks to other ranks, so that all of them must call it equally often.
        self.collective: bool = kernel.collective

    # -- inputs
    # ---------------------------------------------------------------------------------------------------
    def inputs(self) -> list[Any]:
        """New arguments for one call, the same ones each time: torch tensors where torch is loaded, NumPy
        arrays otherwise, symmetric ones in this rank's heap (then this is collective)."""
        return [self._argument(p) for p in self._concrete() if not p["allocated"]]

    def _concrete(self) -> list[dict[str, Any]]:
        """The parameters with every extent a number.

        Raises:
            TileValueError: an extent is missing.
        """
        missing = [name for name in self.kernel.symbols if name not in self.extents]
        if missing:
            raise TileValueError(
                f"{self.kernel.name} has dynamic extents, and nothing says what {', '.join(missing)} "
                f"{'is' if len(missing) == 1 else 'are'}",
                hint=f"kernel.get_profiler({', '.join(f'{m}=1024' for m in missing)})",
            )
        out = []
        for k, p in enumerate(self.kernel.params):
            made = {**p, "allocated": k in self.kernel.out_idx}
            for key in ("shape", "strides"):
                if p.get(key) is not None:
                    made[key] = tuple(self._value(e) for e in p[key])
            out.append(made)
        return out

    def _value(self, e: Any) -> int:
        if isinstance(e, list):
            from tilescale.language.symbolic import FOLD

            return int(FOLD[e[0]](self._value(e[1]), self._value(e[2])))
        return int(self.extents[e]) if isinstance(e, str) else int(e)

    def _argument(self, p: dict[str, Any]) -> Any:
        if callable(self.supply):
            return self.supply(p)
        if p["kind"] == "scalar":
            value = self.extents.get(p["name"], 1)
            return float(value) if "float" in p["dtype"] else int(value)
        if p["kind"] == "signal":
            from tilescale import comm

            return comm.signals(p["shape"])
        if p["kind"] == "packets":
            from tilescale import comm

            return comm.zeros(p["shape"], "int64")
        values = self._filled(p)
        if p["kind"] == "symm":
            from tilescale import comm

            held = comm.empty(p["shape"], p["dtype"], like="torch" if is_torch(values) else "numpy")
            held[...] = values
            return held
        return values

    def _filled(self, p: dict[str, Any]) -> Any:
        """An array of the parameter's dtype, shape and strides. A parameter's name seeds it, so that inputs
        do not depend on one another or on the process."""
        import numpy

        rng = numpy.random.default_rng(zlib.crc32(p["name"].encode()))
        shape, dtype = p["shape"], p["dtype"]
        if self.supply in ("zero", "one"):
            flat = numpy.full(shape, float(self.supply == "one"))
        elif dtype == "bool":
            flat = rng.integers(0, 2, shape)
        elif self.supply == "integer" or "int" in dtype:
            flat = rng.integers(0 if dtype.startswith("uint") else -2, 3, shape)
        elif self.supply in ("auto", "uniform"):
            flat = rng.uniform(-1, 1, shape)
        else:
            flat = rng.standard_normal(shape, "float32") - (self.supply == "normal")
        torch = sys.modules.get("torch")
        if torch is not None:
            if self.kernel.device.gpu and not torch.cuda.is_available():
                raise LaunchError(
                    f"{self.kernel.name} takes tensors on a GPU, and torch finds none on this machine",
                    loc=place(self.kernel._meta["loc"]),
                    hint=RUN_HERE,
                )
            made = (
                torch.from_numpy(numpy.asarray(flat)).to(getattr(torch, dtype)).to(self.kernel.device.memory)
            )
            if p["strides"] is not None:
                made = torch.empty_strided(shape, p["strides"], dtype=made.dtype, device=made.device).copy_(
                    made
                )
            return made
        array = numpy.asarray(flat).astype(numpy_dtype(dtype))
        if p["strides"] is not None:
            extent = 1 + sum((n - 1) * s for n, s in zip(shape, p["strides"], strict=True))
            held = numpy.empty(extent, array.dtype)
            strided = numpy.lib.stride_tricks.as_strided(
                held, shape, [s * array.itemsize for s in p["strides"]]
            )
            strided[...] = array
            return strided
        return array

    # -- time
    # -----------------------------------------------------------------------------------------------------
    def do_bench(
        self,
        fn: Callable[..., Any] | None = None,
        warmup: float = 25,
        rep: float = 100,
        n_warmup: int = 0,
        n_repeat: int = 0,
        input_tensors: Sequence[Any] | None = None,
        backend: str | None = None,
        quantiles: Sequence[float] | None = None,
        return_mode: str = "median",
        dynamic_symbolic_constraints: dict[str, int] | None = None,
        *,
        args: Sequence[Any] | None = None,
        func: Callable[..., Any] | None = None,
        device: Any = None,
        early_stop_baseline: float | None = None,
    ) -> Any:
        """Milliseconds a call takes, as the median of calls over about ``rep`` milliseconds, after ``warmup``
        milliseconds.

        Args:
            fn: what to measure instead of the kernel, called with the same inputs (or with none, if it takes
                none).
            return_mode: "median", "mean", "min", "max", or "all" for the list of samples. args: inputs
                instead of `inputs`; input_tensors: TileLang's word for it.
            n_warmup, n_repeat, quantiles, backend, device, early_stop_baseline: see :func:`do_bench`.
            dynamic_symbolic_constraints: T.dynamic extents that nothing has said. func: TileLang's word for
                ``fn``.

        Kernels that talk to other ranks run equally often on all of them; each rank returns its own time.
        """
        _check_mode(return_mode)
        _check_backend(backend)
        compat.unused("do_bench", {"device": device, "early_stop_baseline": early_stop_baseline})
        if dynamic_symbolic_constraints:
            self = Profiler(self.kernel, self.supply, {**self.extents, **dynamic_symbolic_constraints})
        args, fn = input_tensors if args is None else args, func if fn is None else fn
        given = list(self.inputs() if args is None else args)
        call = self.kernel if fn is None else fn
        if fn is not None and _takes(fn, 0) and not _takes(fn, len(given)):
            given = []
        if self.kernel.device.simulated and fn is None:
            log.say(
                "warning", f"{self.kernel.name}: the time is that of the simulator, of one call", once=True
            )
            start = time.perf_counter()
            call(*given)
            return _summary([(time.perf_counter() - start) * 1e3], return_mode, quantiles)
        samples = measure(
            lambda: call(*given), warmup, rep, self.agreed if self.collective else max, n_warmup, n_repeat
        )
        return _summary(samples, return_mode, quantiles)

    @property
    def func(self) -> Launchable:
        """The kernel, by TileLang's name."""
        return self.kernel

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """A call of the kernel."""
        return self.kernel(*args, **kwargs)

    def run_once(self, fn: Callable[..., Any] | None = None) -> Any:
        """What the kernel, or ``fn``, gives for new inputs."""
        return (self.kernel if fn is None else fn)(*self.inputs())

    def assert_consistent(self, repeat: int = 10) -> None:
        """Calls the kernel so many times on one input and compares what it gives with the first time.

        Raises:
            AssertionError: they differ.
        """
        given = self.inputs()
        first = self.kernel(*[_copy(a) for a in given])
        for _ in range(repeat):
            again = self.kernel(*[_copy(a) for a in given])
            for got, want in zip(_listed(again), _listed(first), strict=True):
                compare(f"{self.kernel.name}, called again", got, want, 1e-5, 1e-8, 0.0)

    def manual_assert_close(
        self,
        reference_program: Callable[..., Any],
        input_tensors: Sequence[Any] | None = None,
        manual_check_prog: Callable[[list[Any], list[Any]], Any] | None = None,
    ) -> None:
        """Gives the lists of what the kernel and the reference return for the same inputs to
        ``manual_check_prog``, which judges them.

        Raises:
            TileTypeError: there is none.
        """
        if manual_check_prog is None:
            raise TileTypeError("manual_assert_close without manual_check_prog", expected="what compares")
        given = self.inputs() if input_tensors is None else list(input_tensors)
        wanted = _listed(reference_program(*[_copy(a) for a in given]))
        manual_check_prog(_listed(self.kernel(*given)), wanted)

    @staticmethod
    def agreed(values: Sequence[float]) -> float:
        """The largest of what all ranks gave."""
        return agree.largest(values)[0]

    # -- comparison
    # -----------------------------------------------------------------------------------------------
    def assert_allclose(
        self,
        reference: Callable[..., Any],
        *,
        rtol: float | None = None,
        atol: float | None = None,
        max_mismatched_ratio: float | None = None,
        input_tensors: Sequence[Any] | None = None,
    ) -> None:
        """Runs the kernel and ``reference`` on the same inputs and compares what they give.

        ``reference`` takes all arguments of a call, or only those that the kernel merely reads. It returns
        what the kernel returns, or, where the kernel returns nothing, what it writes, in the order of the
        parameters; if it returns None, it has written its own arguments in place. ``rtol``, ``atol``: 0.01 of
        floats by default (of 8 bits by their dtype), as in TileLang; integers must be equal.
        ``max_mismatched_ratio``: the share of elements that may differ by more, a hundredth of floats by
        default. ``input_tensors``: instead of `inputs`.

        Raises:
            AssertionError: they differ; says where most.
        """
        kernel = self.kernel
        given = self.inputs() if input_tensors is None else list(input_tensors)
        fresh = [_copy(a) for a in given]
        result = kernel(*given)
        inputs = [kernel.params[k] for k in range(len(kernel.params)) if k not in kernel.out_idx]
        written = [k for k, p in enumerate(inputs) if p.get("written") and p["kind"] in ("tensor", "symm")]
        names = [inputs[k]["name"] for k in written]
        found = [given[k] for k in written]
        if result is not None:
            found = list(result) if isinstance(result, tuple) else [result]
            names = [f"result {k}" for k in range(len(found))] if len(found) > 1 else ["the result"]
        only_read = [a for k, a in enumerate(fresh) if not inputs[k].get("written")]
        if not _takes(reference, len(fresh)) and not _takes(reference, len(only_read)):
            raise TileTypeError(
                f"the reference of {kernel.name} takes neither {len(fresh)} arguments (all) nor "
                f"{len(only_read)} (those only read)",
                loc=place(kernel._meta["loc"]),
                expected=", ".join(f"{p['name']}: {declaration(p)}" for p in inputs),
            )
        wanted = reference(*(fresh if _takes(reference, len(fresh)) else only_read))
        if wanted is None:
            wanted = [fresh[k] for k in written]
        wanted = list(wanted) if isinstance(wanted, (tuple, list)) else [wanted]
        if len(wanted) != len(found):
            raise AssertionError(f"{kernel.name} gives {len(found)} tensors, the reference {len(wanted)}")
        for name, got, want in zip(names, found, wanted, strict=True):
            dtype = str(getattr(got, "dtype", "")).removeprefix("torch.")
            most = max(TOLERANCES.get(dtype, 0.0), AS_TILELANG if dtype in TOLERANCES else 0.0)
            ratio = max_mismatched_ratio
            if ratio is None:
                ratio = AS_TILELANG if dtype in TOLERANCES else 0.0
            compare(
                f"{kernel.name}: {name}",
                got,
                want,
                most if rtol is None else rtol,
                most if atol is None else atol,
                ratio,
            )


def _listed(result: Any) -> list[Any]:
    if result is None:
        return []
    return list(result) if isinstance(result, (tuple, list)) else [result]


def _check_mode(return_mode: str) -> None:
    if return_mode not in RETURN_MODES:
        raise TileValueError(f"return_mode={return_mode!r}", expected="one of " + ", ".join(RETURN_MODES))


def _check_backend(backend: str | None) -> None:
    """TileLang's word for how time is taken; here it is one way, which the log says."""
    if backend is not None and backend not in BACKENDS:
        raise TileValueError(f"backend={backend!r}", expected="one of " + ", ".join(BACKENDS))
    compat.unused("do_bench", {"backend": backend})


def _summary(samples: list[float], return_mode: str, quantiles: Sequence[float] | None = None) -> Any:
    if quantiles is not None:
        ordered = sorted(samples)
        found = [ordered[round(q * (len(ordered) - 1))] for q in quantiles]
        return found[0] if len(found) == 1 else found
    if return_mode == "all":
        return samples
    pick: dict[str, Callable[[list[float]], float]] = {
        "median": statistics.median, "mean": statistics.fmean, "min": min, "max": max,
    }  # fmt: skip
    return pick[return_mode](samples)


def do_bench(
    fn: Callable[[], Any],
    warmup: float = 25,
    rep: float = 100,
    return_mode: str = "median",
    *,
    _n_warmup: int = 0,
    _n_repeat: int = 0,
    quantiles: Sequence[float] | None = None,
    backend: str | None = None,
    fast_flush: bool | None = None,
    cache_size: int | None = None,
    device: Any = None,
    early_stop_baseline: float | None = None,
) -> Any:
    """Milliseconds that ``fn()`` takes, as the median of calls over about ``rep`` milliseconds, after
    ``warmup`` milliseconds.

    Args:
        _n_warmup, _n_repeat: so many calls and samples instead, where not 0.
        quantiles: what is returned instead, between 0 and 1: a number for one, a list for more.
        backend, fast_flush, cache_size, device, early_stop_baseline: TileLang's words; they decide nothing,
        and
            the cache is as the calls leave it.

    Raises:
        TileValueError: a ``return_mode`` other than median, mean, min, max, all; an unknown ``backend``.
    """
    _check_mode(return_mode)
    _check_backend(backend)
    words = {
        "fast_flush": fast_flush,
        "cache_size": cache_size,
        "device": device,
        "early_stop_baseline": early_stop_baseline,
    }
    compat.unused("do_bench", words)
    return _summary(measure(fn, warmup, rep, max, _n_warmup, _n_repeat), return_mode, quantiles)


def measure(
    call: Callable[[], Any],
    warmup: float,
    rep: float,
    agree: Callable[[Sequence[float]], float] = max,
    n_warmup: int = 0,
    n_repeat: int = 0,
) -> list[float]:
    """Samples of a call's milliseconds. ``agree`` makes one number of several ranks' estimates, so that all
    run equally often. ``n_warmup`` and ``n_repeat``: so many calls and samples instead of milliseconds.

    Calls that only put work on a GPU are timed until it is done, many together, so that awaiting the last
    costs little.
    """
    call()
    finish = devices.awaiting() or _nothing
    finish()
    start = time.perf_counter()
    for _ in range(3):
        call()
    finish()
    estimate = agree([max((time.perf_counter() - start) / 3 * 1e3, 1e-4)])
    together = max(1, min(1000, round((_SAMPLE_MS if finish is _nothing else _GPU_SAMPLE_MS) / estimate)))
    for _ in range(n_warmup or (round(warmup / estimate) if warmup > 4 * estimate else 0)):
        call()
    finish()
    samples = []
    for _ in range(n_repeat or max(3, min(_MAX_SAMPLES, round(rep / (estimate * together))))):
        start = time.perf_counter()
        for _ in range(together):
            call()
        finish()
        samples.append((time.perf_counter() - start) / together * 1e3)
    return samples


def _nothing() -> None:
    pass


def _takes(fn: Callable[..., Any], count: int) -> bool:
    """Whether a function can be called with so many arguments by position; builtins that do not say can."""
    try:
        signature = inspect.signature(fn)
    except ValueError:
        return True
    try:
        signature.bind(*[None] * count)
    except TypeError:
        return False
    return True


def _copy(value: Any) -> Any:
    if is_torch(value):
        return value.clone()
    return value.copy() if hasattr(value, "copy") else value


def as_float64(value: Any) -> Any:
    """A tensor as a NumPy array of float64, integers as they are."""
    import numpy

    if is_torch(value):
        torch = sys.modules["torch"]
        value = (
            (value.detach().to(torch.float64) if value.is_floating_point() else value.detach()).cpu().numpy()
        )
    array = numpy.asarray(value)
    return array if array.dtype.kind in "iub" else array.astype(numpy.float64)


def compare(
    what: str, got: Any, want: Any, rtol: float | None = None, atol: float | None = None, ratio: float = 0.0
) -> None:
    """AssertionError where two tensors differ by more than ``atol + rtol * |want|``; infinities and NaNs must
    be in the same places. The share ``ratio`` of the elements may."""
    import numpy

    dtype = str(getattr(got, "dtype", "")).removeprefix("torch.")
    default = TOLERANCES.get(dtype, 0.0)
    rtol, atol = default if rtol is None else rtol, default if atol is None else atol
    a, b = as_float64(got), as_float64(want)
    if a.shape != b.shape:
        raise AssertionError(f"{what} has shape {a.shape}, the reference's {b.shape}")
    # Float64 would not tell large ones apart.
    whole = a.dtype.kind in "iub" and b.dtype.kind in "iub" and rtol == atol == 0
    close = a == b if whole else numpy.isclose(a, b, rtol=rtol, atol=atol, equal_nan=True)
    if int((~close).sum()) <= int(ratio * close.size):
        return
    with numpy.errstate(invalid="ignore"):  # inf - inf
        off = numpy.where(close, 0.0, numpy.nan_to_num(numpy.abs(a.astype(numpy.float64) - b), nan=numpy.inf))
    worst = numpy.unravel_index(int(off.argmax()), off.shape)
    at = tuple(int(i) for i in worst)
    raise AssertionError(
        f"{what} differs from the reference in {int((~close).sum())} of {close.size} elements (rtol "
        f"{rtol:g}, atol {atol:g}); "
        f"most at {list(at)}: {a[at]!s}, expected {b[at]!s}"
    )
