"""Files that are there whole or not at all: written beside their place, flushed to the drive, then renamed.

Knows nothing of what is in them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replacing(target: Path, partial: Path, *, go_on: bool = False) -> Iterator[BinaryIO]:
    """``partial``, to be written, or rewritten where it is to ``go_on``.

    It becomes ``target``, in the same folder, when the body ends well; else it stays for whoever called.
    """
    with partial.open("r+b") if go_on else partial.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    partial.replace(target)
