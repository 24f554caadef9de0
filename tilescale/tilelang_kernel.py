"""What TileLang's kernel objects answer beside a call, by its names."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tilescale.errors import TileValueError
from tilescale.launching import Launchable


class Named(Launchable):
    """Texts of the code, registers, a tuner's choice."""

    @abstractmethod
    def get_kernel_source(self, kind: str | None = None, kernel_only: bool | None = None) -> str: ...

    @abstractmethod
    def get_profiler(
        self, tensor_supply: Any = None, *, tensor_supply_type: Any = None, **extents: int
    ) -> Any: ...

    @property
    def kernel_source(self) -> str:
        """Thread IR, or CUDA C++."""
        return self.get_kernel_source()

    def print_source_code(self, which: str = "kernel", file: str | None = None) -> None:
        """Prints the kernel's text, or writes it to a file.

        Raises:
            TileValueError: the host's text, which there is none of: the runtime launches kernels.
        """
        _require_kernel(which)
        if file is None:
            print(self.kernel_source)
        else:
            Path(file).write_text(self.kernel_source)

    def show_source(self, which: str = "kernel") -> None:
        """The same, on the screen."""
        self.print_source_code(which)

    def export_sources(self, kernel_path: str | None = None, host_path: str | None = None) -> None:
        """Writes the kernel's text to a file.

        Raises:
            TileValueError: a path for the host's text, or no path.
        """
        _require_kernel("kernel" if host_path is None and kernel_path is not None else "host")
        self.print_source_code(file=kernel_path)

    def show_ptx(self) -> None:
        """Prints the PTX of a kernel for CUDA."""
        print(self.get_kernel_source("ptx"))

    def export_ptx(self, path: str) -> None:
        """Writes the PTX of a kernel for CUDA to a file."""
        Path(path).write_text(self.get_kernel_source("ptx"))

    def show_sass(self) -> None:
        """Prints the machine code of a kernel for CUDA."""
        print(self.get_kernel_source("sass"))

    def export_sass(self, path: str) -> None:
        """Writes the machine code of a kernel for CUDA to a file."""
        Path(path).write_text(self.get_kernel_source("sass"))

    @property
    def n_regs(self) -> int | None:
        """Registers of a thread; None where nothing tells, as of a CPU's kernel."""
        return self._resource("registers")

    @property
    def n_spills(self) -> int | None:
        """Bytes that a thread stores of registers that it has not; None where nothing tells."""
        return self._resource("spill_stores")

    @property
    def n_max_threads(self) -> int | None:
        """Threads of a block; None where nothing tells."""
        return self._resource("threads")

    def _resource(self, name: str) -> int | None:
        known: dict[str, Any] = self._meta.get("resources", {})
        return known.get(name)

    def run_once(self, func: Callable[..., Any] | None = None) -> Any:
        """What the kernel, or ``func``, gives for inputs of the profiler's."""
        return self.get_profiler().run_once(func)

    def get_tuner_result(self) -> dict[str, Any]:
        """``{"latency": …, "config": …, "ref_latency": …}`` of a kernel that a tuner chose.

        Raises:
            TileValueError: any other kernel.
        """
        if self.latency is None:
            raise TileValueError(
                f"{self.name} has no tuner's result", expected="a kernel of @tilescale.autotune, tuned"
            )
        return {
            "latency": self.latency,
            "config": self.config,
            "ref_latency": getattr(self, "ref_latency", None),
        }


def _require_kernel(which: str) -> None:
    if which != "kernel":
        raise TileValueError(
            f"the text of {which!r}", expected='"kernel": there is no host code, the runtime launches kernels'
        )
