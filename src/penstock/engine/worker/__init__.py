"""What computes a step: the input batch, the forward pass, sampling."""
