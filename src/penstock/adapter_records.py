"""The names of LoRA adapters that were loaded or unloaded while serving, as gateways share them through workers.

A gateway has a change accepted by one worker, the home of the name, and tells all workers; workers pass it on to the
other gateways, and to those that come later.  A record has a version, one more than that of the record it replaces, so
the order of messages does not matter, and no clock is compared.  Versions are equal only if a home was lost amid two
changes; then the record that compares greater stands everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import msgspec

MAX_ADAPTER_RECORDS = 256
"""Names that a process knows.  The oldest of those that were unloaded gives way; if all are loaded, none is added."""

MAX_ADAPTER_NAME_CHARS = 256
MAX_ADAPTER_FOLDER_CHARS = 4096
MAX_ADAPTER_VERSION = 1 << 40


class AdapterRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a name stands for, or last stood for."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_ADAPTER_NAME_CHARS)]
    version: Annotated[int, msgspec.Meta(ge=1, le=MAX_ADAPTER_VERSION)]
    fingerprint: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]  # BLAKE3 of its files
    folder: Annotated[str, msgspec.Meta(pattern="^/", max_length=MAX_ADAPTER_FOLDER_CHARS)]
    nbytes: Annotated[int, msgspec.Meta(ge=0, le=1 << 50)]  # of its file of tensors
    rank: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]  # the largest of its matrices
    loaded: bool = True  # False: it was unloaded
    given: bool = False  # at the start of a gateway, not while serving

    @property
    def order(self) -> tuple[int, bool, str, str]:
        """The greater of two records of one name stands."""
        return self.version, self.loaded, self.fingerprint, self.folder


class AdapterRecords:
    """The records that a process knows, by name."""

    def __init__(self) -> None:
        self._by_name: dict[str, AdapterRecord] = {}  # least recently changed first

    def __len__(self) -> int:
        return len(self._by_name)

    def find(self, name: str) -> AdapterRecord | None:
        """The record of this name."""
        return self._by_name.get(name)

    def all(self) -> tuple[AdapterRecord, ...]:
        """All of them."""
        return tuple(self._by_name.values())

    def add(self, records: Iterable[AdapterRecord]) -> tuple[AdapterRecord, ...]:
        """Takes records, and returns those that are news."""
        return tuple(record for record in records if self._add(record))

    def change(self, record: AdapterRecord) -> AdapterRecord | None:
        """As the home of the name: takes a record that replaces the known one, and returns the record that stands.

        Another record than the given one: the change was decided upon without knowing that one.  None: there is no
        room.
        """
        known = self._by_name.get(record.name)
        if known is None or record.version > known.version:
            self._add(record)
        return self._by_name.get(record.name)

    def _add(self, record: AdapterRecord) -> bool:
        known = self._by_name.get(record.name)
        if known is not None and known.order >= record.order:
            return False
        if known is None and not self._make_room(record):
            return False
        self._by_name.pop(record.name, None)
        self._by_name[record.name] = record
        return True

    def _make_room(self, record: AdapterRecord) -> bool:
        if len(self._by_name) < MAX_ADAPTER_RECORDS:
            return True
        gone = next((name for name, known in self._by_name.items() if not known.loaded), None)
        if gone is None:
            return False
        del self._by_name[gone]
        return True
