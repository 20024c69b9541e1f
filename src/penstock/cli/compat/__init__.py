"""Implementation of other systems' commands: PaddleNLP, BladeLLM, TensorRT-LLM and Triton."""
