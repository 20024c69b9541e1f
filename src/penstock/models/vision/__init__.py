"""Vision towers, and the vision transformer of most of them."""
