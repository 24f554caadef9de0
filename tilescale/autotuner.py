"""Tuning, by TileLang's names: ``AutoTuner.from_kernel(…).set_compile_args(…).run()`` and what stands beside
it. What tunes is `tilescale.autotune`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tilescale.compat import unused
from tilescale.errors import TileTypeError
from tilescale.jit import Factory, jit
from tilescale.jitted import Jit
from tilescale.language.funcs import PrimFunc
from tilescale.profiler import do_bench
from tilescale.tuning.tuner import Autotuned, autotune, captured_inputs, set_autotune_inputs

if TYPE_CHECKING:
    from tilescale.kernel import Kernel

__all__ = ["AutoTuner", "AutotuneResult", "autotune", "captured_inputs", "set_autotune_inputs"]


@dataclass(frozen=True)
class AutotuneResult:
    """The fastest configuration: its keyword arguments, its milliseconds a call, those of the reference on
    the same inputs (None without one), and the kernel."""

    config: dict[str, Any]
    latency: float
    ref_latency: float | None
    kernel: Kernel

    @property
    def func(self) -> Any:
        """The kernel's program, as it was traced."""
        return self.kernel.program()

    @property
    def libcode(self) -> str:
        """The kernel's code as text."""
        return self.kernel.get_kernel_source()


class AutoTuner:
    """A tuner that is set up step by step; ``configs``: a list of keyword arguments, or parameter →
    values."""

    def __init__(self, fn: Callable[..., Any], configs: Any):
        self.fn, self.configs = fn, configs
        self.compiling: dict[str, Any] = {}
        self.measuring: dict[str, Any] = {}

    @classmethod
    def from_kernel(cls, kernel: Callable[..., Any], configs: Any) -> AutoTuner:
        """Of a function that returns a ``@T.prim_func`` for the tuned parameters."""
        return cls(kernel, configs)

    def set_compile_args(self, out_idx: Any = None, target: Any = None, **words: Any) -> AutoTuner:
        """What `tilescale.jit` takes; other words of TileLang's decide nothing, which the log says."""
        unused("set_compile_args", words)
        self.compiling = {"out_idx": out_idx, "target": target}
        return self

    def set_profile_args(self, warmup: float = 25, rep: float = 100, **words: Any) -> AutoTuner:
        """What `tilescale.autotune` takes."""
        unused("set_profile_args", {"backend": words.pop("backend", None)})
        self.measuring = {"warmup": warmup, "rep": rep, **words}
        return self

    def run(self, warmup: float | None = None, rep: float | None = None, **words: Any) -> AutotuneResult:
        """Compiles and measures all configurations.

        Raises:
            TileTypeError: what is tuned makes no kernel. TileError: no configuration works.
        """
        unused("AutoTuner.run", words)
        jitted = self.fn if isinstance(self.fn, Jit) else self._jitted()
        times = {"warmup": warmup, "rep": rep}
        measuring = {**self.measuring, **{k: v for k, v in times.items() if v is not None}}
        tuned: Autotuned = autotune(configs=self.configs, **measuring)(jitted)
        kernel = tuned()
        reference = None
        if tuned.ref_prog is not None:
            given = kernel.get_profiler(tuned.supply).inputs()
            reference = do_bench(lambda: tuned.ref_prog(*given))
        return AutotuneResult(kernel.config, kernel.latency, reference, kernel)

    def _jitted(self) -> Jit:
        if isinstance(self.fn, PrimFunc):
            raise TileTypeError(
                f"{self.fn.name} has no parameters to tune", hint="a function that returns it"
            )
        made: Jit = jit(self.fn, target=self.compiling.get("target"))
        if isinstance(made, Factory):
            made.out_idx = self.compiling.get("out_idx")
        return made
