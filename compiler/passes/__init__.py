"""One file a pass; pipeline.py is the list."""
