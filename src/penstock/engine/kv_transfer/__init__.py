"""KV transfer: a decode engine pulls the keys and values of a prompt from a prefill engine into its prefix cache.

``messages`` defines the protocol; ``sender`` and ``receiver`` are the state machines of its two ends, without I/O.
``endpoint`` runs them in a thread, with ``sender_link`` and ``receiver_link``, over ``connection``, ``shared_memory``
and ``nixl``. ``exports`` and ``imports`` are the engines' sides: they select the tokens to export, and the blocks into
which tokens are imported. ``connector`` is the engine's interface to all of them.
"""
