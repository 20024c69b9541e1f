"""The models of Triton's TensorRT-LLM backend, with text or token ids as inputs and outputs."""
