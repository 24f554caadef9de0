"""Maps the four top-level source folders under the one import root; pyproject.toml cannot search mapped
folders.

Installed under their own names, `compiler`, `comm` and `launch` would collide with what users have.
"""

from __future__ import annotations

from setuptools import find_packages, setup

FOLDERS = {
    "tilescale": "tilescale",
    "tilescale.compiler": "compiler",
    "tilescale.comm": "comm",
    "tilescale.launch": "launch",
}


def packages() -> list[str]:
    """Each root and every folder with an __init__.py below it, under its installed name."""
    return [
        name
        for root, folder in FOLDERS.items()
        for name in (root, *(f"{root}.{sub}" for sub in find_packages(folder)))
    ]


setup(package_dir=FOLDERS, packages=packages())
