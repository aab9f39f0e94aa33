"""families: NEEDS A DOCSTRING."""
