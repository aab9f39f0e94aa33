"""Coding tasks: read files by whatever tool the agent offers for that, change one word, and say so.

``Fix the spelling of the greeting in greeting.py``
    the file is read, ``Helo`` in it is replaced, and the answer says so.
``Read chapters 1 to 18, then fix the greeting in greeting.py``
    each chapter is read in a turn of its own before that: a session that grows.

What is changed stands in what the tool gave: an agent whose result did not come through is told that it did not.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from .conversation import Conversation
from .reply import Call, Reply

FILE = "greeting.py"
WRONG, RIGHT = "Helo", "Hello"
DONE = f"I have fixed {FILE}: it says {RIGHT}."
LOST = f"I cannot find {WRONG} in {FILE}."
_FOLDER = re.compile(r"(?:[Ww]orking directory: |<cwd>)(/[^\s<]+)")
_CHAPTERS = re.compile(r"[Rr]ead chapters 1 to (\d+)")


class Agent(NamedTuple):
    """How an agent's tools read a file and change it.  A path is absolute where the prompt names a folder."""

    needs: frozenset[str]  # tools
    read: Callable[[str], Call]
    fix: Callable[[str], Call]


def _patch(path: str) -> Call:
    old, new = (f'    return f"{word}, {{name}}!"' for word in (WRONG, RIGHT))
    patch = f"*** Begin Patch\n*** Update File: {path}\n@@\n-{old}\n+{new}\n*** End Patch"
    return Call("exec_command", {"cmd": f"apply_patch <<'EOF'\n{patch}\nEOF"})


AGENTS = (
    Agent(  # Claude Code
        frozenset({"Read", "Edit"}),
        lambda path: Call("Read", {"file_path": path}),
        lambda path: Call("Edit", {"file_path": path, "old_string": WRONG, "new_string": RIGHT}),
    ),
    Agent(  # opencode
        frozenset({"read", "edit"}),
        lambda path: Call("read", {"filePath": path}),
        lambda path: Call("edit", {"filePath": path, "oldString": WRONG, "newString": RIGHT}),
    ),
    Agent(  # Codex
        frozenset({"exec_command"}),
        lambda path: Call("exec_command", {"cmd": f"cat {path}"}),
        _patch,
    ),
)


def edit_a_file(conversation: Conversation) -> Reply | None:
    """The next step of a task, by the tools that are offered; aider is given the whole file as text."""
    if FILE not in conversation.ask:
        return None
    agent = next((agent for agent in AGENTS if agent.needs <= conversation.tools.keys()), None)
    if agent is not None:
        return _with_tools(conversation, agent)
    if "*file listing*" in conversation.ask:
        return _as_listing(conversation)
    return None


def _with_tools(conversation: Conversation, agent: Agent) -> Reply:
    found = _FOLDER.search("\n".join(turn.text for turn in conversation.turns))
    folder = f"{found[1]}/" if found else ""
    chapters = _CHAPTERS.search(conversation.ask)
    files = [f"chapter_{number:02}.md" for number in range(1, int(chapters[1]) + 1)] if chapters else []
    files.append(FILE)
    given = [result for round_ in conversation.results for result in round_]
    if len(given) < len(files):
        name = files[len(given)]
        return Reply(f"{name} is next.", f"I read {name}.", (agent.read(folder + name),))
    if len(given) == len(files):
        if WRONG not in given[-1]:
            return Reply("That is strange.", LOST)
        return Reply(f"{WRONG} is to be {RIGHT}.", "I change one word.", (agent.fix(folder + FILE),))
    return Reply("It is done.", DONE)


def _as_listing(conversation: Conversation) -> Reply:
    """The whole file, with the change."""
    told = "\n".join(turn.text for turn in conversation.turns)
    listed = re.findall(rf"{re.escape(FILE)}\n```\n(.*?)\n```", told, re.DOTALL)
    if not listed or WRONG not in listed[-1]:
        return Reply("That is strange.", LOST)
    return Reply("One word.", f"{DONE}\n\n{FILE}\n```\n{listed[-1].replace(WRONG, RIGHT)}\n```")
