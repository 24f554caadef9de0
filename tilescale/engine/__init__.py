"""TileLang's package of the compiler's driver: programs take the registration of callbacks from it."""

from tilescale.submodules import late

__getattr__ = late(__name__)
