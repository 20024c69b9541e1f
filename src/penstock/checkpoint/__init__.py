"""Readers of checkpoints: ``config.json``, headers of GGUF and safetensors files, engine folders. No torch."""
