"""`python -m tilescale.launch` is `tilescale`, as is `python -m tilescale`."""

from __future__ import annotations

from tilescale.launch.cli import main

main()
