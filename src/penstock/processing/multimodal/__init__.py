"""multimodal: NEEDS A DOCSTRING."""
