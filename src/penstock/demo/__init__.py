"""The built-in model: a small chat model and its draft model, for first steps and tests.

Both are Hugging Face checkpoints (``Qwen3ForCausalLM``, bfloat16, safetensors) with the same tokenizer. Skills and
accuracy: ``chat/README.md``; training: ``examples/demo_model``.
"""

from pathlib import Path

NAME = "penstock-demo"
"""Name of the chat model, also as the option ``model``."""

CHAT = Path(__file__).parent / "chat"
"""Folder of the chat model's checkpoint."""

DRAFT = Path(__file__).parent / "draft"
"""Folder of the draft model's checkpoint, for speculative decoding with ``CHAT`` as the target."""
