"""KV transfer: a decode engine pulls the keys and values of a prompt from a prefill engine into its prefix cache.

``messages`` is the protocol; ``sender`` and ``receiver`` are the state machines of its two ends, without any I/O.
``endpoint`` runs them in a thread, by ``sender_link`` and ``receiver_link``, over ``connection``, ``shared_memory`` and
``nixl``. ``exports`` and ``imports`` are the
engine's part on either side: which tokens are exported, and into which blocks tokens are imported.
"""
