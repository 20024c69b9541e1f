"""Speculative decoding: the n-gram drafter, draft lengths, and whether drafts raise the throughput."""
