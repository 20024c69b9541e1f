"""Vision towers, and the vision transformer (ViT) that most towers share."""
