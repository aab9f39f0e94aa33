"""What all configuration has in common.  Knows no setting."""

from __future__ import annotations

import msgspec


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all configuration: frozen, keyword-only, strict."""
