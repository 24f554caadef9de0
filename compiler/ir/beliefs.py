"""What of a condition may be believed in the statement that runs where it holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilescale.compiler.ir.buffers import bases, stored
from tilescale.compiler.ir.program import TileProgram
from tilescale.compiler.tvm_compat import ir, structural_walk, tirx

#: memory that no other thread writes
_PRIVATE = ("local", "local.var", "local.fragment")


class Beliefs:
    """Of one program, for its lowering."""

    def __init__(self, program: TileProgram):
        self.bases = bases(program.func.body)
        self.written = self._whole(stored(program.func.body))

    def lasting(self, condition: Any, lowered: Any, body: Any) -> list[Any]:
        """The parts of ``lowered``, a condition in thread IR, that hold in all of ``body``: those that read
        no memory, or memory that nobody writes meanwhile. Of memory that threads share, that is what the
        kernel writes nowhere; of a thread's own, what ``body`` does not write."""
        own: list[set[Any]] = []

        def stays(buffer: Any) -> bool:
            buffer = self.bases.get(buffer, buffer)
            if buffer not in self.written:
                return True
            if buffer.ty.storage_scope not in _PRIVATE:
                return False
            if not own:
                own.append(self._whole(stored(body)))
            return buffer not in own[0]

        return _parts(condition, lowered, stays)

    def until(self, condition: Any, statements: list[Any]) -> int:
        """How many statements run before one that writes what a condition reads."""
        found: set[Any] = set()
        structural_walk(condition, (ir.TensorLoad, lambda e: found.add(self.bases.get(e.source, e.source))))
        writes = (bool(found & self._whole(stored(s))) for s in statements)
        return next((k for k, w in enumerate(writes) if w), len(statements)) if found else len(statements)

    def _whole(self, buffers: set[Any]) -> set[Any]:
        return {self.bases.get(b, b) for b in buffers}


def _parts(condition: Any, lowered: Any, stays: Callable[[Any], bool]) -> list[Any]:
    if isinstance(condition, tirx.And) and isinstance(lowered, tirx.And):
        return _parts(condition.a, lowered.a, stays) + _parts(condition.b, lowered.b, stays)
    found: list[Any] = []
    structural_walk(condition, (ir.TensorLoad, lambda e: found.append(e.source)))
    return [lowered] if all(map(stays, found)) else []
