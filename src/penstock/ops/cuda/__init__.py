"""The CUDA backend: Triton kernels, batch-invariant for one GPU architecture and version of Triton."""
