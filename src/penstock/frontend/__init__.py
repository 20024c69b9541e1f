"""Text in, text out: ``LLM``, ``AsyncLLM`` and the ``Gateway`` of the server."""
