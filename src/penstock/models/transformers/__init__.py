"""Any architecture that the ``transformers`` library knows, run by its modules over our KV cache (``model_impl``).

The library is imported when a configuration is read.
"""
