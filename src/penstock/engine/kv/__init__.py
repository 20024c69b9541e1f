"""The paged KV cache: its size, the pool of blocks, their allocation to sequences, and prefix caching."""
