"""connectors: NEEDS A DOCSTRING."""
