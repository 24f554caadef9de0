"""Parts of a hint."""
