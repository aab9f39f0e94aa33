"""tcp: NEEDS A DOCSTRING."""
