"""The worker, which computes an engine's steps: input batch, forward pass, sampling, and drafting."""
