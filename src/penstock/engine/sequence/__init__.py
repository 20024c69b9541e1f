"""Sequences, what one step computes of them, and searches among them."""
