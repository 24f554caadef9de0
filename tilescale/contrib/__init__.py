"""TileLang's package of tools beside the compiler."""

from tilescale.submodules import late

__getattr__ = late(__name__)
