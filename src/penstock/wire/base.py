"""What every message is: a tagged, strict, frozen struct."""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", forbid_unknown_fields=True, omit_defaults=True):
    """Base of everything that crosses a process boundary."""
