"""The HTTP layer shared by all dialects: middleware, bodies, replies, error formats."""
