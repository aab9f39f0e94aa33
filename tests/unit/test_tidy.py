"""The house is what its documents say: sizes, docstrings, maps, limits, metrics, dependencies, help texts, links."""

from __future__ import annotations

import argparse
import ast
import importlib
import os
import re
import tomllib
from functools import cache
from pathlib import Path

import msgspec
import pytest

import penstock
from penstock.cli.parsing import COMMANDS
from penstock.config import limits, schema
from penstock.telemetry import metrics, spans

ROOT = Path(__file__).resolve().parents[2]
SRC = ROOT / "src/penstock"
MODULES = sorted(SRC.rglob("*.py"))
SOURCES = [*MODULES, *sorted(SRC.rglob("*.cpp")), *sorted(SRC.rglob("*.hpp"))]
TESTS = sorted((ROOT / "tests").rglob("*.py"))
ROOT_PAGES = [ROOT / f"{n}.md" for n in ("README", "ARCHITECTURE", "CONTRIBUTING", "SECURITY")]
PAGES = [*sorted((ROOT / "docs").glob("*.md")), *ROOT_PAGES]

MAX_FUNCTION_LINES = 60


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(text(path))


def row(page: Path, key: str) -> str | None:
    """The table row that begins with `key` in code quotes."""
    for line in text(page).splitlines():
        if line.startswith(f"| `{key}` |"):
            return line
    return None


# --- code -------------------------------------------------------------------------------------------------------------


def test_every_module_says_what_it_does():
    assert not [name(path) for path in MODULES if not ast.get_docstring(tree(path))]


def test_functions_fit_a_screen():
    for path in MODULES:
        for node in ast.walk(tree(path)):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            lines = (node.end_lineno or 0) - node.lineno + 1
            assert lines <= MAX_FUNCTION_LINES, f"{name(path)}: {node.name} has {lines} lines"


def test_nothing_is_left_for_later_in_a_comment():
    later = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b")
    assert not [name(path) for path in (*SOURCES, *TESTS, *PAGES) if later.search(text(path))]


def test_there_is_no_drawer_for_everything():
    assert not [name(path) for path in SOURCES if path.stem in ("utils", "util", "helpers", "misc", "common")]


def test_nothing_is_unpickled_or_evaluated():
    for path in MODULES:
        nodes = list(ast.walk(tree(path)))
        called = {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
        imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        imported |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
        assert not called & {"eval", "exec", "compile", "__import__"}, name(path)
        assert not imported & {"pickle", "marshal", "shelve", "dill", "cloudpickle"}, name(path)


# --- documents --------------------------------------------------------------------------------------------------------


def test_the_map_shows_the_order_of_imports():
    contracts = tomllib.loads(text(ROOT / "pyproject.toml"))["tool"]["importlinter"]["contracts"]
    layers = [name for layer in contracts[0]["layers"] for name in layer.split(" | ")]
    folders = re.findall(r"^  (\w+)/ ", text(ROOT / "ARCHITECTURE.md"), flags=re.MULTILINE)
    assert folders == [name for name in layers if (SRC / name).is_dir()]


def test_the_map_is_a_map():
    lines = text(ROOT / "ARCHITECTURE.md").splitlines()
    assert len(lines) <= 160
    terms = lines[lines.index("| term | meaning | elsewhere |") + 2 : lines.index("## Folders") - 1]
    assert 10 < len(terms) <= 25


STRUCTS = {
    "limits": limits.RequestLimits,
    "failover": limits.FailoverConfig,
    "supervise": limits.SuperviseConfig,
    "hand_over": limits.KvTransferConfig,
    "kv_store": limits.KvStoreLimits,
    "routing": limits.RoutingConfig,
    "scheduling": limits.SchedulingConfig,
    "trace": limits.TraceLimits,
    "audit": limits.AuditLimits,
    "turns": limits.TurnLimits,
    "membership": limits.MembershipConfig,
    "picker": limits.PickerLimits,
    "penstock probe": limits.ProbeLimits,
}


def test_every_limit_is_documented_with_its_default():
    wrong: dict[str, str] = {}
    for field in (field for struct in STRUCTS.values() for field in msgspec.structs.fields(struct)):
        line = row(ROOT / "docs/limits.md", field.name)
        said = "no row" if line is None else line.split("|")[2].split("(")[0].strip()
        if said != str(field.default):
            wrong[field.name] = f"docs/limits.md has {said}, and the default is {field.default}"
    assert wrong == {}


def test_no_limit_is_documented_that_does_not_exist():
    page = text(ROOT / "docs/limits.md")
    documented = set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))
    fields = {
        f.name
        for s in (*STRUCTS.values(), schema.SchedulerConfig, schema.WorkerConfig)
        for f in msgspec.structs.fields(s)
    }
    assert documented <= fields


FAMILIES = [family for family in vars(metrics).values() if isinstance(family, metrics.MetricFamily)]
FAMILIES += [*metrics.BY_WORKER_COUNTER.values(), *metrics.BY_WORKER_MAXIMUM.values()]
FAMILIES += metrics.BY_TIER_FIGURE.values()


def test_every_metric_is_documented():
    wrong: dict[str, str | None] = {}
    for family in FAMILIES:
        line = row(ROOT / "docs/metrics.md", family.name)
        _, _, kind, labels, *_ = (line or "||||").split("|")
        if (kind.strip(), re.findall(r"`(\w+)`", labels)) != (family.kind.value, list(family.labels)):
            wrong[family.name] = line
    assert wrong == {}


def test_no_metric_is_documented_that_does_not_exist():
    page = text(ROOT / "docs/metrics.md")
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == {family.name for family in FAMILIES}


def test_every_span_is_documented_and_no_other():
    page = text(ROOT / "docs/tracing.md")
    told = {line.split("`")[1]: line for line in page.splitlines() if line.startswith("| `")}
    assert set(told) == {family.name for family in spans.SPANS}
    for family in spans.SPANS:
        facts = told[family.name].split("|")[2]
        declared = [re.sub(rf"\.({'|'.join(metrics.TIERS)})_", ".TIER_", fact) for fact in family.facts]
        assert re.findall(r"`([\w.]+)`", facts) == [*dict.fromkeys(declared), *family.events]


def test_links_lead_somewhere():
    links = [(page, target) for page in PAGES for target in re.findall(r"\]\(([^)#\s]+)", text(page))]
    assert [(name(page), to) for page, to in links if "://" not in to and not (page.parent / to).exists()] == []


def test_each_page_stands_once_in_the_index_and_once_in_the_site():
    pages = sorted(path.name for path in (ROOT / "docs").glob("*.md") if path.name != "index.md")
    linked = re.findall(r"\]\(([\w-]+\.md)\)", text(ROOT / "docs/index.md"))
    site = re.findall(r": ([a-z-]+\.md)$", text(ROOT / "mkdocs.yml"), re.MULTILINE)
    assert sorted(linked) == pages
    assert sorted(name for name in site if name != "index.md") == pages


def test_the_picture_of_gaps_shows_the_figures_of_the_benchmarks():
    picture = text(ROOT / "docs/gaps.svg")
    table = text(ROOT / "docs/benchmarks.md").partition("while prompts of 2,000 tokens arrive**")[2]
    for system in ("penstock-split", "vllm", "llama.cpp"):
        row = re.search(rf"^\| \**{re.escape(system)}\**[^|]*\|(.*)\|$", table, re.MULTILINE)
        assert row is not None
        gap = float(row[1].split("|")[1].split()[0]) / 1e3
        assert f">{gap:.1f} s<" in picture or f">{1e3 * gap:,.0f} ms<" in picture, system


# --- commands ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_helps_with_an_example(command: str, capsys: pytest.CaptureFixture[str]):
    parser = argparse.ArgumentParser(prog="penstock")
    importlib.import_module(f"penstock.cli.{command.replace('-', '_')}").add_parser(parser.add_subparsers())
    with pytest.raises(SystemExit) as done:
        parser.parse_args([command, "--help"])
    assert done.value.code == 0
    assert re.search(rf"examples?:\n  penstock {command}", capsys.readouterr().out)


def test_every_flag_of_serve_is_documented(capsys: pytest.CaptureFixture[str]):
    parser = argparse.ArgumentParser()
    importlib.import_module("penstock.cli.serve").add_parser(parser.add_subparsers())
    with pytest.raises(SystemExit):
        parser.parse_args(["serve", "--help"])
    flags = set(re.findall(r"(?<!\S)(--[a-z-]+)", capsys.readouterr().out)) - {"--help"}
    page = text(ROOT / "docs/serve.md")
    assert not {flag for flag in flags if flag not in page}


# --- packaging --------------------------------------------------------------------------------------------------------

PROJECT = tomllib.loads(text(ROOT / "pyproject.toml"))["project"]


def requirements(file: str) -> list[str]:
    """Without the platforms that they are for."""
    lines = text(ROOT / file).splitlines()
    return [line.split(";")[0] for line in lines if line and line[0] not in "#-"]


REQUIREMENTS = ("requirements-test.txt", "requirements-release.txt")


def test_every_requirement_is_pinned():
    every = [*PROJECT["dependencies"], *(r for file in (*REQUIREMENTS, "constraints.txt") for r in requirements(file))]
    assert [each for each in every if not re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][0-9A-Za-z.]*", each)] == []


def test_every_dependency_is_explained():
    explained = set(re.findall(r"^\| (\S+) \|", text(ROOT / "docs/dependencies.md"), re.MULTILINE))
    every = [*PROJECT["dependencies"], *(line for file in REQUIREMENTS for line in requirements(file)), "torch=="]
    assert {each.split("==")[0] for each in every} - explained == set()


def test_the_version_stands_in_one_place():
    assert "version" not in PROJECT
    assert PROJECT["dynamic"] == ["version"]
    version = re.escape(penstock.__version__)
    files = [*MODULES, ROOT / "CMakeLists.txt", ROOT / "pyproject.toml", ROOT / "Dockerfile", ROOT / "mkdocs.yml"]
    assert [name(path) for path in files if re.search(rf"(?<![\d.]){version}(?![\d.])", text(path))] == [
        "src/penstock/__init__.py"
    ]


def test_every_dependency_is_used():
    """By import, or by those that we start through another (uvicorn parses with httptools)."""
    imported = {"zmq": "pyzmq", "python_multipart": "python-multipart", "yaml": "pyyaml", "tomli_w": "tomli-w"}
    roots: set[str] = set()
    for path in MODULES:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Import):
                roots |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                roots.add((node.module or "").split(".")[0])
    used = {imported.get(root, root) for root in roots}
    assert not {line.split("==")[0] for line in PROJECT["dependencies"]} - used


@pytest.mark.parametrize("script", ["dev", "quickstart", "run-tests", ".ci/run", ".ci/lint", "examples/curl.sh"])
def test_scripts_can_be_run(script: str):
    assert os.access(ROOT / script, os.X_OK)
    assert text(ROOT / script).startswith("#!/usr/bin/env bash\n")
