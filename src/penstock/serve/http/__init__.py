"""HTTP below the dialects: middleware, bodies, replies, error formats."""
