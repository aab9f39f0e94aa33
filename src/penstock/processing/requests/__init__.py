"""requests: NEEDS A DOCSTRING."""
