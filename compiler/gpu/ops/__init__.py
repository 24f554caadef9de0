"""How GPUs do the operations of compiler/ops where it is the same on all of them: a file for each of its
files, registered for "gpu"."""
