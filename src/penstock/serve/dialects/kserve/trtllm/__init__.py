"""The models that TensorRT-LLM's backend has in Triton: text in and out, tokens in and out."""
