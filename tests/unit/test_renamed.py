"""docs/renamed.md is true: each new name exists, each old one is gone from its place, and none is listed twice."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SRC = ROOT / "src/penstock"
PAGE = (ROOT / "docs/renamed.md").read_text(encoding="utf-8")
FOLDERS = {"Files": SRC, "C++ files": SRC / "kernels/cpp", "Classes and functions": SRC, "Methods and fields": SRC}
LEAST_ROWS = {"Files": 250, "C++ files": 30, "Classes and functions": 900, "Methods and fields": 3}


def section(title: str) -> str:
    return re.split(r"^## ", PAGE.partition(f"\n## {title}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def rows(title: str) -> list[tuple[list[str], str]]:
    """Of each row of a section's tables the old names, and the cell with the new ones."""
    lines = [line for line in section(title).splitlines() if line.startswith("| `")]
    cells = [line.strip("| ").split(" | ") for line in lines]
    return [(names(old), new) for old, new in cells]


def defined(body: list[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    """What the statements of a module or a class define."""
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from ((target.id, node) for target in targets if isinstance(target, ast.Name))


@cache
def definitions(path: Path) -> frozenset[str]:
    """The names in a module, and those in its classes, as `Class.method`."""
    found = set()
    for name, node in defined(ast.parse(path.read_text(encoding="utf-8")).body):
        found.add(name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{name}.{member}" for member, _ in defined(node.body)}
    return frozenset(found)


def is_defined(name: str) -> bool:
    """Whether the package has this class, function, method or field, such as `router.service.RouterService`."""
    parts = name.split(".")
    for count in range(len(parts) - 1, 0, -1):
        folder = SRC.joinpath(*parts[:count])
        for path in (folder.with_suffix(".py"), folder / "__init__.py"):
            if path.is_file():
                return ".".join(parts[count:]) in definitions(path)
    return False


def exists(name: str, folder: Path) -> bool:
    if "/" in name or name.endswith((".py", ".cpp", ".hpp", ".cmake")):
        return (folder / name).exists() or (ROOT / name).exists()
    return is_defined(name)


@pytest.mark.parametrize("title", FOLDERS)
def test_each_new_name_exists(title: str):
    assert len(rows(title)) >= LEAST_ROWS[title]
    wrong = [new for _, new in rows(title) for name in names(new) if not exists(name, FOLDERS[title])]
    assert wrong == []


@pytest.mark.parametrize("title", FOLDERS)
def test_each_row_has_new_names_or_says_why_there_are_none(title: str):
    in_form = re.compile(r"`[^`]+`(, `[^`]+`)*|deleted: [^|]+")
    assert [(old, new) for old, new in rows(title) if not old or not in_form.fullmatch(new)] == []


@pytest.mark.parametrize("title", FOLDERS)
def test_each_old_name_is_gone_from_its_place(title: str):
    assert [name for old, _ in rows(title) for name in old if exists(name, FOLDERS[title])] == []


def test_no_old_name_is_listed_twice():
    count = Counter((FOLDERS[title], name) for title in FOLDERS for old, _ in rows(title) for name in old)
    assert [name for (_, name), times in count.items() if times > 1] == []


def test_each_name_that_is_said_to_be_unchanged_exists():
    unchanged = re.findall(r"^- `(.+)`$", section("Unchanged names"), re.MULTILINE)
    assert len(unchanged) >= 10
    assert [name for name in unchanged if not exists(name, SRC)] == []
