"""Triton kernels, which the modules of ``ops.cuda`` launch. ``reference`` documents the ops."""
