"""compression: NEEDS A DOCSTRING."""
