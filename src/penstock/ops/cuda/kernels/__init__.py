"""Triton kernels. The modules of ``ops.cuda`` launch them; ``reference`` documents the ops."""
