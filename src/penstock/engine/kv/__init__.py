"""The paged KV cache: its size, the block pool, allocation of blocks to sequences, prefix caching, and offloading."""
