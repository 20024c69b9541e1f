"""The paged KV cache: blocks, which sequence holds which, prefix caching, and how much memory they take."""
