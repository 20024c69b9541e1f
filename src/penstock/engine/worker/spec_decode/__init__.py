"""The worker's part of speculative decoding: drafters, token trees, and the acceptance of drafts."""
