"""Penstock, an LLM serving system. So far it holds the demo model (``penstock.demo``); the engine comes next."""

__version__ = "0.0.1"
