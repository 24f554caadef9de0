"""How the CPU does the operations of compiler/ops: a file for each of its files. ir/lowerings.py loads all of
them."""
