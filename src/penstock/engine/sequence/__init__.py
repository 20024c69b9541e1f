"""Sequences, the plan of a step, pooling, and beam search."""
