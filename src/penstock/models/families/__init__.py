"""Families of models. Every ``Family`` in a module of this package is registered. No torch."""
