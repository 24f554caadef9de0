"""Emitters of matrix instructions, by TileLang's names."""
