"""The CUDA target: thread IR printed as CUDA C++ that a person reads, compiled by nvcc or NVRTC, launched by
the runtime's C.

Thread IR is that of all GPUs (compiler/gpu), with this beside it:

- Two branches of an If that both wait for phases of mbarriers are roles and run at once: the producer where
  the thread's number is at least that of the block's own threads, the consumers elsewhere.
  ``ts::wgmma_m64n…`` functions are printed with the kernel.
- Tensor maps are parameters of handle type.
"""
