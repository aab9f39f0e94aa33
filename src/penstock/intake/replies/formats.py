"""Families whose tool calls stand between marks: JSON behind a mark, or a name, a mark and JSON.

Each class is one way of writing; ``detect.py`` says which family writes which way.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from penstock.intake.replies.json_calls import more, read_arguments, read_named_objects, read_object, read_objects
from penstock.intake.replies.pythonic import read_dotted_call, read_list
from penstock.intake.replies.reader import CallBegun, Marks, NotACallError, Reader, Steps
from penstock.intake.replies.reply import Tools

_NAME = re.compile(r"[^\s\"'{}\[\]<>()]{1,256}")


def checked_name(text: str) -> str:
    """A tool's name.  Raises NotACallError for what cannot be one."""
    name = text.strip()
    if not _NAME.fullmatch(name):
        raise NotACallError
    return name


class JsonCalls(msgspec.Struct, frozen=True, kw_only=True):
    """A mark and JSON: one object, or a list (Hermes, Qwen, Granite, Phi-4, Nemotron, Command R, Firefunction)."""

    begins: tuple[str, ...]
    ends: tuple[str, ...] = ()
    drops: tuple[str, ...] = ()
    named: bool = False  # the objects are {"NAME": {...}} (Apertus)
    listed: bool = False  # several calls are one list behind one mark
    keys: tuple[str, str] = ("name", "arguments")
    alone: bool = False

    def inner(self) -> tuple[str, ...]:
        """See ``CallFormat``."""
        return self.ends

    def read(self, reader: Reader, mark: str, tools: Tools) -> Steps[None]:
        """See ``CallFormat``."""
        if self.named:
            yield from read_named_objects(reader)
        else:
            yield from read_objects(reader)
        yield from _pass_end(reader, self.ends)

    def written(self, calls: Sequence[Mapping[str, Any]]) -> str:
        """Calls, each with ``name`` and ``arguments``, as a model writes them."""
        name, arguments = self.keys
        named = [{name: call["name"], arguments: call["arguments"]} for call in calls]
        values: Sequence[object] = [named] if self.listed else named
        line = "" if self.listed else "\n"
        end = f"{line}{self.ends[0]}" if self.ends else ""
        return "\n".join(f"{self.begins[0]}{line}{json.dumps(value, ensure_ascii=False)}{end}" for value in values)


class BareJson(msgspec.Struct, frozen=True, kw_only=True):
    """A message that is JSON, or begins with a mark and is (Llama 3).

    Without a mark only the name of a tool of the request makes it a call: other JSON is an answer.  Several calls are
    divided by semicolons or new lines.
    """

    begins: tuple[str, ...] = ("<|python_tag|>",)
    drops: tuple[str, ...] = ()
    alone: bool = True

    def inner(self) -> tuple[str, ...]:
        """See ``CallFormat``."""
        return ()

    def read(self, reader: Reader, mark: str, tools: Tools) -> Steps[None]:
        """See ``CallFormat``."""
        first = yield from reader.skip_space()
        if mark and first not in ("{", "["):
            yield from read_dotted_call(reader)
            return
        known = None if mark else tools.parameters
        yield from read_objects(reader, known)
        while (char := (yield from reader.skip_space())) in {";", ",", "{"}:
            if char == "{":
                yield from read_object(reader, known)
            else:
                yield from reader.take(char)


class NamedCalls(msgspec.Struct, frozen=True, kw_only=True):
    """A mark, a name, a mark, arguments, a mark (Kimi K2, DeepSeek, Functionary 3.1)."""

    begins: tuple[str, ...]
    divides: tuple[str, ...]  # the first of them ends the name
    ends: tuple[str, ...]
    drops: tuple[str, ...] = ()
    kind_first: str | None = None  # what stands between the kind of tool and its name (DeepSeek V3 and R1)
    numbered: bool = False  # the name is "functions.NAME:0", and that is the call's id (Kimi K2)
    alone: bool = False

    def inner(self) -> tuple[str, ...]:
        """See ``CallFormat``."""
        return (*self.divides, *self.ends, *([self.kind_first] if self.kind_first else []))

    def read(self, reader: Reader, mark: str, tools: Tools) -> Steps[None]:
        """See ``CallFormat``."""
        if self.kind_first is not None:
            yield from reader.until(Marks((self.kind_first, *self.ends)))
        text, divided = yield from reader.until(self._stops())
        if divided not in self.divides:
            raise NotACallError
        if self.numbered:
            identity = text.strip()
            yield CallBegun(checked_name(identity.removeprefix("functions.").rpartition(":")[0] or identity), identity)
        else:
            yield CallBegun(checked_name(text))
        if (yield from reader.skip_space()) in ("{", '"'):
            yield from read_arguments(reader)
            yield from reader.until(Marks(self.ends))
        else:
            yield from reader.copy_until(Marks(self.ends), more)

    def _stops(self) -> Marks:
        """What ends a name, or shows that it is none."""
        return Marks((*self.divides, *(end for end in self.ends if not any(word in end for word in self.divides))))


class MistralCalls(msgspec.Struct, frozen=True, kw_only=True):
    """``[TOOL_CALLS]`` and a list of objects, or since v11 a name, perhaps an id, and the arguments, for each call."""

    begins: tuple[str, ...] = ("[TOOL_CALLS]",)
    drops: tuple[str, ...] = ()
    named: bool = False  # as since v11; both are read
    alone: bool = False

    def inner(self) -> tuple[str, ...]:
        """See ``CallFormat``."""
        return ("[ARGS]", "[CALL_ID]")

    def read(self, reader: Reader, mark: str, tools: Tools) -> Steps[None]:
        """See ``CallFormat``."""
        if (yield from reader.skip_space()) in ("[", "{"):
            yield from read_objects(reader)
            return
        name, divided = yield from reader.until(Marks(("[ARGS]", "[CALL_ID]", "[TOOL_CALLS]")))
        identity = None
        if divided == "[CALL_ID]":
            identity, divided = yield from reader.until(Marks(("[ARGS]", "[TOOL_CALLS]")))
        if divided != "[ARGS]":
            raise NotACallError
        usable = identity is not None and len(identity) == 9 and identity.isalnum()
        yield CallBegun(checked_name(name), identity if usable else None)
        yield from reader.skip_space()
        yield from read_arguments(reader)


class PythonicCalls(msgspec.Struct, frozen=True, kw_only=True):
    """A message that is a list of Python calls of tools of the request (Llama 4)."""

    begins: tuple[str, ...] = ("<|python_start|>",)
    drops: tuple[str, ...] = ("<|python_end|>",)
    alone: bool = True

    def inner(self) -> tuple[str, ...]:
        """See ``CallFormat``."""
        return ()

    def read(self, reader: Reader, mark: str, tools: Tools) -> Steps[None]:
        """See ``CallFormat``."""
        yield from reader.skip_space()
        yield from read_list(reader, tools.parameters)


class ArrowCalls(msgspec.Struct, frozen=True, kw_only=True):
    """``>>>NAME`` and a new line before everything; what follows ``>>>all`` is content (Functionary 3.2)."""

    begins: tuple[str, ...] = (">>>",)
    drops: tuple[str, ...] = ()
    alone: bool = True  # the prompt ends with the first ">>>"

    def inner(self) -> tuple[str, ...]:
        """See ``CallFormat``."""
        return ()

    def read(self, reader: Reader, mark: str, tools: Tools) -> Steps[None]:
        """See ``CallFormat``."""
        head, line = yield from reader.until(Marks(("\n",)))
        if head == "all" and line:
            return
        if line is None or (not mark and head not in tools.parameters):
            raise NotACallError
        yield CallBegun(checked_name(head))
        yield from reader.copy_json(more)


def _pass_end(reader: Reader, ends: Iterable[str]) -> Steps[None]:
    yield from reader.skip_space()
    for end in ends:
        if (yield from reader.take(end)):
            return
