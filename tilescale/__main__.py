"""`python -m tilescale` is `tilescale`."""

from __future__ import annotations

from tilescale.launch.cli import main

main()
