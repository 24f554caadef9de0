"""`python -m tilescale.launch` is `tilescale`."""

from __future__ import annotations

from tilescale.launch.cli import main

main()
