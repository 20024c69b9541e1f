"""The HTTP and gRPC server."""
