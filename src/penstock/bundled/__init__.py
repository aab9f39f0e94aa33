"""The model that comes with the package.  Knows where it lies, and nothing about what is in it."""

from __future__ import annotations

from pathlib import Path

STORYTELLER = "storyteller"
"""The bundled model's name, as clients see it."""


def storyteller() -> Path:
    """Folder of the bundled storyteller (its card and its license are in it, too)."""
    return Path(__file__).parent / STORYTELLER
