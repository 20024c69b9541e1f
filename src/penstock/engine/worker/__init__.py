"""The worker, which computes steps: rows, input batch, forward pass, sampling and drafters."""
