"""Kernels for CUDA devices. They need triton: import them where a GPU is known to be there."""
