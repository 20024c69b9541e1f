"""KV transfer: a decode engine pulls the keys and values of a prompt from a prefill engine into its prefix cache.

``messages`` defines the protocol; ``sender`` and ``receiver`` are the state machines of its two ends, without I/O.
``endpoint`` runs the state machines in a thread, with ``sender_link`` and ``receiver_link``, over ``connection``,
``shared_memory`` and ``nixl``. ``exports`` selects the tokens to export, ``imports`` the blocks into which tokens are
imported. ``connector`` is the engine's interface to this package.
"""
