"""What TileLang's programs say to its compiler: of the registers of producers and consumers, which the
schedule shares out here (passes/gpu_schedule.py), and of options. But for fast math the words decide nothing,
which the log says."""

from __future__ import annotations

from typing import Any

from tilescale import log
from tilescale.compiler.builder import state as bld
from tilescale.compiler.builder.values import Buffer, Region
from tilescale.compiler.ir import source
from tilescale.errors import TileTypeError
from tilescale.language.funcs import switches

_ORDERS = "the compiler orders products and their registers"


def _said(name: str, why: str = "the schedule shares out the registers") -> None:
    bld.current()
    log.say("info", f"T.{name} decides nothing here: {why}", once=True)


def disable_warp_group_reg_alloc() -> None:
    """TileLang's word for a kernel whose roles keep their registers; it decides nothing."""
    _said("disable_warp_group_reg_alloc")


def no_set_max_nreg() -> None:
    """The same, by another of TileLang's names."""
    _said("no_set_max_nreg")


def annotate_producer_reg_dealloc(reg_count: int = 24) -> None:
    """TileLang's word for the registers that a producer keeps; it decides nothing. ``T.dec_max_nreg``
    does."""
    _said(f"annotate_producer_reg_dealloc({reg_count})")


def annotate_consumer_reg_alloc(reg_count: int = 240) -> None:
    """TileLang's word for the registers that a consumer gets; it decides nothing. ``T.inc_max_nreg`` does."""
    _said(f"annotate_consumer_reg_alloc({reg_count})")


def warpgroup_arrive() -> None:
    """TileLang's fence in front of wgmma's by hand; the compiler puts it where products begin."""
    _said("warpgroup_arrive", _ORDERS)


def warpgroup_commit_batch() -> None:
    """TileLang's end of a group of wgmma's; the compiler ends a group behind each product."""
    _said("warpgroup_commit_batch", _ORDERS)


def warpgroup_fence_operand(
    buffer_or_ptr: Any, offset: Any = 0, num_regs: Any = None, dtype: Any = None
) -> None:
    """TileLang's fence of an accumulator against the C compiler's moves; the compiler puts one behind each
    wait for products (include/ts/hopper.cuh).

    Raises:
        TileTypeError: what is no tile in registers.
    """
    held = buffer_or_ptr.buffer if isinstance(buffer_or_ptr, Region) else buffer_or_ptr
    if not isinstance(held, Buffer) or not held.scope.startswith("local"):
        raise TileTypeError(
            f"T.warpgroup_fence_operand of {buffer_or_ptr}",
            loc=source.current(),
            expected="a tile in registers, of T.alloc_fragment",
        )
    _said("warpgroup_fence_operand", _ORDERS)


def annotate_compile_flags(flags: list[str] | str) -> None:
    """Flags for TileLang's CUDA compiler; they decide nothing here, as ``compile_flags=`` of ``compile``.

    Raises:
        TileTypeError: no text, and no list of texts.
    """
    given = [flags] if isinstance(flags, str) else flags
    if not isinstance(given, (list, tuple)) or not all(isinstance(f, str) for f in given):
        raise TileTypeError(
            f"T.annotate_compile_flags({flags!r})", loc=source.current(), expected="a list of texts"
        )
    bld.current()
    log.say("info", f"T.annotate_compile_flags: {', '.join(given)} decide nothing here", once=True)


def annotate_pass_configs(configs: dict[Any, Any]) -> None:
    """``pass_configs=`` of ``compile``, from within the kernel: ``TL_ENABLE_FAST_MATH`` asks for fast math in
    what is written behind it, ``TL_DISABLE_THREAD_STORAGE_SYNC`` leaves the order of what threads do by their
    index to the author; others steer TileLang's compiler and decide nothing.

    Raises:
        TileTypeError: no dictionary.
    """
    if not isinstance(configs, dict):
        raise TileTypeError(
            f"T.annotate_pass_configs({configs!r})", loc=source.current(), expected="a dictionary"
        )
    asked, others = switches(configs)
    bld.current().switches |= asked
    if others:
        names = ", ".join(map(str, others))
        log.say("info", f"T.annotate_pass_configs: {names} decide nothing here", once=True)


def annotate_restrict_buffers(*buffers: Any) -> None:
    """TileLang's word for tensors that may overlap. Here a call refuses arguments that overlap where one is
    written, whatever this says: it decides nothing.

    Raises:
        TileTypeError: what is no tensor.
    """
    for given in buffers:
        if not isinstance(given, Buffer) or not given.scope.startswith("global"):
            raise TileTypeError(
                f"T.annotate_restrict_buffers of {given}",
                loc=source.current(),
                expected="the kernel's tensors",
            )
    bld.current()
    log.say("info", "T.annotate_restrict_buffers decides nothing here: overlap is refused", once=True)
