"""docs/tests.md names a test of the default tier for each promise; here: the tests are there, and so are the pages."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/tests.md").read_text()
LEAST_ROWS = {"Reliability": 20, "Determinism": 12, "Limits": 12, "Security": 20}


def rows(section: str) -> list[str]:
    """The rows of a section's table, without its head."""
    text = PAGE.partition(f"\n### {section}\n")[2].partition("\n##")[0]
    return [line for line in text.splitlines() if line.startswith("| ")][1:]


def is_long(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(ast.unparse(each) == "pytest.mark.long" for each in function.decorator_list)


def test_each_promise_has_a_test_in_the_default_tier():
    functions = [
        node
        for path in (ROOT / "tests").rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    there = {function.name for function in functions if not is_long(function)}
    for section, least in LEAST_ROWS.items():
        named = {row: re.findall(r"`(test_\w+)`", row) for row in rows(section)}
        assert len(named) >= least
        assert [row for row, tests in named.items() if not tests] == []
        assert {test for tests in named.values() for test in tests} - there == set(), f"{section}: no such tests"
