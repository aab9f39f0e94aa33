"""The intake of models that only read: embeddings, reranking, classification.

Texts are encoded beside the event loop, all of a request together.  Knows nothing about HTTP or workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from penstock.config.limits import Limits
from penstock.config.schema import RequestConfig
from penstock.errors import BadField, InputTooLong, ModelError, RequestError
from penstock.intake.framing import Framing
from penstock.intake.pool_fields import Input, parse_classify, parse_embeddings, parse_rerank
from penstock.intake.sampling_fields import ModelFacts
from penstock.intake.single_task import Purpose, SingleTaskIntake
from penstock.intake.tokenizer import TextTokenizer
from penstock.types import PoolingParams, RequestId, SamplingParams, Task, ValidRequest, pack_token_ids
from penstock.weights.config_json import ConfigFields
from penstock.weights.model_files import CONFIG, TOKENIZER_CONFIG, load_json, model_files
from penstock.weights.pooling import SENTENCES
from penstock.wire.ports import Envelope, JsonObject, ModelCard, PoolWork

PROMPTS = "config_sentence_transformers.json"
READ_ONLY = SamplingParams(seed=0, max_tokens=1)

Tokens = tuple[int, ...]


class ReaderFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What is served, as the composition root knows it."""

    card: ModelCard
    task: Task
    width: int  # numbers of a vector, or labels
    requests: RequestConfig = RequestConfig()


class ReadingIntake(SingleTaskIntake):
    """``wire.ports.Intake`` and ``wire.ports.Pools`` for one model folder."""

    def __init__(self, folder: Path, served: ReaderFacts, limits: Limits) -> None:
        """Reads tokenizer, prompts and labels.  Raises ModelError."""
        self._served = served
        files = model_files(folder)
        values = load_json(files, CONFIG)
        if values is None:
            raise ModelError(f"{files.path_of(CONFIG)}: is missing")
        config = ConfigFields(values, files.path_of(CONFIG))
        tokenizer = TextTokenizer(folder, config=load_json(files, TOKENIZER_CONFIG) or {})
        self._framing = Framing.of(tokenizer.probe)
        card = served.card
        facts = ModelFacts(
            name=card.name,
            max_model_len=card.max_model_len,
            vocabulary=config.positive_int("vocab_size"),
            end_tokens=(),
            requests=served.requests,
        )
        super().__init__(card, Purpose(text="generates no text", paths=_paths(served)), tokenizer, facts, limits)
        self._labels = _labels(config, served.width) if served.task is Task.CLASSIFY else ()
        prompts = ConfigFields(load_json(files, PROMPTS) or {}, files.path_of(PROMPTS))
        self._prompts = _prompts(prompts)
        self._default_prompt = prompts.get("default_prompt_name", str, "")
        sentences = ConfigFields(load_json(files, SENTENCES) or {}, files.path_of(SENTENCES))
        self._lower = sentences.get("do_lower_case", bool, False)

    # --- what it is for -----------------------------------------------------------------------------------------------

    async def embeddings(self, body: JsonObject, envelope: Envelope) -> PoolWork:
        """See ``wire.ports.Pools``."""
        if self._served.task is not Task.EMBED:
            self.refuse("makes no embeddings")
        call = parse_embeddings(body, self.limits, self.facts, self._served.width)
        texts = self._with_prompt(call.inputs, call.prompt_name)
        tokens = await self._whole("input", texts, call.cut)
        wanted = PoolingParams(dimensions=call.dimensions, normalised=call.normalised)
        return self._work(envelope, [(own, wanted) for own in tokens], base64=call.base64)

    async def rerank(self, body: JsonObject, envelope: Envelope) -> PoolWork:
        """See ``wire.ports.Pools``."""
        if self._served.task is not Task.CLASSIFY or self._served.width != 1:
            self.refuse("ranks no documents: a model with one label does")
        call = parse_rerank(body, self.limits, self.facts)
        query, *documents = await self._encode([call.query, *call.documents])
        room = self.facts.max_model_len - self._framing.room_taken[1] - len(query)
        if room < 1:
            raise InputTooLong("query", tokens=len(query), limit=len(query) + room - 1)
        room = min(room, call.cut or room)
        pairs = [self._framing.around_both(query, document[:room]) for document in documents]
        return self._work(
            envelope,
            [(tokens, PoolingParams(second=second)) for tokens, second in pairs],
            documents=tuple(call.documents) if call.tell_documents else None,
            top=call.top,
        )

    async def classify(self, body: JsonObject, envelope: Envelope) -> PoolWork:
        """See ``wire.ports.Pools``."""
        if self._served.task is not Task.CLASSIFY:
            self.refuse("has no labels")
        call = parse_classify(body, self.limits, self.facts)
        pairs = [item for item in call.inputs if isinstance(item, tuple) and item and isinstance(item[0], str)]
        if pairs:
            read = await self._pairs([(str(a), str(b)) for a, b in pairs], call.cut)
        else:
            singles: list[Any] = call.inputs
            read = [(tokens, None) for tokens in await self._whole("input", singles, call.cut)]
        return self._work(
            envelope, [(tokens, PoolingParams(second=second)) for tokens, second in read], labels=self._labels
        )

    async def encoded(self, text: str, *, special: bool) -> Sequence[int]:
        """See ``SingleTaskIntake``."""
        (tokens,) = await self._encode([text])
        return self._framing.around(tokens) if special else tokens

    # --- inside -------------------------------------------------------------------------------------------------------

    def _with_prompt(self, inputs: Sequence[Input], name: str | None) -> list[Input]:
        """What the model's makers put in front of a text of this kind."""
        if name is not None and name not in self._prompts:
            known = ", ".join(f"'{own}'" for own in self._prompts) or "none: this model has no prompts"
            raise BadField("prompt_name", got=name, want=f"one of {known}")
        prompt = self._prompts.get(name or self._default_prompt, "")
        if prompt and name is not None and not all(isinstance(item, str) for item in inputs):
            raise BadField("prompt_name", got=name, want="inputs that are text, which the prompt can be put before")
        return [prompt + item if isinstance(item, str) else item for item in inputs]

    async def _encode(self, texts: Sequence[str]) -> list[Tokens]:
        """Without special tokens; on a thread unless they are short."""
        if self._lower:
            texts = [text.lower() for text in texts]
        read = await self.tokenizer.run(sum(map(len, texts)), lambda: self.tokenizer.encode_many(texts))
        largest = max((max(tokens, default=0) for tokens in read), default=0)
        if largest >= self.facts.vocabulary:
            raise RequestError(
                f"The text has a token that the model does not know: {largest}, of {self.facts.vocabulary}.",
                param="input",
                code="unknown_token",
            )
        return read

    async def _whole(self, name: str, inputs: Sequence[Input], cut: int | None) -> list[Tokens]:
        """Every input as the model reads it.  Token ids are taken as they are."""
        limit, around = cut or self.facts.max_model_len, self._framing.room_taken[0]
        if cut is None:
            self._check_sizes(name, inputs)
        texts = iter(await self._encode([item for item in inputs if isinstance(item, str)]))
        read: list[Tokens] = []
        for index, item in enumerate(inputs):
            where = name if len(inputs) == 1 else f"{name}[{index}]"
            own, room = (next(texts), limit - around) if isinstance(item, str) else (item, limit)
            if len(own) > room and cut is None:
                raise InputTooLong(where, tokens=len(own) + limit - room, limit=limit)
            own = own[: max(room, 0)]
            read.append(self._framing.around(own) if isinstance(item, str) else own)
        return read

    def _check_sizes(self, name: str, inputs: Sequence[Input]) -> None:
        """Refuses what cannot fit before any of it is read."""
        for index, item in enumerate(inputs):
            limit = self.facts.max_model_len
            least = self.tokenizer.at_least(len(item), limit) if isinstance(item, str) else None
            if least is not None and least > limit:
                raise InputTooLong(f"{name}[{index}]", tokens=least, limit=limit, at_least=True)

    async def _pairs(self, pairs: Sequence[tuple[str, str]], cut: int | None) -> list[tuple[Tokens, int | None]]:
        """Two texts each; the second is what is cut."""
        read = iter(await self._encode([text for pair in pairs for text in pair]))
        limit = cut or self.facts.max_model_len
        framed = []
        for index, (first, second) in enumerate(zip(read, read, strict=True)):
            room = limit - self._framing.room_taken[1] - len(first)
            if room < 1 or (cut is None and len(second) > room):
                tokens = len(first) + len(second) + self._framing.room_taken[1]
                raise InputTooLong(f"input[{index}]", tokens=tokens, limit=limit)
            framed.append(self._framing.around_both(first, second[:room]))
        return framed

    def _work(self, envelope: Envelope, texts: Iterable[tuple[Tokens, PoolingParams]], **reply: Any) -> PoolWork:
        requests = tuple(
            ValidRequest(
                id=RequestId(f"{envelope.id}/{index}"),
                prompt=pack_token_ids(tokens),
                block_hashes=(),
                sampling=READ_ONLY,
                arrival=envelope.arrival,
                claim=envelope.caller.claim(),
                pooling=wanted,
            )
            for index, (tokens, wanted) in enumerate(texts)
        )
        if not all(request.prompt for request in requests):
            raise RequestError("A text of this request is empty: it has no tokens.", param="input", code="empty_prompt")
        total = sum(len(request.prompt) for request in requests)
        if total > self.limits.max_input_tokens:
            raise RequestError(
                f"The inputs of this request have {total} tokens together, the limit is "
                f"{self.limits.max_input_tokens} ('max_input_tokens'). Send them in several requests.",
                param="input",
                code="max_tokens_per_request",
            )
        return PoolWork(requests=requests, model=self.facts.name, **reply)


def _paths(served: ReaderFacts) -> str:
    """What it answers."""
    if served.task is Task.EMBED:
        return "/v1/embeddings"
    return "/classify or /rerank" if served.width == 1 else "/classify"


def _labels(config: ConfigFields, count: int) -> tuple[str, ...]:
    """Their names by number."""
    names = config.get("id2label", dict, {})
    return tuple(str(names.get(str(index), f"LABEL_{index}")) for index in range(count))


def _prompts(config: ConfigFields) -> dict[str, str]:
    prompts = config.get("prompts", dict, {})
    if not all(isinstance(text, str) for text in prompts.values()):
        raise config.error("prompts must be texts by name")
    return prompts
