"""The operations of the tile language, one file each: signature, checks, effects, lowering. Files are loaded by name, on first use."""
