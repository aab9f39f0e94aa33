"""chat: NEEDS A DOCSTRING."""
