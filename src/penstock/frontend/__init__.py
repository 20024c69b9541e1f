"""Prompts in, text out: ``LLM`` for batches."""
