"""``python quantize.py`` in a folder laid out as TensorRT-LLM is."""

from penstock.cli.trtllm import quantize

raise SystemExit(quantize())
