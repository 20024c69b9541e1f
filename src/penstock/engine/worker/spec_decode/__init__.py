"""The worker's part of speculative decoding: drafters, token trees, and acceptance of drafts."""
