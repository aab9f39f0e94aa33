"""tokenizer: NEEDS A DOCSTRING."""
