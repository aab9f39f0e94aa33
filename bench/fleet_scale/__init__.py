"""What the size of a fleet costs; see ``__main__``."""
