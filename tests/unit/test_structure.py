"""The package's structure: imports without circles, one concept a file, one name a thing, the field's words."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SRC = ROOT / "src/penstock"
PATHS = sorted(SRC.rglob("*.py"))
MAX_PYTHON_FILES = 400
SMALL_FILE_LINES = 60
# Words of everyday language that stood for terms of the field, and names that say what a program does everywhere.
BANNED_WORDS = frozenset(
    """
    asked ask beat bell board bulletin bulletins courier crossing deeds desk door drawn duties errand errands foreseen
    giver guess guesses guessing haste heard house keeper kept listening luck mixing nested notes outside party promises
    quantised recall residents ring rings road storefront sunk taker tidings told traced worth zygote
    """.split()  # noqa: SIM905
)
BANNED_METHODS = frozenset("asked done forget heard hear keep kept say take taken tell told".split())  # noqa: SIM905


def module_name(path: Path) -> str:
    parts = path.relative_to(SRC.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in PATHS}


@dataclass(frozen=True)
class Outline:
    """What a file imports from the package, anywhere in it, and what it defines."""

    imports: frozenset[str]
    classes: tuple[str, ...]  # at the top of the file
    functions: tuple[str, ...]  # the same
    methods: tuple[str, ...]  # as Class.name, of classes anywhere


@cache
def outline(path: Path) -> Outline:
    top = ast.parse(path.read_text(encoding="utf-8"))
    statements: list[ast.AST] = [top]
    for node in statements:  # grows meanwhile; expressions are left out, which is what makes this fast
        for block in ("body", "handlers", "orelse", "finalbody", "cases"):
            statements += getattr(node, block, ())
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return Outline(
        imports=frozenset(imported(statements) & MODULES.keys()),
        classes=tuple(node.name for node in top.body if isinstance(node, ast.ClassDef)),
        functions=tuple(node.name for node in top.body if isinstance(node, functions)),
        methods=tuple(
            f"{node.name}.{member.name}"
            for node in statements
            if isinstance(node, ast.ClassDef)
            for member in node.body
            if isinstance(member, functions)
        ),
    )


def imported(statements: list[ast.AST]) -> set[str]:
    found = set()
    for node in statements:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                found.add(submodule if submodule in MODULES else node.module)
    return found


def circles(graph: dict[str, frozenset[str]]) -> list[set[str]]:
    """Strongly connected components of more than one node (Tarjan, 1972, without recursion)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []
    for start in graph:
        work = [] if start in index else [(start, iter(graph[start]))]
        while work:
            node, targets = work[-1]
            if node not in index:
                index[node] = low[node] = len(index)
                stack.append(node)
            for target in targets:
                if target not in index:
                    work.append((target, iter(graph[target])))
                    break
                if target in stack:
                    low[node] = min(low[node], index[target])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    component = set()
                    while node not in component:
                        component.add(stack.pop())
                    if len(component) > 1:
                        found.append(component)
    return found


def words(name: str) -> set[str]:
    """The words of an identifier, in lower case: ``FairThreads`` and ``fair_threads`` have fair and threads."""
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}


def test_imports_have_no_circles():
    assert circles({"a": frozenset("b"), "b": frozenset("ca"), "c": frozenset()}) == [{"a", "b"}]
    graph = {module: outline(path).imports - {module} for module, path in MODULES.items()}
    assert circles(graph) == []


def test_a_small_file_has_more_than_one_importer():
    importers = defaultdict(set)
    for module, path in MODULES.items():
        for target in outline(path).imports:
            importers[target].add(module)
    lonely = []
    for module, path in MODULES.items():
        if path.name in ("__init__.py", "__main__.py") or len(path.read_text().splitlines()) >= SMALL_FILE_LINES:
            continue
        if len(importers[module]) == 1 and MODULES[next(iter(importers[module]))].parent == path.parent:
            lonely.append(f"{module} (imported by {next(iter(importers[module]))})")
    assert lonely == []


def test_files_are_few_enough_to_be_known():
    assert len(PATHS) <= MAX_PYTHON_FILES


def test_kernels_are_sorted_by_topic():
    assert [path.name for path in (SRC / "kernels/cpp").iterdir() if path.is_file()] == []


def test_public_classes_have_one_name_each():
    places = defaultdict(list)
    for module, path in MODULES.items():
        for name in outline(path).classes:
            places[name].append(module)
    twice = {name: modules for name, modules in places.items() if len(modules) > 1 and not name.startswith("_")}
    assert twice == {}


def test_names_are_the_words_of_the_field():
    odd = [module for module in MODULES if words(module.rpartition(".")[2]) & BANNED_WORDS]
    for module, path in MODULES.items():
        file = outline(path)
        public = [name for name in (*file.classes, *file.functions) if not name.startswith("_")]
        odd += [f"{module}.{name}" for name in public if words(name) & BANNED_WORDS]
        odd += [f"{module}.{name}" for name in file.methods if name.rpartition(".")[2] in BANNED_METHODS]
    assert odd == []


def test_prose_uses_plain_words():
    plain = re.compile(r"\b(nobody|whoever|told|beside|so many)\b")
    pages = [*SRC.rglob("*.*"), *(ROOT / "docs").rglob("*.md")]
    texts = [path for path in pages if path.suffix in (".py", ".pyi", ".cpp", ".hpp", ".md", ".toml")]
    lines = Counter()
    for path in texts:
        lines[str(path.relative_to(ROOT))] = len(list(filter(plain.search, path.read_text().splitlines())))
    assert lines.total() <= 110, lines.most_common(10)
