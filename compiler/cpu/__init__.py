"""The CPU target: micro-kernels, vector math, conversions, LLVM."""
