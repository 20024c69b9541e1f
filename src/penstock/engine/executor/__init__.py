"""Executors: where the workers compute, in the engine's process or in processes of their own."""
