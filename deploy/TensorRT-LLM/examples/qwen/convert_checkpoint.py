"""``python convert_checkpoint.py`` in a folder laid out as TensorRT-LLM is."""

from penstock.cli.trtllm import convert_checkpoint

raise SystemExit(convert_checkpoint())
