"""Layouts: where each element of a tile lies. Kept beside the IR, keyed by buffer; tile operations never see
them.

strided.py       places linear in the indices: what the CPU uses
pieces.py        digits of indices and where they lead: the algebra under the two others
fragment.py      tiles spread over the registers of threads
made.py          layouts that an author makes: T.Layout, T.Fragment, the usual swizzles
shared.py        tiles in shared memory with swizzles; bank conflicts
instructions.py  the fragments that mma and wgmma demand
"""

from __future__ import annotations

from tilescale.compiler.layout.fragment import Fragment
from tilescale.compiler.layout.pieces import Piece
from tilescale.compiler.layout.shared import Shared
from tilescale.compiler.layout.strided import Strided

__all__ = ["Fragment", "Piece", "Shared", "Strided"]
