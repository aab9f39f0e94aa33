"""architecture: NEEDS A DOCSTRING."""
