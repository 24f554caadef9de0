"""What integers are known to be multiples of: by their form, by what names stand for, and by what calls are
promised to bring.

A promise (``T.dynamic("n", multiple_of=8)``) is kept beside the IR, by variable, for as long as its program's
`Promises` live: what asks about an index or an extent does not have the program at hand.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

from tilescale.compiler.tvm_compat import ir, structural_map, structural_walk, sym, tirx

#: a symbol's variable → k times an unknown
_promised: dict[Any, Any] = {}


class Promises(dict[str, int]):
    """What a program's symbols are promised to be multiples of, by name. All that is made of the program
    shares it."""

    def of(self, var: Any, name: str) -> None:
        """A variable has the value of a symbol, wherever it is looked at."""
        if (of := self.get(name, 1)) > 1:
            _promised[var] = tirx.Var(f"{var.name}_units", str(var.ty)) * tirx.IntImm(str(var.ty), of)
            weakref.finalize(self, _promised.pop, var, None).atexit = False


def bound_in(body: Any) -> dict[Any, Any]:
    """The names that a statement binds, with what they stand for."""
    found: dict[Any, Any] = {}
    structural_walk(body, (tirx.Bind, lambda s: found.__setitem__(s.var, s.value)))
    return found


def spelt_out(e: Any, definitions: Mapping[Any, Any]) -> Any:
    """An index with the names that were bound to integer expressions replaced by those."""
    if isinstance(e, int):
        return e
    for _ in range(8):
        used: list[Any] = []
        structural_walk(e, (ir.Var, lambda v, used=used: used.append(v) if v in definitions else None))
        if not used:
            break
        e = structural_map(e, (ir.Var, lambda v: definitions.get(v, v)))
    return e


def multiple(analyzer: Any, e: Any, of: int) -> bool:
    """Whether an integer expression always is a multiple of a number."""
    known = int(e.value) if isinstance(e, tirx.IntImm) else e
    if isinstance(known, int):
        return known % of == 0
    found = analyzer.modular_set(spelt_out(e, _promised) if _promised else e)
    return int(found.coeff) % of == 0 and int(found.base) % of == 0


def is_multiple(e: Any, of: int) -> bool:
    """The same, of an expression without a context."""
    return multiple(sym.Analyzer(), e, of)
