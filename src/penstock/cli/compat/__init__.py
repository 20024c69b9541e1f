"""Commands of other systems: PaddleNLP, BladeLLM, TensorRT-LLM and Triton."""
