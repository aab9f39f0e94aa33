"""docs/tests.md names a test of the default tier for each promise; here: the tests are there, and so are the pages."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/tests.md").read_text()
LEAST_ROWS = {"Reliability": 20, "Determinism": 12, "Limits": 12, "Security": 20}


def rows(section: str) -> list[str]:
    """The rows of a section's table, without its head."""
    text = PAGE.partition(f"\n### {section}\n")[2].partition("\n##")[0]
    return [line for line in text.splitlines() if line.startswith("| ")][1:]


def default_tier() -> set[str]:
    """Names of the tests that are not marked ``long`` as a whole."""
    names = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        is_long = False
        for line in map(str.strip, path.read_text().splitlines()):
            if match := re.match(r"(?:async )?def (\w+)", line):
                if match[1].startswith("test_") and not is_long:
                    names.add(match[1])
                is_long = False
            is_long = is_long or line == "@pytest.mark.long"
    return names


def test_each_promise_has_a_test_in_the_default_tier():
    there = default_tier()
    for section, least in LEAST_ROWS.items():
        named = {row: re.findall(r"`(test_\w+)`", row) for row in rows(section)}
        assert len(named) >= least
        assert [row for row, tests in named.items() if not tests] == []
        assert {test for tests in named.values() for test in tests} - there == set(), f"{section}: no such tests"
