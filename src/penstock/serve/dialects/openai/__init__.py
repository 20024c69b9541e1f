"""OpenAI's API: completions, chats, embeddings, audio, models and batches, with vLLM's additions."""

from .routes import REQUESTS, OpenAI, add_routes, shared_paths
