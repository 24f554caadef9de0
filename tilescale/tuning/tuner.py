"""Measures a kernel's configurations one after the other and remembers the winner, in this process and on
disk."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tilescale import advice, agree, devices, env, folders, log
from tilescale.compat import unused
from tilescale.devices import resolve_target
from tilescale.errors import TileError, TileTypeError, TileValueError
from tilescale.jit import Factory
from tilescale.jitted import Jit, frozen, loc_of

if TYPE_CHECKING:
    from tilescale.kernel import Kernel
    from tilescale.profiler import Profiler

Config = dict[str, Any]


@dataclass
class Trial:
    """One configuration: its milliseconds a call (the slowest rank's), or what was wrong with it; with
    ``autotune(top=…)`` also the milliseconds that were predicted. Neither latency nor error: it was not
    tried, since others promised more."""

    config: Config
    latency: float | None = None
    error: str | None = None
    predicted: float | None = None


def autotune(
    func: Any = None,
    *,
    configs: Iterable[Config] | Config | Callable[..., Iterable[Config]] | None = None,
    warmup: float = 25,
    rep: float = 100,
    ref_prog: Callable[..., Any] | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    tensor_supply: Any = None,
    extents: dict[str, Any] | None = None,
    top: int | None = None,
    by: str = "shape",
    supply_type: Any = None,
    supply_prog: Callable[..., Any] | None = None,
    skip_check: bool = False,
    manual_check_prog: Callable[..., Any] | None = None,
    max_mismatched_ratio: float | None = None,
    timeout: Any = None,
    cache_input_tensors: Any = None,
    do_not_specialize: Any = None,
    early_stop: Any = None,
    early_stop_factor: Any = None,
) -> Any:
    """Above ``@tilescale.jit``: a call that leaves the tuned parameters out tries all configurations and
    keeps the fastest.

        @tilescale.autotune(configs=[{"block_M": 64}, {"block_M": 128}])
        @tilescale.jit
        def matmul(M, N, K, block_M=64): ...

        kernel = matmul(1024, 1024, 1024)    # kernel.config, kernel.latency

    A factory gives the fastest kernel; an eager kernel is tuned on copies of the first arguments of their
    kind, then runs. The choice is kept on disk. With several ranks all tune together (a call is collective),
    each configuration counts by its slowest rank, and all keep the same one. A configuration that is refused,
    fails or is wrong is skipped and said; `Autotuned.trials` has them all.

    Args:
        configs: a list of keyword arguments; or parameter → list of values, for every combination; or a
            function that the call's arguments are given to and that returns a list.
        warmup, rep: milliseconds of each measurement, as in `Profiler.do_bench`. ref_prog, rtol, atol: a
        reference that every configuration must agree with, as in `Profiler.assert_allclose`. tensor_supply,
        extents: inputs of a factory's kernels, as in `Kernel.get_profiler`.
        top: measure only so many, those of which the cost model (tilescale/tuning/cost.py) predicts the least
            time; ten of thousands is what it is for. On targets that it knows no figures of all are measured,
            which is said.
        by: "shape" makes a choice for every call that differs; "class" one for all whose integers and
            tensors' extents lie between the same powers of two (those up to 16 stay themselves), so that a
            choice serves its neighbours.
        supply_type: TileLang's word for ``tensor_supply``. supply_prog: a function from a factory's
        parameters
            (a list of dicts, see `Kernel.get_profiler`) to the list of their inputs.
        skip_check: leave out the comparison with ``ref_prog``. manual_check_prog: compares instead: it is
        given
            the list of the kernel's results and that of the reference's. max_mismatched_ratio: the share of
            elements that may differ.
        timeout, cache_input_tensors, do_not_specialize, early_stop, early_stop_factor: TileLang's words for
        how
            its tuner works; they decide nothing, which the log says.

    Raises (calls):
        TileTypeError: a configuration names no parameter. TileError: no configuration works.
    """
    if func is not None and not isinstance(func, Jit):
        if callable(func) and configs is not None:
            raise TileTypeError(
                "@tilescale.autotune stands above a plain function", hint="@tilescale.jit between the two"
            )
        configs, func = func, None  # autotune([{…}, …])
    if by not in ("shape", "class") or (top is not None and top < 1):
        raise TileValueError(
            f"@tilescale.autotune(top={top!r}, by={by!r})",
            expected='a positive number, and "shape" or "class"',
        )
    if configs is None:
        raise TileTypeError(
            "@tilescale.autotune has no configs", hint='configs=[{"block_M": 64}, {"block_M": 128}]'
        )

    words = {
        "timeout": timeout, "cache_input_tensors": cache_input_tensors,
        "do_not_specialize": do_not_specialize, "early_stop": early_stop, "early_stop_factor":
        early_stop_factor,
    }  # fmt: skip
    unused("autotune", words)
    if skip_check:
        ref_prog = None
    if manual_check_prog is not None and ref_prog is None:
        raise TileTypeError("manual_check_prog= compares with a reference", hint="ref_prog=… beside it")

    def decorate(jitted: Any) -> Autotuned:
        if not isinstance(jitted, Jit):
            raise TileTypeError(
                f"@tilescale.autotune is above a {type(jitted).__name__}",
                expected="@tilescale.autotune above @tilescale.jit above a def",
            )
        made = Autotuned(
            jitted, configs, warmup, rep, ref_prog, rtol, atol,
            supply_type if tensor_supply is None else tensor_supply, extents, top, by == "class",
        )  # fmt: skip
        made.supply_prog, made.manual_check, made.ratio = supply_prog, manual_check_prog, max_mismatched_ratio
        return made

    return decorate if func is None else decorate(func)


_captured: list[list[Any]] = []


@contextlib.contextmanager
def set_autotune_inputs(*tensors: Any) -> Iterator[None]:
    """Inside, factories are tuned on these inputs: ``with set_autotune_inputs(a, b):``, or one list of
    them."""
    _captured.append(
        list(tensors[0]) if len(tensors) == 1 and isinstance(tensors[0], (list, tuple)) else [*tensors]
    )
    try:
        yield
    finally:
        _captured.pop()


def captured_inputs() -> list[Any] | None:
    """What `set_autotune_inputs` has given; None outside of it."""
    return _captured[-1] if _captured else None


class Autotuned:
    """A jitted function whose configuration is found by measuring. ``trials``: what the last tuning saw."""

    def __init__(
        self,
        jitted: Jit,
        configs: Any,
        warmup: float,
        rep: float,
        ref_prog: Any,
        rtol: Any,
        atol: Any,
        supply: Any,
        extents: Any,
        top: int | None = None,
        classes: bool = False,
    ):
        functools.update_wrapper(self, jitted.func)
        self.jitted, self.configs, self.warmup, self.rep = jitted, configs, warmup, rep
        self.ref_prog, self.rtol, self.atol, self.supply, self.extents = ref_prog, rtol, atol, supply, extents
        self.top, self.classes = top, classes
        self.supply_prog: Callable[..., Any] | None = None
        self.manual_check: Callable[..., Any] | None = None
        self.ratio: float | None = None
        self.trials: list[Trial] = []
        self.best: dict[Any, tuple[Config, float]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(self.jitted.signature.parameters, args)), **kwargs}
        key = tuple((name, _kind(value, self.classes)) for name, value in given.items())
        config, latency = self.best.get(key) or self._find(key, given, args, kwargs)
        if not isinstance(self.jitted, Factory):
            return self.jitted(*args, **kwargs, **config)
        kernel = self.jitted(*args, **kwargs, **config)
        if config:
            kernel.config, kernel.latency = config, latency
            advice.give(vars(kernel).get("_meta", {}))  # withheld while it was one of many
        return kernel

    # -- the list
    # -------------------------------------------------------------------------------------------------
    def candidates(self, given: Config, args: tuple[Any, ...], kwargs: Config) -> list[Config]:
        """The configurations to try for a call: those that agree with what it gives, without it, each
        once."""
        listed = self.configs(*args, **kwargs) if callable(self.configs) else self.configs
        if isinstance(listed, dict):
            listed = [
                dict(zip(listed, values, strict=True)) for values in itertools.product(*listed.values())
            ]
        out: dict[Any, Config] = {}
        if any("pass_configs" in config for config in listed):
            unused(f"autotune of {self.jitted.name}", {"pass_configs": True})
        for config in ({k: v for k, v in c.items() if k != "pass_configs"} for c in listed):
            unknown = [name for name in config if name not in self.jitted.signature.parameters]
            if unknown:
                raise TileTypeError(
                    f"a configuration of {self.jitted.name} sets {unknown[0]!r}, which is no parameter",
                    loc=loc_of(self.jitted.func),
                    expected=", ".join(self.jitted.signature.parameters),
                )
            if all(frozen(given[name]) == frozen(value) for name, value in config.items() if name in given):
                rest = {name: value for name, value in config.items() if name not in given}
                out.setdefault(frozen(rest), rest)
        if not out:
            if any(name in given for config in listed for name in config):
                return [{}]  # the caller has chosen something that is not on the list
            raise TileValueError(
                f"autotune of {self.jitted.name} has no configurations", loc=loc_of(self.jitted.func)
            )
        return list(out.values())

    # -- the search
    # -----------------------------------------------------------------------------------------------
    def _find(self, key: Any, given: Config, args: tuple[Any, ...], kwargs: Config) -> tuple[Config, float]:
        configs = self.candidates(given, args, kwargs)
        if configs == [{}]:
            found: tuple[Config, float] = ({}, math.nan)
        else:
            disk = self._disk_key(given, configs)
            found = self._recall(disk, configs) or self._remember(
                disk, configs, self._search(configs, given, args, kwargs)
            )
        self.best[key] = found
        return found

    def _search(
        self, configs: list[Config], given: Config, args: tuple[Any, ...], kwargs: Config
    ) -> tuple[int, float]:
        """The index of the fastest and its milliseconds. Collective: whether a step worked is agreed before
        the next."""
        self.trials = [Trial(config) for config in configs]
        order = self._order(configs, args, kwargs)
        wanted = len(configs) if order is None or self.top is None else self.top
        with advice.withheld(), _progress(self.jitted.name, min(wanted, len(configs))) as advance:
            for trial in self.trials if order is None else [self.trials[k] for k in order]:
                if sum(t.latency is not None for t in self.trials) >= wanted:
                    break
                self._try(trial, given, args, kwargs)
                if trial.error is not None:
                    log.say(
                        "warning",
                        f"autotune of {self.jitted.name}: {_show(trial.config)} is skipped: {trial.error}",
                    )
                advance(trial)
        best = min(range(len(configs)), key=lambda k: self.trials[k].latency or math.inf)
        latency = self.trials[best].latency
        if latency is None:
            raise TileError(
                f"autotune of {self.jitted.name}: none of {len(configs)} configurations works\n"
                + "\n".join(
                    f"  {_show(t.config)}: {t.error}" for t in self.trials[:50] if t.error is not None
                ),
                loc=loc_of(self.jitted.func),
            )
        log.say("info", f"autotune of {self.jitted.name}: {_show(configs[best])}, {latency:.4g} ms")
        return best, latency

    def _order(self, configs: list[Config], args: tuple[Any, ...], kwargs: Config) -> list[int] | None:
        """With ``top``: the indices of what can work, the least predicted time first, as rank 0 has it; None
        where all are measured."""
        from tilescale.tuning import cost

        if self.top is None or len(configs) <= self.top:
            return None
        if cost.known_machine(self.jitted.target, [*args, *kwargs.values()]) is None:
            log.say(
                "info",
                f"autotune of {self.jitted.name}: nothing is predicted for this target, and all "
                "configurations are measured",
            )
            return None
        ranked = cost.rank(self.jitted, configs, args, kwargs, extents=self.extents)
        places = {id(trial.config): k for k, trial in enumerate(self.trials)}
        for p in ranked:
            trial = self.trials[places[id(p.config)]]
            trial.predicted, trial.error = p.latency, p.error or None
        order = [places[id(p.config)] for p in ranked]
        order = [int(k) for k in agree.first([float(k) for k in order])]
        return [k for k in order if self.trials[k].error is None]

    def _try(self, trial: Trial, given: Config, args: tuple[Any, ...], kwargs: Config) -> None:
        profiler: Profiler | None = None
        with _failing(trial, ArithmeticError, ValueError):  # a factory's own arithmetic on block sizes
            profiler = self._profiler(self._compile(trial.config, args, kwargs), given)
        if not self._all_well(trial) or profiler is None:
            return
        if self.ref_prog is not None:
            with _failing(trial):
                self._compare(profiler)
            if not self._all_well(trial):
                return
        latency = math.inf
        with _failing(trial):
            latency = profiler.do_bench(warmup=self.warmup, rep=self.rep, args=self._given(profiler))
        (latency,) = agree.largest([latency])
        if self._all_well(trial):
            trial.latency = latency

    def compile(self, *args: Any, **kwargs: Any) -> Kernel:
        """The kernel of the best configuration for these arguments, which is its ``config``."""
        given = {**dict(zip(self.jitted.signature.parameters, args)), **kwargs}
        key = tuple((name, _kind(value, self.classes)) for name, value in given.items())
        config, latency = self.best.get(key) or self._find(key, given, args, kwargs)
        kernel = self._compile(config, args, kwargs)
        if config:
            kernel.config, kernel.latency = config, latency
        return kernel

    def _given(self, profiler: Profiler) -> Sequence[Any] | None:
        """The inputs that the caller has for kernels that no call of theirs asked for; None where the
        profiler makes them, or has those of the call."""
        if not isinstance(self.jitted, Factory):
            return None if callable(profiler.supply) else captured_inputs()
        if self.supply_prog is not None:
            return list(self.supply_prog([p for p in profiler._concrete() if not p["allocated"]]))
        return captured_inputs()

    def _compare(self, profiler: Profiler) -> None:
        assert self.ref_prog is not None
        given = self._given(profiler)
        if self.manual_check is None:
            profiler.assert_allclose(
                self.ref_prog,
                rtol=self.rtol,
                atol=self.atol,
                max_mismatched_ratio=self.ratio,
                input_tensors=given,
            )
            return
        inputs = profiler.inputs() if given is None else given
        results = [profiler.kernel(*inputs), self.ref_prog(*inputs)]
        self.manual_check(*(list(r) if isinstance(r, (tuple, list)) else [r] for r in results))

    @staticmethod
    def _all_well(trial: Trial) -> bool:
        """Whether no rank has failed."""
        (failed,) = agree.largest([float(trial.error is not None)])
        if failed and trial.error is None:
            trial.error = "failed on another rank"
        return not failed

    def _compile(self, config: Config, args: tuple[Any, ...], kwargs: Config) -> Kernel:
        return self.jitted.compile(*args, **kwargs, **config)

    def _profiler(self, kernel: Kernel, given: Config) -> Profiler:
        from tilescale.profiler import Profiler

        if isinstance(self.jitted, Factory):
            return Profiler(kernel, self.supply, {**_extents(kernel), **(self.extents or {})})
        if not any(p["name"] in given for p in kernel.params):  # compiled ahead: no call has tensors
            known = {k: v for k, v in given.items() if k in kernel.symbols}
            return Profiler(kernel, self.supply, {**_extents(kernel), **(self.extents or {}), **known})
        extents: dict[str, int] = {}
        for p in kernel.params:
            if p["kind"] != "scalar" and not p["output"]:
                extents.update(
                    {
                        e: n
                        for e, n in zip(p["shape"], given[p["name"]].shape, strict=False)
                        if isinstance(e, str)
                    }
                )

        def supply(p: dict[str, Any]) -> Any:
            value = given[p["name"]]
            # What is measured must not change the caller's tensors. Symmetric ones have no copies: they are
            # only lent if not written.
            if not p["written"]:
                return value
            if p["kind"] != "tensor":
                raise TileValueError(
                    f"{kernel.name} is eager, writes the symmetric {p['name']}, and cannot be tuned on a "
                    "copy of it",
                    loc=loc_of(self.jitted.func),
                    hint="a factory that returns a @T.prim_func: its kernels are tuned on tensors of their "
                    "own",
                )
            return value.clone() if hasattr(value, "clone") else value.copy()

        return Profiler(kernel, supply, extents)

    # -- the disk
    # -------------------------------------------------------------------------------------------------
    def _disk_key(self, given: Config, configs: list[Config]) -> str | None:
        from tilescale.build import key_of

        if devices.of(resolve_target(self.jitted.target)).simulated:
            return None  # times of the simulator choose nothing for other targets

        call = {
            name: _listed(_kind(v, self.classes)) if _shaped(v) or self.classes else v
            for name, v in given.items()
        }
        threads = env.NUM_THREADS.get() or len(os.sched_getaffinity(0))
        return key_of(
            f"the choice of {self.jitted.name}",
            "autotune",
            self.jitted.func,
            call,
            configs,
            self.extents,
            agree.ranks(),
            threads,
            self.top,
            self.classes,
            resolve_target(self.jitted.target, given.values()),
        )

    def _recall(self, key: str | None, configs: list[Config]) -> tuple[Config, float] | None:
        """Rank 0 looks, for all: what another job writes meanwhile must not divide the ranks."""
        index, latency = -1, 0.0
        if key is not None and agree.rank() == 0:
            for folder in folders.readable("tuned"):
                with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                    held = json.loads((folder / f"{key}.json").read_text())
                    index, latency = int(held["index"]), float(held["latency"])
        index_, latency = agree.first([index, latency])
        if not 0 <= index_ < len(configs):
            return None
        log.say("debug", f"autotune of {self.jitted.name}: {_show(configs[int(index_)])} from the cache")
        return configs[int(index_)], latency

    def _remember(
        self, key: str | None, configs: list[Config], found: tuple[int, float]
    ) -> tuple[Config, float]:
        index, latency = found
        if key is not None and agree.rank() == 0:
            path = folders.writable("tuned") / f"{key}.json"
            aside = path.with_suffix(f".{os.getpid()}")
            aside.write_text(
                json.dumps({"index": index, "latency": latency, "config": _show(configs[index])})
            )
            os.replace(aside, path)
        return configs[index], latency


def _extents(kernel: Kernel) -> dict[str, int]:
    """What `set_autotune_inputs` says of a kernel's dynamic extents."""
    params = [p for k, p in enumerate(kernel.params) if k not in kernel.out_idx]
    pairs = zip(params, captured_inputs() or (), strict=False)
    axes = [
        axis for p, t in pairs for axis in zip(p.get("shape") or (), getattr(t, "shape", ()), strict=False)
    ]
    return {e: int(n) for e, n in axes if isinstance(e, str)}


def _shaped(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _kind(value: Any, classes: bool) -> Any:
    """What of an argument decides which configuration is best: a tensor's dtype and extents, anything else
    itself."""
    if _shaped(value):
        return (
            "tensor",
            str(value.dtype).removeprefix("torch."),
            tuple(_class(int(n)) if classes else int(n) for n in value.shape),
        )
    return ("class", _class(value)) if classes and type(value) is int else frozen(value)


def _class(n: int) -> int:
    """The power of two from which on a number's class begins; small numbers, which are often counts of
    something, stay themselves."""
    return n if n <= 16 else 1 << (n.bit_length() - 1)


def _listed(kind: Any) -> Any:
    """A key as lists, which the disk's keys are made of."""
    return (
        [_listed(k) for k in kind]
        if isinstance(kind, tuple)
        else str(kind)
        if isinstance(kind, type)
        else kind
    )


def _show(config: Config) -> str:
    return ", ".join(f"{k}={v}" for k, v in config.items())


@contextlib.contextmanager
def _failing(trial: Trial, *more: type[Exception]) -> Iterator[None]:
    """Refusals, failed launches, assertions and ``more`` are the configuration's fault; anything else is not
    caught."""
    faults: tuple[type[Exception], ...] = (TileError, AssertionError, *more)
    try:
        yield
    except faults as error:
        text = error.message if isinstance(error, TileError) else str(error)
        trial.error = text.splitlines()[0] if text else type(error).__name__


@contextlib.contextmanager
def _progress(name: str, total: int) -> Iterator[Callable[[Trial], None]]:
    """A bar on stderr, where that is a terminal and this is the first rank."""
    if not sys.stderr.isatty() or agree.rank() != 0:
        yield lambda trial: None
        return
    from tqdm import tqdm

    best: list[Trial] = []
    with tqdm(
        total=total, desc=f"autotune {name}", unit="config", leave=False, mininterval=0, file=sys.stderr
    ) as bar:

        def advance(trial: Trial) -> None:
            if trial.latency is not None and (not best or trial.latency < (best[0].latency or math.inf)):
                best[:] = [trial]
            if best:
                bar.set_postfix_str(f"{best[0].latency:.4g} ms: {_show(best[0].config)}")
            bar.update()

        yield advance
