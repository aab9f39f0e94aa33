"""A conversation, read back from the tokens of its prompt as Qwen 3's template writes it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer

BEGIN, END = "<|im_start|>", "<|im_end|>"
NO_THINKING = "<think>\n\n</think>\n\n"
_TOOLS = re.compile(r"\n<tools>\n(.*)\n</tools>", re.DOTALL)
_RESULT = re.compile(r"<tool_response>\n(.*?)\n</tool_response>", re.DOTALL)
_CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)


@dataclass(frozen=True)
class Turn:
    """One message."""

    role: str
    text: str

    @cached_property
    def results(self) -> list[str]:
        """Of tools, in a message that has them."""
        return _RESULT.findall(self.text) if self.role == "user" else []

    @cached_property
    def calls(self) -> list[dict[str, Any]]:
        """Of tools, by the assistant."""
        return [json.loads(call) for call in _CALL.findall(self.text)] if self.role == "assistant" else []


@dataclass(frozen=True)
class Conversation:
    """What the model is asked."""

    turns: Sequence[Turn]
    thinks: bool  # the prompt leaves thinking to the model
    constrained: bool = field(default=False)  # by a grammar: the answer's form was asked for

    @classmethod
    def read(cls, prompt: Sequence[int], tokenizer: Tokenizer, *, constrained: bool = False) -> Conversation:
        """Control tokens divide it, not texts that look like them: those are a client's."""
        begin, end = (tokenizer.token_to_id(mark) for mark in (BEGIN, END))
        starts = [at for at, token in enumerate(prompt) if token == begin]
        turns: list[Turn] = []
        for start, stop in zip(starts, [*starts[1:], len(prompt)], strict=True):
            ids = list(prompt[start + 1 : stop])
            if end in ids:
                ids = ids[: len(ids) - 1 - ids[::-1].index(end)]
            role, _, text = tokenizer.decode(ids, skip_special_tokens=False).partition("\n")
            turns.append(Turn(role, text))
        opened = turns.pop() if turns else Turn("assistant", "")
        assert opened.role == "assistant", f"the prompt ends with a message of {opened.role}"
        return cls(turns, thinks=not opened.text, constrained=constrained)

    @cached_property
    def system(self) -> str:
        """Of all system messages."""
        return "\n".join(turn.text for turn in self.turns if turn.role == "system")

    @cached_property
    def tools(self) -> dict[str, dict[str, Any]]:
        """The functions that are offered, by name."""
        found = _TOOLS.search(self.system)
        listed = [json.loads(line) for line in found[1].splitlines()] if found else []
        return {tool["function"]["name"]: tool["function"] for tool in listed}

    @cached_property
    def _asked_at(self) -> int:
        """Of the user's last message that has words of the user."""
        own = [at for at, turn in enumerate(self.turns) if turn.role == "user" and not turn.results]
        return own[-1] if own else -1

    @cached_property
    def ask(self) -> str:
        """What the user said last."""
        return self.turns[self._asked_at].text if self._asked_at >= 0 else ""

    @cached_property
    def results(self) -> list[list[str]]:
        """What tools gave since then, round by round."""
        return [turn.results for turn in self.turns[self._asked_at + 1 :] if turn.results]

    @cached_property
    def calls(self) -> list[dict[str, Any]]:
        """What was called since then."""
        return [call for turn in self.turns[self._asked_at + 1 :] for call in turn.calls]
