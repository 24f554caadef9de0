"""TileLang's package of tools beside the compiler."""
