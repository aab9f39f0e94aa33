"""native: NEEDS A DOCSTRING."""
