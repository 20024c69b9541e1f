"""The Triton kernels. The modules above this package launch them, and document what they compute."""
