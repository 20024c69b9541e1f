"""What each op computes, in plain PyTorch; `ops/reference.py` is the backend made of it."""
