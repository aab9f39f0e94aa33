"""A package that changes on disk under a running service: modules of two versions may fail in any way."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import pytest

from penstock.launch.compose import GATEWAY_MODULES, preload_modules


class OfTwoVersions:
    """Finds modules as if they met others of another version."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> None:
        if name == "uvicorn.lifespan.on":
            raise self._error


@pytest.mark.parametrize("error", [ImportError("no"), AttributeError("no"), TypeError("no")])
def test_what_cannot_be_imported_is_told_and_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
):
    monkeypatch.delitem(sys.modules, "uvicorn.lifespan.on", raising=False)
    monkeypatch.setattr(sys, "meta_path", [OfTwoVersions(error), *sys.meta_path])
    preload_modules(GATEWAY_MODULES)
    assert "the package on disk has changed" in caplog.text
