"""HTTP and gRPC APIs of other systems ("dialects"): one package or module per API."""
