"""Models of the ``transformers`` library, run by its modules with Penstock's KV cache (``model_impl``).

The library is imported when a configuration is read.
"""
