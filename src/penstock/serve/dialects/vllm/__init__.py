"""vLLM's own endpoints: ``/generate``, and those of its operators."""
