"""Chats, shared by all dialects: request, prompt, sampling parameters, structured outputs, stream deltas."""
