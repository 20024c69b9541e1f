"""vLLM's endpoints beyond OpenAI's API: ``/generate``, development mode and management."""
