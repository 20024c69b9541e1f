"""Speculative decoding: suffix and n-gram drafters, and the choice of draft lengths."""
