"""gguf: NEEDS A DOCSTRING."""
