"""Text-level interface to the engine: ``LLM``, ``AsyncLLM`` and the server's ``Gateway``."""
