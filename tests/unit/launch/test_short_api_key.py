"""An API key that can be guessed is warned of at the start, without a word of the key."""

from __future__ import annotations

import pytest

from penstock.launch.compose import SAFE_KEY_CHARS, warn_short_key


@pytest.mark.parametrize(("key", "warned"), [("a", True), ("x" * 15, True), ("x" * 16, False), (None, False)])
def test_a_key_under_sixteen_characters_is_warned_of(
    key: str | None, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    assert SAFE_KEY_CHARS == 16
    warn_short_key(key)
    lines = [record.getMessage() for record in caplog.records]
    told = f"--api-key has {len(key or '')} characters and can be guessed; `penstock keys add` makes keys that cannot"
    assert lines == ([told] if warned else [])
