"""The model in the box: a small chat model and its draft, for first steps and for tests.

Both are plain Hugging Face checkpoints (``Qwen3ForCausalLM``, bfloat16, safetensors) with one tokenizer. What they
know and how well is in ``chat/README.md``; how they were made is in ``examples/demo_model``.
"""

from pathlib import Path

CHAT = Path(__file__).parent / "chat"
"""Folder of the chat model's checkpoint."""

DRAFT = Path(__file__).parent / "draft"
"""Folder of the draft model's checkpoint, for speculative decoding with ``CHAT`` as the target."""
