"""Families of models: each module has one or more ``Family``, and is found by its place. No torch."""
