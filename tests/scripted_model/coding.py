"""A coding task: read ``greeting.py`` by whatever tool the agent offers for that, change one word in it, and say so."""

from __future__ import annotations

from .conversation import Conversation
from .reply import Reply


def edit_a_file(conversation: Conversation) -> Reply | None:
    """``Fix the greeting in greeting.py``."""
    return None
