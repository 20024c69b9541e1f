"""Vision towers, and the vision transformer that most of them share."""
