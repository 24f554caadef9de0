"""TileLang's package of targets: programs take `determine_target` from it."""
