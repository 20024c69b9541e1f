"""Penstock, an LLM serving system. So far it holds the demo model's tokenizer (``penstock.demo``)."""

__version__ = "0.0.1"
