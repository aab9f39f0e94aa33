"""The events of ``/v1/responses``: output items that open, grow and close, numbered in order.

::

    response.created, response.in_progress
      response.output_item.added          an item: reasoning, message, function_call or custom_tool_call
        [response.content_part.added]     of reasoning and messages
          ...delta, ...done               its text, arguments or input
        [response.content_part.done]
      response.output_item.done
    response.completed | response.incomplete | response.failed

One item is open at a time.  Knows nothing about requests or tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from penstock.api.errors import ErrorResponse
from penstock.api.response_format import StreamEvent, encode
from penstock.api.sse import sse_event_without_id
from penstock.interfaces import ToolTarget

_IDS = {"reasoning": "rs_", "message": "msg_", "function_call": "fc_", "custom_tool_call": "ctc_"}


def item_id(kind: str, response: str, index: int) -> str:
    """Names its response, which it is found by."""
    return f"{_IDS[kind]}{response.removeprefix('resp_')}_{index}"


def response_of_item(name: str) -> str | None:
    """The id of the response that has an output item; None for the id of anything else."""
    kind, _, rest = name.partition("_")
    response, _, index = rest.rpartition("_")
    return f"resp_{response}" if f"{kind}_" in _IDS.values() and response and index.isdigit() else None


LAST_NUMBER = (1 << 53) - 1


def responses_error_event(error: ErrorResponse) -> bytes:
    """The last event of a stream whose earlier events were not read here; its number is above theirs."""
    fields = {"code": error.code, "message": error.message, "param": error.param}
    return sse_event_without_id(encode({"type": "error", "sequence_number": LAST_NUMBER, **fields}), b"error")


class OutputItem:
    """One item of a response's output: its text so far, and its JSON."""

    def __init__(self, kind: str, response: str, index: int, **fields: Any) -> None:
        """``fields``: more of its JSON, besides what grows."""
        self.kind = kind
        self.id = item_id(kind, response, index)
        self.index = index
        self.logprobs: list[Any] = []
        self._fields = fields
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        """What has come of it."""
        return "".join(self._texts)

    def add(self, text: str) -> None:
        """It grows."""
        self._texts.append(text)

    def part(self, text: str) -> dict[str, Any]:
        """Its content part with ``text``."""
        if self.kind == "message":
            return {"type": "output_text", "text": text, "annotations": [], "logprobs": self.logprobs if text else []}
        return {"type": "summary_text" if self._fields.get("summary") else "reasoning_text", "text": text}

    def json(self, status: str) -> dict[str, Any]:
        """The item; without its text while it is ``in_progress``."""
        fields, text = self._fields, "" if status == "in_progress" else self.text
        item: dict[str, Any] = {"id": self.id, "type": self.kind, "status": status}
        match self.kind:
            case "message":
                return item | {"role": "assistant", "content": [self.part(text)] if status != "in_progress" else []}
            case "reasoning":
                parts = [self.part(text)] if text else []
                item |= {"summary": parts, "content": []} if fields["summary"] else {"summary": [], "content": parts}
                sealed = fields["seal"](text) if fields["seal"] and text else None
                return item | {"encrypted_content": sealed}
            case "function_call":
                item["arguments"] = text
            case _:
                item["input"] = text
        target: ToolTarget = fields["target"]
        named = {"call_id": fields["call_id"], "name": target.name}
        return item | named | ({} if target.namespace is None else {"namespace": target.namespace})


class _DeltaTemplate:
    """The constant bytes of an item's delta events."""

    __slots__ = ("_before", "_behind", "_name")

    def __init__(self, name: str, item: OutputItem, place: Mapping[str, int]) -> None:
        fixed = {"item_id": item.id, "output_index": item.index, **place}
        self._name = name.encode()
        self._before = f'{{"type":"{name}",'.encode() + encode(fixed)[1:-1] + b',"sequence_number":'
        self._behind = b',"logprobs":%b}' if item.kind == "message" else b"}"

    def event(self, number: int, text: str, logprobs: list[Any]) -> StreamEvent:
        behind = self._behind % encode(logprobs) if len(self._behind) > 1 else self._behind
        return StreamEvent(b'%b%d,"delta":%b%b' % (self._before, number, encode(text), behind), self._name)


class ResponseEvents:
    """Writes the events of one response.  ``events`` collects them until they are taken."""

    def __init__(self, response: str, snapshot: Callable[..., bytes]) -> None:
        """``snapshot(status, output, ...)``: the JSON of the response."""
        self.response = response
        self.output: list[dict[str, Any]] = []
        self.deltas: list[list[int]] = []  # characters of each delta of each item
        self.item: OutputItem | None = None
        self.number = 0
        self._snapshot = snapshot
        self._events: list[StreamEvent] = []
        self._template: _DeltaTemplate | None = None

    def pop_events(self) -> list[StreamEvent]:
        """The events since it was called last."""
        events, self._events = self._events, []
        return events

    def skip_to(self, number: int) -> None:
        """Numbers go on from this one at least."""
        self.number = max(self.number, number)

    def lifecycle(self, name: str, status: str, **fields: Any) -> bytes:
        """An event with the response, which is returned as well."""
        response = self._snapshot(status, self.output, **fields)
        self._write(name, b'"response":' + response)
        return response

    def open(self, kind: str, **fields: Any) -> OutputItem:
        """The next item.  No other may be open."""
        assert self.item is None, "one item is open at a time"
        item = self.item = OutputItem(kind, self.response, len(self.output), **fields)
        self.deltas.append([])
        self._place("response.output_item.added", item=item.json("in_progress"))
        names = _names(item)
        if names.part is not None:
            self._place(f"{names.part}.added", **self._where(), part=item.part(""))
        self._template = _DeltaTemplate(f"{names.text}.delta", item, names.place)
        return item

    def grow(self, text: str, logprobs: list[Any] | None = None) -> None:
        """More of the open item."""
        item, template = self.item, self._template
        assert item is not None
        assert template is not None
        item.add(text)
        item.logprobs += logprobs or ()
        self.deltas[-1].append(len(text))
        self._events.append(template.event(self.number, text, logprobs or []))
        self.number += 1

    def close(self, status: str = "completed") -> None:
        """The open item has ended."""
        item = self.item
        assert item is not None
        names, text = _names(item), item.text
        done: dict[str, Any] = {names.field: text}
        if item.kind == "message":
            done["logprobs"] = item.logprobs
        elif item.kind == "function_call":
            done["name"] = item.json("completed")["name"]
        self._place(f"{names.text}.done", **self._where(), **done)
        if names.part is not None:
            self._place(f"{names.part}.done", **self._where(), part=item.part(text))
        whole = item.json(status)
        self._place("response.output_item.done", item=whole)
        self.output.append(whole)
        self.item = self._template = None

    def _where(self) -> dict[str, Any]:
        assert self.item is not None
        return {"item_id": self.item.id, **_names(self.item).place}

    def _place(self, name: str, /, **fields: Any) -> None:
        assert self.item is not None
        self._write(name, encode({"output_index": self.item.index, **fields})[1:-1])

    def _write(self, name: str, fields: bytes) -> None:
        data = b'{"type":"%b","sequence_number":%d,%b}' % (name.encode(), self.number, fields)
        self._events.append(StreamEvent(data, name.encode()))
        self.number += 1


class _ItemNames:
    """How the events of one kind of item are called."""

    def __init__(self, text: str, field: str, part: str | None, place: Mapping[str, int]) -> None:
        self.text = f"response.{text}"
        self.field = field  # of the done event
        self.part = None if part is None else f"response.{part}"
        self.place = place


_CONTENT = {"content_index": 0}
_NAMES = {
    "message": _ItemNames("output_text", "text", "content_part", _CONTENT),
    "reasoning": _ItemNames("reasoning_text", "text", "content_part", _CONTENT),
    "summary": _ItemNames("reasoning_summary_text", "text", "reasoning_summary_part", {"summary_index": 0}),
    "function_call": _ItemNames("function_call_arguments", "arguments", None, {}),
    "custom_tool_call": _ItemNames("custom_tool_call_input", "input", None, {}),
}


def _names(item: OutputItem) -> _ItemNames:
    summary = item.kind == "reasoning" and item.part("")["type"] == "summary_text"
    return _NAMES["summary" if summary else item.kind]


_ESCAPES = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}


class CustomInputDecoder:
    """Decodes the input of a custom tool out of the arguments of a function, ``{"input": "..."}``, as they come.

    Arguments of another form are decoded at their end: the one text that they have, else all as it was written.
    """

    def __init__(self, argument: str) -> None:
        self._begin = f'{{"{argument}":"'
        self._argument = argument
        self._raw: list[str] = []
        self._held = ""  # not decoded yet: space-free start of the object, or part of an escape
        self._matched = 0
        self._state = "before"

    def push(self, text: str) -> str:
        """What more of the input is known."""
        self._raw.append(text)
        if self._state == "before":
            text = self._match(text)
        return self._decode(text) if self._state == "inside" else ""

    def finish(self) -> str:
        """The rest, at the end of the arguments."""
        if self._state in ("inside", "behind"):
            return ""
        raw = "".join(self._raw)
        try:
            value = json.loads(raw)
        except (ValueError, RecursionError):
            return "" if self._state == "before" else raw
        texts = [item for item in value.values() if isinstance(item, str)] if isinstance(value, dict) else []
        return texts[0] if len(texts) == 1 else raw

    def _match(self, text: str) -> str:
        """Consumes the beginning of the object; what stands behind it."""
        for at, char in enumerate(text):
            if self._matched == len(self._begin):
                self._state = "inside"
                return text[at:]
            if char == self._begin[self._matched]:
                self._matched += 1
            elif not (char.isspace() and self._between_tokens()):
                self._state = "other"
                return ""
        if self._matched == len(self._begin):
            self._state = "inside"
        return ""

    def _between_tokens(self) -> bool:
        """Whether white space may come now."""
        return self._matched in (0, 1, len(self._begin) - 2, len(self._begin) - 1)

    def _decode(self, text: str) -> str:
        text, out, at = self._held + text, [], 0
        self._held = ""
        while at < len(text):
            quote, escape = text.find('"', at), text.find("\\", at)
            end = min((place for place in (quote, escape) if place >= 0), default=len(text))
            out.append(text[at:end])
            if end == len(text):
                break
            if end == quote:
                self._state = "behind"
                break
            taken, char = _unescaped(text, end)
            if taken == 0:
                self._held = text[end:]
                break
            out.append(char)
            at = end + taken
        return "".join(out)


def _unescaped(text: str, at: int) -> tuple[int, str]:
    """Length and meaning of the escape at ``at``; 0 when more is needed to know."""
    if len(text) < at + 2:
        return 0, ""
    kind = text[at + 1]
    if kind != "u":
        return 2, _ESCAPES.get(kind, kind)
    first = _code_unit(text, at)
    if first is None:
        return (0, "") if len(text) < at + 6 else (2, "\ufffd")
    if not 0xD800 <= first < 0xE000:
        return 6, chr(first)
    if first >= 0xDC00:
        return 6, "\ufffd"
    if len(text) < at + 12 and text[at + 6 : at + 8] in ("", "\\", "\\u"):
        return 0, ""
    second = _code_unit(text, at + 6) if text[at + 6 : at + 8] == "\\u" else None
    if second is None or not 0xDC00 <= second < 0xE000:
        return 6, "\ufffd"
    return 12, chr(0x10000 + ((first - 0xD800) << 10) + (second - 0xDC00))


def _code_unit(text: str, at: int) -> int | None:
    digits = text[at + 2 : at + 6]
    return int(digits, 16) if len(digits) == 4 and all(char in "0123456789abcdefABCDEF" for char in digits) else None
