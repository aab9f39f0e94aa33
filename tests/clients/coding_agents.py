"""How each coding agent is started by ``penstock launch`` for one task without a terminal, in a project of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from .packages import FOLDER, need_npm_command, need_python

TASK = "Fix the spelling of the greeting in greeting.py"
LONG_TASK = "Read chapters 1 to {count}, then fix the greeting in greeting.py"
WRONG_FILE = 'def greet(name):\n    return f"Helo, {name}!"\n'
RIGHT_FILE = 'def greet(name):\n    return f"Hello, {name}!"\n'
DONE = "I have fixed greeting.py: it says Hello."
AGENT_S = 240
AGENTS = ("claude", "codex", "opencode", "aider")
_NPM = {"claude": "@anthropic-ai/claude-code", "codex": "@openai/codex", "opencode": "opencode-ai"}


@dataclass(frozen=True)
class Run:
    """What came of it."""

    code: int
    output: str  # of both streams
    project: Path


def need_agent(name: str) -> str:
    """The folder of its command, which must be installed."""
    command = need_python("aider") if name == "aider" else need_npm_command(name)
    return str(Path(command).parent)


def version_of(name: str) -> str:
    """Of the package that is installed."""
    if name == "aider":
        (found,) = (FOLDER / "aider").glob("lib/python3*/site-packages/aider_chat-*.dist-info")
        return found.name.removeprefix("aider_chat-").removesuffix(".dist-info")
    package = FOLDER / "npm/node_modules" / _NPM[name] / "package.json"
    return json.loads(package.read_text(encoding="utf-8"))["version"]


def arguments(name: str, task: str) -> list[str]:
    """For one task, with leave to read and write the project."""
    match name:
        case "claude":
            return ["-p", task, "--allowedTools", "Read", "Edit"]
        case "codex":
            return ["exec", "--dangerously-bypass-approvals-and-sandbox", task]
        case "opencode":
            return ["run", task]
        case _:
            return ["--message", task, "--yes-always", "--analytics-disable", "--no-gitignore", "greeting.py"]


def chapter(number: int, words: int) -> str:
    """Text of about so many words, another one for each number."""
    return "\n".join(
        f"Line {line} of chapter {number}: the fox met {number * line % 97} owls and {(number + line) % 89} hares."
        for line in range(1, words // 14 + 1)
    )


def make_project(folder: Path, *, chapters: int = 0, words: int = 0) -> Path:
    """A repository with a file that is to be fixed, and chapters to read."""
    folder.mkdir()
    (folder / "greeting.py").write_text(WRONG_FILE)
    for number in range(1, chapters + 1):
        (folder / f"chapter_{number:02}.md").write_text(chapter(number, words))
    author = ("-c", "user.name=Nobody", "-c", "user.email=nobody@example.org")
    for words_ in (("init", "--quiet"), ("add", "."), (*author, "commit", "--quiet", "-m", "First")):
        subprocess.run(["git", *words_], cwd=folder, check=True)
    return folder


def run_agent(name: str, url: str, folder: Path, task: str, project: Path) -> Run:
    """``penstock launch NAME`` with this task.  ``folder``: its home is made there."""
    home = folder / "home"
    home.mkdir()
    environ = {
        "PATH": os.pathsep.join((need_agent(name), os.environ["PATH"])),
        "HOME": str(home),
        "TERM": "dumb",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    command = [sys.executable, "-m", "penstock", "launch", name, "--url", url, "--", *arguments(name, task)]
    try:
        run = subprocess.run(
            command,
            env=environ,
            cwd=project,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=AGENT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        said = (late.stdout or b"").decode(errors="replace") if isinstance(late.stdout, bytes) else str(late.stdout)
        raise AssertionError(f"{' '.join(command)} still ran after {AGENT_S} s:\n{said}") from None
    return Run(run.returncode, run.stdout, project)
