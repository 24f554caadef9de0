"""How a sparse operand's kept numbers and their places are counted, by TileLang's names (`T.gemm_sp`)."""

from __future__ import annotations

from typing import Any

from tilescale.language.dtypes import BITS, canonical

#: bits that say where the kept numbers of a group stand
_BITS = 4
#: dtype → numbers that are kept, and those of a group (PTX ISA, "mma.sp")
GROUP_CONFIG: dict[Any, tuple[int, int]] = {
    canonical(name): (1, 2) if BITS[name] == 32 else (2, 4)
    for name in ("float32", "float16", "bfloat16", "int8", "uint8", "float8_e4m3fn", "float8_e5m2")
}


def get_e_factor(a_dtype: Any, meta_dtype: Any) -> int:
    """How many numbers of a row one element of the places stands for."""
    return canonical(meta_dtype).bits // _BITS * GROUP_CONFIG[canonical(a_dtype)][1]


def get_e_replicate_factor(a_dtype: Any) -> int:
    """How many neighbouring threads of an mma.sp hold the same places: two, of 8-bit numbers one."""
    return 1 if canonical(a_dtype).bits == 8 else 2
