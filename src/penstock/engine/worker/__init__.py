"""The worker, which computes steps: its rows, the input batch, the forward pass, sampling, and drafters."""
