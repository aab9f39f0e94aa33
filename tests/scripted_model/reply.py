"""What the model writes in one turn, and how it writes that."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple


class Call(NamedTuple):
    """Of a tool."""

    name: str
    arguments: Mapping[str, Any]


class Reply(NamedTuple):
    """One turn."""

    reasoning: str
    text: str
    calls: tuple[Call, ...] = ()

    def text_of_model(self, *, thinks: bool) -> str:
        """As the model writes it, in the template's form."""
        parts = [f"<think>\n{self.reasoning}\n</think>\n\n"] if thinks and self.reasoning else []
        said = [self.text] if self.text else []
        said += [
            f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'
            for name, arguments in self.calls
        ]
        return "".join([*parts, "\n".join(said)])
