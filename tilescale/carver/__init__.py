"""Hints for tiles, by TileLang's names: recommended by the cost model (tilescale/tuning/cost.py)."""
