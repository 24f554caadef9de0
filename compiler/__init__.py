"""Python source → tile IR → scheduled tile IR → thread IR → machine code. Imports neither torch nor
tilescale.comm."""
