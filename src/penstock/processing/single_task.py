"""What the request processors of single-task models share: refusing other tasks, and tokenizing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Never

import msgspec

from penstock.config.limits import RequestLimits
from penstock.errors import WrongTask
from penstock.interfaces import (
    JsonObject,
    ModelCard,
    PreparedGeneration,
    RequestContext,
    ResponseHistory,
    ResponsesRequest,
    TokenizeResult,
)
from penstock.processing.model_aliases import find_card, listed_cards
from penstock.processing.requests.generation import parse_detokenize, parse_tokenize
from penstock.processing.requests.sampling import ModelProperties
from penstock.processing.tokenizer.tokenizer import TextTokenizer
from penstock.types import AdapterRef


class TaskDescription(msgspec.Struct, frozen=True, kw_only=True):
    """What a model is made for, in the words of a refusal."""

    text: str  # what it does instead of writing what it is asked for: "generates no text"
    paths: str  # where it is asked


class SingleTaskProcessor(ABC):
    """The request processor of a model without chats, completions and adapters."""

    def __init__(
        self,
        card: ModelCard,
        purpose: TaskDescription,
        tokenizer: TextTokenizer,
        facts: ModelProperties,
        limits: RequestLimits,
    ) -> None:
        """``tokenizer`` is closed by ``close``."""
        self._card = card
        self._purpose = purpose
        self.tokenizer = tokenizer
        self.facts = facts
        self.limits = limits

    @abstractmethod
    async def encoded(self, text: str, *, special: bool) -> Sequence[int]:
        """Tokens of a text of ``/tokenize``, with those that stand around it where ``special``."""

    def close(self) -> None:
        """Lets the threads end."""
        self.tokenizer.close()

    def cards(self) -> Sequence[ModelCard]:
        return listed_cards(self._card, (), self.facts.requests.model_alias)

    def card(self, name: str) -> ModelCard | None:
        return find_card(self.cards(), name, self.facts.requests.model_alias)

    def model_name(self, body: JsonObject) -> str:
        """The model's name as a checked body has it, which may be an alias."""
        return str(body.get("model") or self.facts.name)

    def adapter(self, body: JsonObject) -> AdapterRef | None:
        """Always None."""
        return None

    async def load_adapter(self, body: JsonObject) -> JsonObject:
        """Always WrongTask."""
        self.refuse("has no adapters")

    async def unload_adapter(self, body: JsonObject) -> JsonObject:
        """Always WrongTask."""
        self.refuse("has no adapters")

    async def chat(self, body: JsonObject, envelope: RequestContext) -> PreparedGeneration:
        """Always WrongTask."""
        self.refuse(self._purpose.text)

    async def completion(self, body: JsonObject, envelope: RequestContext) -> PreparedGeneration:
        """Always WrongTask."""
        self.refuse(self._purpose.text)

    async def messages(self, body: JsonObject) -> JsonObject:
        """Always WrongTask."""
        self.refuse(self._purpose.text)

    async def count_message_tokens(self, body: JsonObject) -> int:
        """Always WrongTask."""
        self.refuse(self._purpose.text)

    async def responses(self, body: JsonObject, history: ResponseHistory) -> ResponsesRequest:
        """Always WrongTask."""
        self.refuse(self._purpose.text)

    async def tokenize(self, body: JsonObject) -> TokenizeResult:
        request = parse_tokenize(body, self.limits, self.facts)
        if not isinstance(request.input, str):
            self.refuse("has no chat template")
        tokens = await self.encoded(request.input, special=request.add_special_tokens)
        strings_of_tokens = self.tokenizer.token_strings(tokens) if request.token_strings else None
        return TokenizeResult(
            count=len(tokens), max_model_len=self.facts.max_model_len, tokens=list(tokens), token_strs=strings_of_tokens
        )

    async def detokenize(self, body: JsonObject) -> str:
        tokens = parse_detokenize(body, self.facts)
        return await self.tokenizer.run_sized(len(tokens), lambda: self.tokenizer.decode(tokens))

    def refuse(self, why: str) -> Never:
        """Raises WrongTask: "The model 'x' ``why``. Use ..."."""
        raise WrongTask(self.facts.name, why, self._purpose.paths)
