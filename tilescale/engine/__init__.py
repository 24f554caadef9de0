"""TileLang's package of the compiler's driver: programs take the registration of callbacks from it."""
