"""Layouts of shared tiles that matrix instructions read, by TileLang's names."""
