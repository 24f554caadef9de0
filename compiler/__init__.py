"""Python source to machine code: frontend, tile IR, passes, targets. Imports neither torch nor comm."""
