"""Calibrated quantization of checkpoints, layer by layer.

``quantize.quantize`` is the entry point. ``options`` defines methods and options, and does not import torch.
"""
