"""Lossless compression of checkpoints (docs/format.md): the format, and the conversion of folders to it and back."""
