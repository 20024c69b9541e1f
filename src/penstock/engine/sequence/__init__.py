"""Sequences, the plan of a step, M-RoPE positions, pooling, and beam search."""
