"""The engine: schedules requests, and computes their output tokens in worker processes."""
