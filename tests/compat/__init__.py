"""TileLang's own programs, run by TileScale: ``python -m tests.compat CHECKOUT`` (see __main__.py)."""
