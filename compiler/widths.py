"""How many threads the groups of a block have: what every part of the compiler counts by (PTX ISA, "Warps" and "warpgroup")."""

from __future__ import annotations

WARP, WARPGROUP = 32, 128
#: the scales below a block
WIDTHS = {"thread": 1, "warp": WARP, "warpgroup": WARPGROUP}
