"""One package a dialect: the API of another system, with its requests, responses and errors."""
