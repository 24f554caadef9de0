"""The `tilescale` command."""

from __future__ import annotations

import click


@click.group()
def main() -> None:
    """Start ranks, look at this machine."""
