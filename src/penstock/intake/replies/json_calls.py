"""Tool calls written as JSON objects, one or a list of them, with the keys that the families use.

Arguments are passed on as the model wrote them, while it writes them.  NotACallError is raised for what is none, and
for what breaks off.  Knows no marks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from penstock.intake.replies.reader import CallBegun, CallMore, Event, NotACallError, Reader, Steps

_NAMES = frozenset({"name", "tool_name"})
_ARGUMENTS = frozenset({"arguments", "parameters"})


def more(text: str) -> Iterable[Event]:
    """A part of the arguments."""
    return (CallMore(text),)


def read_arguments(reader: Reader) -> Steps[None]:
    """A JSON value as the arguments of the call that began.  Some models write JSON in a string."""
    first = yield from reader.peek()
    if first == '"':
        yield CallMore((yield from reader.json_string()))
    elif first == "n":
        yield CallMore("{}")
        yield from reader.json_raw()
    else:
        yield from reader.copy_json(more)


def read_object(reader: Reader, known: Collection[str] | None = None) -> Steps[None]:
    """``{"name": ..., "arguments": ...}``, keys in any order; other keys are passed over.

    NotACallError also for a name that is not ``known``.
    """
    yield from reader.expect("{")
    begun, early, done = False, None, False
    while (char := (yield from reader.skip_space())) not in ("}", ""):
        if char == ",":
            yield from reader.expect(",")
            continue
        key = yield from reader.json_string()
        yield from reader.skip_space()
        yield from reader.expect(":")
        value = yield from reader.skip_space()
        if key == "function" and value == "{":
            yield from read_object(reader, known)
            begun = done = True
        elif key in _NAMES and not begun:
            name = yield from reader.json_string()
            if not name or (known is not None and name not in known):
                raise NotACallError
            begun = True
            yield CallBegun(name)
            if early is not None:
                yield CallMore(early)
                done = True
        elif key in _ARGUMENTS and begun and not done:
            yield from read_arguments(reader)
            done = True
        elif key in _ARGUMENTS and early is None:
            early = yield from reader.json_raw()
        else:
            yield from reader.json_raw()
    if not begun:
        raise NotACallError
    if char == "}":
        if not done:
            yield CallMore("{}")
        yield from reader.take("}")


def read_objects(reader: Reader, known: Collection[str] | None = None) -> Steps[None]:
    """One such object, or a list of them."""
    if (yield from reader.skip_space()) != "[":
        yield from read_object(reader, known)
        return
    yield from reader.expect("[")
    if (yield from reader.skip_space()) == "]":
        raise NotACallError
    yield from read_object(reader, known)
    yield from _rest(reader, read_object)


def read_named_objects(reader: Reader) -> Steps[None]:
    """A list of ``{"NAME": {...}}``."""
    yield from reader.skip_space()
    yield from reader.expect("[")
    yield from reader.skip_space()
    yield from _named_object(reader)
    yield from _rest(reader, _named_object)


def _named_object(reader: Reader) -> Steps[None]:
    yield from reader.expect("{")
    yield from reader.skip_space()
    name = yield from reader.json_string()
    yield from reader.skip_space()
    yield from reader.expect(":")
    yield from reader.skip_space()
    yield CallBegun(name)
    yield from read_arguments(reader)
    yield from reader.skip_space()
    yield from reader.take("}")


def _rest(reader: Reader, read: Callable[[Reader], Steps[None]]) -> Steps[None]:
    """The rest of a list."""
    while (char := (yield from reader.skip_space())) == ",":
        yield from reader.take(",")
        yield from reader.skip_space()
        yield from read(reader)
    if char == "]":
        yield from reader.take("]")
