"""What TileLang's programs say of the registers of producers and consumers. Here the schedule decides who has
how many (passes/gpu_schedule.py); the words decide nothing, which the log says."""

from __future__ import annotations

from tilescale import log
from tilescale.compiler.builder import state as bld


def _said(name: str) -> None:
    bld.current()
    log.say("info", f"T.{name} decides nothing here: the schedule shares out the registers", once=True)


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
