"""openai: NEEDS A DOCSTRING."""
