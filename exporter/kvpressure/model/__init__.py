"""The vocabulary: frozen data that every other package shares; imports nothing of the project."""
