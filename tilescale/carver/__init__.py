"""Hints for tiles, by TileLang's names: recommended by the cost model (tilescale/tuning/cost.py)."""

from tilescale.submodules import late

__getattr__ = late(__name__)
