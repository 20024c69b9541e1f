"""Models run by the modules of the ``transformers`` library with Penstock's KV cache (option ``model_impl``).

The library is imported when a configuration is read.
"""
