"""The package's structure: imports without circles, one concept a file, one name a thing, the field's words."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SRC = ROOT / "src/penstock"
PATHS = sorted(SRC.rglob("*.py"))
MAX_PYTHON_FILES = 510
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
# Dotted names in docstrings that are no Python: files, labels of tensors, fields of a GGUF file.
NO_PYTHON = re.compile(
    r".*\.(json|jinja|md|hpp|model|proto|py|safetensors|toml|txt)|(encoder|experts|vision|tokenizer)\..*"
)


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
    names: frozenset[str]  # at the top of the file: defined, assigned or imported
    members: Mapping[str, frozenset[str]]  # of each class anywhere: methods, fields, attributes of self, and its bases


@cache
def source(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@cache
def outline(path: Path) -> Outline:
    top = ast.parse(source(path))
    statements: list[ast.AST] = [top]
    for node in statements:  # grows meanwhile; expressions are left out, which is what makes this fast
        for block in ("body", "handlers", "orelse", "finalbody", "cases"):
            statements += getattr(node, block, ())
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    lines = source(path).splitlines()
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
        names=frozenset(bound(top.body)),
        members={
            node.name: frozenset(
                (
                    *bound(node.body),
                    *(ast.unparse(base).partition("[")[0] for base in node.bases),
                    *re.findall(r"\bself\.(\w+)", "\n".join(lines[node.lineno : node.end_lineno])),
                )
            )
            for node in statements
            if isinstance(node, ast.ClassDef)
        },
    )


def bound(body: list[ast.stmt]) -> Iterator[str]:
    """The names that statements define, assign or import, those in an `if` or a `try` too."""
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.If | ast.Try):
            yield from bound([*node.body, *node.orelse])
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [element for target in targets for element in getattr(target, "elts", [target])]
            yield from (name.id for name in names if isinstance(name, ast.Name))


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


class References:
    """Resolves dotted names in docstrings and comments.

    ``kv.checksum.PageChecksums``, ``checksum.PageChecksums`` and ``PageChecksums.seal`` are one class and its method.
    """

    def __init__(self) -> None:
        renamed = (ROOT / "docs/renamed.md").read_text(encoding="utf-8")
        old_files = " ".join(line.split(" | ")[0] for line in renamed.splitlines() if ".py` |" in line)
        self.modules: dict[str, set[str]] = defaultdict(set)  # by each end of a module's name, such as kv.checksum
        self.members: dict[str, set[str]] = defaultdict(set)  # of the classes of a name
        for module, path in MODULES.items():
            parts = module.split(".")
            for end in range(1, len(parts) + 1):
                for begin in range(end):
                    self.modules[".".join(parts[begin:end])].add(".".join(parts[:end]))
            for name, members in outline(path).members.items():
                self.members[name] |= members
        self.attributes = set().union(*self.members.values())
        self.first_parts = {name for name in self.modules if "." not in name}
        self.first_parts |= set(re.findall(r"\w+", old_files.replace(".py", "")))  # files that there were

    def has_member(self, name: str, rest: list[str]) -> bool:
        """Whether the class has what `rest` begins with, or inherits it."""
        members = self.members.get(name, set())
        return not rest or rest[0] in members or any(self.has_member(base, rest) for base in members & self.bases)

    @property
    def bases(self) -> set[str]:
        return {name for name in self.members if name[:1].isupper()}

    def exists(self, name: str) -> bool:
        parts = name.split(".")
        for count in range(len(parts), 0, -1):
            for module in self.modules.get(".".join(parts[:count]), ()):
                rest = parts[count:]
                if not rest:
                    return True
                names = outline(MODULES[module]).names if module in MODULES else ()
                if rest[0] in names and self.has_member(rest[0], rest[1:]):
                    return True
        return False

    def is_variable(self, name: str, text: str) -> bool:
        """Whether it is a field of a variable or an argument in this file: ``request.computed``."""
        first, *rest = name.split(".")
        return rest[0] in self.attributes and re.search(rf"\b{first}\b *[:,=)]", text) is not None

    def is_stale(self, name: str, text: str) -> bool:
        first, *rest = name.split(".")
        if NO_PYTHON.fullmatch(name):
            return False
        if first[0].isupper():
            return not self.has_member(first, rest)
        return first in self.first_parts and not self.exists(name) and not self.is_variable(name, text)


def test_dotted_names_in_docstrings_exist():
    references = References()
    assert references.exists("kv.checksum.PageChecksums")
    assert not references.exists("kv.seals.PageSeals")
    stale = []
    for module, path in MODULES.items():
        text = source(path)
        for quoted in re.findall(r"``([^`\n]+\.[^`\n]+)``", text):
            for name in re.findall(r"(?<![\w./-])[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+", quoted):
                if references.is_stale(name.removeprefix("penstock."), text):
                    stale.append(f"{module}: {name}")
    assert stale == []


def test_docstrings_begin_with_what_it_is():
    """A noun or a verb, not a part of a sentence whose rest is the name: "Of one worker." says nothing by itself."""
    fragment = re.compile(r"(Of|Who|Whom|Whose|Those|Nobody|Somebody|So many|As many)\b")
    odd = []
    for module, path in MODULES.items():
        if re.search(rf'^ *"""{fragment.pattern}', source(path), re.MULTILINE):  # or not worth parsing
            for node in ast.walk(ast.parse(source(path))):
                if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    text = ast.get_docstring(node) or ""
                    odd += [f"{module}.{node.name}: {text[:60]}"] if fragment.match(text) else []
    assert odd == []


def test_files_and_classes_in_the_documentation_exist():
    """Files in code quotes, by the end of their path, and members of classes; not in pages about earlier versions."""
    folders = ("src", "tests", "bench", "scripts", "examples")
    files = [f"/{path.relative_to(ROOT)}" for folder in folders for path in (ROOT / folder).rglob("*.*")]
    elsewhere = {"llama.cpp", "utils.py"}  # another engine; a file that shall not be
    references, wrong = References(), []
    for page in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")):
        text = page.read_text(encoding="utf-8")
        if page.name in ("CHANGELOG.md", "renamed.md"):
            continue
        for quoted in re.findall(r"`([^`\n]+)`", text):
            named = set(re.findall(r"[\w./-]+\.(?:py|cpp|hpp)\b", quoted)) - elsewhere
            wrong += [f"{page.name}: {file}" for file in named if not any(path.endswith(f"/{file}") for path in files)]
            members = re.findall(r"(?<![\w./-])(?:\w+\.)*[A-Z]+[a-z]\w*\.[A-Za-z_]\w*", quoted)
            wrong += [f"{page.name}: {name}" for name in members if references.is_stale(name, text)]
    assert wrong == []


def test_the_answers_to_where_is_exist():
    """CONTRIBUTING.md: `file: name` of a function, a class, a constant or a member of a class."""
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## Where is")[2].partition("\n## ")[0]
    places = re.findall(r"`([\w/.]+\.(?:py|cpp|hpp))(?:: ([\w.]+))?`", page)
    assert len(places) > 80
    wrong = []
    for path, name in places:
        first, _, member = name.partition(".")
        file = SRC / path
        known = file.is_file() and (not name or first in outline(file).names)
        if not known or (member and member not in outline(file).members[first]):
            wrong.append(f"{path}: {name}")
    assert wrong == []
