"""TileLang's package of operations: programs take T.GemmWarpPolicy from it."""
