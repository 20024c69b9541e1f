"""vLLM's endpoints that OpenAI's API does not have: ``/generate``, development mode and management."""
