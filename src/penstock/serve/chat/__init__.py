"""Chats, as all dialects answer them: request, prompt, sampling parameters, structured outputs, stream deltas."""
