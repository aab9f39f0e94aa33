"""catalog: NEEDS A DOCSTRING."""
