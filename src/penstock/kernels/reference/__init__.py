"""reference: NEEDS A DOCSTRING."""
