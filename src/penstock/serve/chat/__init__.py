"""What the dialects share to answer a chat."""
