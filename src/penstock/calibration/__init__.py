"""Calibrated quantization: makes a quantized checkpoint of another one, layer by layer.

``quantize.quantize`` is the whole of it; ``options`` has what it can be told and loads no torch.
"""
