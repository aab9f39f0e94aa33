"""The request processor of pooling models: embeddings, reranking, classification.

Bodies are checked field by field as for chats; the texts of a request are encoded together, outside the event loop.
Knows nothing about HTTP or workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from penstock.config.limits import RequestLimits
from penstock.config.schema import RequestConfig
from penstock.errors import BadField, InputTooLong, ModelError, RequestError
from penstock.interfaces import JsonObject, ModelCard, PreparedPooling, RequestContext
from penstock.processing.requests.fields import (
    WRONG_TYPE,
    BodyFields,
    array,
    integer,
    refuse_unknown,
    string,
    token_ids,
)
from penstock.processing.requests.generation import Prompt, parse_model, texts_or_ids
from penstock.processing.requests.sampling import ModelProperties
from penstock.processing.single_task import SingleTaskProcessor, TaskDescription
from penstock.processing.tokenizer.tokenizer import SpecialTokenLayout, TextTokenizer
from penstock.types import PoolingParams, RequestId, SamplingParams, Task, ValidRequest, pack_token_ids
from penstock.weights.config_json import ConfigFields
from penstock.weights.model_files import CONFIG, TOKENIZER_CONFIG, load_json, model_files
from penstock.weights.pooling_config import SENTENCES

Input = Prompt
"""As of a completion; token ids have their special tokens already."""

EMBEDDINGS_FIELDS = frozenset(
    {
        *("model", "input", "encoding_format", "dimensions", "user"),
        *("prompt_name", "input_type", "normalize", "truncate_prompt_tokens"),
    }
)
RERANK_FIELDS = frozenset({"model", "query", "documents", "top_n", "return_documents", "max_tokens_per_doc", "user"})
CLASSIFY_FIELDS = frozenset({"model", "input", "truncate_prompt_tokens", "user"})


class EmbeddingsRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A checked body of ``/v1/embeddings``."""

    inputs: list[Input]
    base64: bool
    dimensions: int | None
    normalised: bool | None
    prompt_name: str | None
    cut: int | None  # tokens that a text may have; the rest is cut off.  None: too long a text is refused


class RerankRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A checked body of ``/rerank``."""

    query: str
    documents: list[str]
    top: int
    tell_documents: bool
    cut: int | None  # tokens that a document may have


class ClassifyRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A checked body of ``/classify``: texts, or pairs of them."""

    inputs: list[Input | tuple[str, str]]
    cut: int | None


def parse_embeddings(
    body: Mapping[str, Any], limits: RequestLimits, facts: ModelProperties, width: int
) -> EmbeddingsRequest:
    """``width``: numbers of a whole vector.  Raises RequestError."""
    refuse_unknown(body, EMBEDDINGS_FIELDS, facts.requests)
    fields = BodyFields(body)
    parse_model(fields, facts, required=True)
    form = fields.raw("encoding_format") or "float"
    if form not in ("float", "base64"):
        raise BadField("encoding_format", got=form, want="'float' or 'base64'")
    normalise = fields.raw("normalize")
    return EmbeddingsRequest(
        inputs=parse_inputs(fields.required("input"), limits, facts),
        base64=form == "base64",
        dimensions=fields.integer("dimensions", low=1, high=width),
        normalised=None if normalise is None else fields.boolean("normalize"),
        prompt_name=_prompt_name(fields),
        cut=_cut(fields, facts),
    )


def parse_rerank(body: Mapping[str, Any], limits: RequestLimits, facts: ModelProperties) -> RerankRequest:
    """Raises RequestError."""
    refuse_unknown(body, RERANK_FIELDS, facts.requests)
    fields = BodyFields(body)
    parse_model(fields, facts, required=False)
    query = string("query", fields.required("query"), max_chars=limits.max_body_bytes)
    if not query:
        raise BadField("query", got="", want="a string that is not empty", code="empty_string")
    given = array("documents", fields.required("documents"), max_items=limits.max_inputs, what="documents")
    if not given:
        raise BadField("documents", got="an empty array", want="at least one document", code="empty_array")
    documents = [_document(f"documents[{index}]", item, limits) for index, item in enumerate(given)]
    return RerankRequest(
        query=query,
        documents=documents,
        top=fields.integer("top_n", low=1, high=1 << 31) or len(documents),
        tell_documents=fields.boolean("return_documents"),
        cut=fields.integer("max_tokens_per_doc", low=1, high=1 << 31),
    )


def parse_classify(body: Mapping[str, Any], limits: RequestLimits, facts: ModelProperties) -> ClassifyRequest:
    """Raises RequestError."""
    refuse_unknown(body, CLASSIFY_FIELDS, facts.requests)
    fields = BodyFields(body)
    parse_model(fields, facts, required=False)
    value = fields.required("input")
    cut = _cut(fields, facts)
    if isinstance(value, dict):
        return ClassifyRequest(inputs=[_pair("input", value, limits)], cut=cut)
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        items = array("input", value, max_items=limits.max_inputs, what="inputs")
        return ClassifyRequest(inputs=[_pair(f"input[{i}]", item, limits) for i, item in enumerate(items)], cut=cut)
    return ClassifyRequest(inputs=[*parse_inputs(value, limits, facts)], cut=cut)


def parse_inputs(value: object, limits: RequestLimits, facts: ModelProperties) -> list[Input]:
    """At least one input, of any length: what is too long may be cut."""

    def parse_ids(where: str, ids: Sequence[Any]) -> tuple[int, ...]:
        return _ids(where, ids, facts)

    return texts_or_ids("input", value, limits.max_inputs, parse_ids)


def _ids(where: str, ids: Sequence[Any], facts: ModelProperties) -> tuple[int, ...]:
    if not ids:
        raise BadField(where, got="an empty array", want="at least one token id", code="empty_array")
    return token_ids(where, ids, vocabulary=facts.vocabulary)


def _pair(where: str, item: Any, limits: RequestLimits) -> tuple[str, str]:
    if not isinstance(item, dict) or set(item) != {"text", "text_pair"}:
        raise BadField(where, got=item, want="an object with 'text' and 'text_pair'", code=WRONG_TYPE)
    first, second = (string(f"{where}.{key}", item[key], max_chars=limits.max_body_bytes) for key in sorted(item))
    return first, second


def _document(where: str, item: Any, limits: RequestLimits) -> str:
    text = item.get("text") if isinstance(item, dict) and set(item) == {"text"} else item
    if not isinstance(text, str):
        raise BadField(where, got=item, want="a string or an object with 'text'", code=WRONG_TYPE)
    return string(where, text, max_chars=limits.max_body_bytes)


def _prompt_name(fields: BodyFields) -> str | None:
    """``input_type`` is what others call it."""
    for name in ("prompt_name", "input_type"):
        value = fields.string(name, max_chars=256)
        if value is not None:
            return value
    return None


def _cut(fields: BodyFields, facts: ModelProperties) -> int | None:
    """``truncate_prompt_tokens``: a count, or -1 for the model's context."""
    value = fields.raw("truncate_prompt_tokens")
    if value == -1 and type(value) is int:
        return facts.max_model_len
    if value is None:
        return None
    return integer("truncate_prompt_tokens", value, low=1, high=facts.max_model_len)


PROMPTS_FILE = "config_sentence_transformers.json"
READ_ONLY = SamplingParams(seed=0, max_tokens=1)

PromptTokens = tuple[int, ...]


class ServedPoolingModel(msgspec.Struct, frozen=True, kw_only=True):
    """What is served, as the composition root knows it."""

    card: ModelCard
    task: Task
    width: int  # numbers of a vector, or labels
    requests: RequestConfig = RequestConfig()


class PoolingModelProcessor(SingleTaskProcessor):
    """The request processor of one pooling model's folder."""

    def __init__(self, folder: Path, served: ServedPoolingModel, limits: RequestLimits) -> None:
        """Reads tokenizer, prompts and labels.  Raises ModelError."""
        self._served = served
        files = model_files(folder)
        values = load_json(files, CONFIG)
        if values is None:
            raise ModelError(f"{files.path_of(CONFIG)}: is missing")
        config = ConfigFields(values, files.path_of(CONFIG))
        tokenizer = TextTokenizer(folder, config=load_json(files, TOKENIZER_CONFIG) or {})
        self._framing = SpecialTokenLayout.of(tokenizer.probe)
        card = served.card
        facts = ModelProperties(
            name=card.name,
            max_model_len=card.max_model_len,
            vocabulary=config.positive_int("vocab_size"),
            end_tokens=(),
            requests=served.requests,
        )
        super().__init__(
            card, TaskDescription(text="generates no text", paths=_paths(served)), tokenizer, facts, limits
        )
        self._labels = _labels(config, served.width) if served.task is Task.CLASSIFY else ()
        prompts = ConfigFields(load_json(files, PROMPTS_FILE) or {}, files.path_of(PROMPTS_FILE))
        self._prompts = _prompts(prompts)
        self._default_prompt = prompts.get("default_prompt_name", str, "")
        sentences = ConfigFields(load_json(files, SENTENCES) or {}, files.path_of(SENTENCES))
        self._lower = sentences.get("do_lower_case", bool, False)

    # --- what it is for -----------------------------------------------------------------------------------------------

    async def embeddings(self, body: JsonObject, envelope: RequestContext) -> PreparedPooling:
        if self._served.task is not Task.EMBED:
            self.refuse("makes no embeddings")
        call = parse_embeddings(body, self.limits, self.facts, self._served.width)
        texts = self._with_prompt(call.inputs, call.prompt_name)
        tokens = await self._whole("input", texts, call.cut)
        wanted = PoolingParams(dimensions=call.dimensions, normalised=call.normalised)
        return self._work(envelope, [(own, wanted) for own in tokens], model=self.model_name(body), base64=call.base64)

    async def rerank(self, body: JsonObject, envelope: RequestContext) -> PreparedPooling:
        if self._served.task is not Task.CLASSIFY or self._served.width != 1:
            self.refuse("ranks no documents: a model with one label does")
        call = parse_rerank(body, self.limits, self.facts)
        query, *documents = await self._encode([call.query, *call.documents])
        room = self.facts.max_model_len - self._framing.special_counts[1] - len(query)
        if room < 1:
            raise InputTooLong("query", tokens=len(query), limit=len(query) + room - 1)
        room = min(room, call.cut or room)
        pairs = [self._framing.wrap_pair(query, document[:room]) for document in documents]
        return self._work(
            envelope,
            [(tokens, PoolingParams(second=second)) for tokens, second in pairs],
            model=self.model_name(body),
            documents=tuple(call.documents) if call.tell_documents else None,
            top_n=call.top,
        )

    async def classify(self, body: JsonObject, envelope: RequestContext) -> PreparedPooling:
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
            envelope,
            [(tokens, PoolingParams(second=second)) for tokens, second in read],
            model=self.model_name(body),
            labels=self._labels,
        )

    async def encoded(self, text: str, *, special: bool) -> Sequence[int]:
        (tokens,) = await self._encode([text])
        return self._framing.wrap(tokens) if special else tokens

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

    async def _encode(self, texts: Sequence[str]) -> list[PromptTokens]:
        """Without special tokens; on a thread unless they are short."""
        if self._lower:
            texts = [text.lower() for text in texts]
        read = await self.tokenizer.run_sized(sum(map(len, texts)), lambda: self.tokenizer.encode_many(texts))
        largest = max((max(tokens, default=0) for tokens in read), default=0)
        if largest >= self.facts.vocabulary:
            raise RequestError(
                f"The text has a token that the model does not know: {largest}, of {self.facts.vocabulary}.",
                param="input",
                code="unknown_token",
            )
        return read

    async def _whole(self, name: str, inputs: Sequence[Input], cut: int | None) -> list[PromptTokens]:
        """Every input as the model reads it.  Token ids are taken as they are."""
        limit, around = cut or self.facts.max_model_len, self._framing.special_counts[0]
        if cut is None:
            self._check_sizes(name, inputs)
        texts = iter(await self._encode([item for item in inputs if isinstance(item, str)]))
        read: list[PromptTokens] = []
        for index, item in enumerate(inputs):
            where = name if len(inputs) == 1 else f"{name}[{index}]"
            own, room = (next(texts), limit - around) if isinstance(item, str) else (item, limit)
            if len(own) > room and cut is None:
                raise InputTooLong(where, tokens=len(own) + limit - room, limit=limit)
            own = own[: max(room, 0)]
            read.append(self._framing.wrap(own) if isinstance(item, str) else own)
        return read

    def _check_sizes(self, name: str, inputs: Sequence[Input]) -> None:
        """Refuses what cannot fit before any of it is read."""
        for index, item in enumerate(inputs):
            limit = self.facts.max_model_len
            least = self.tokenizer.min_tokens(len(item), limit) if isinstance(item, str) else None
            if least is not None and least > limit:
                raise InputTooLong(f"{name}[{index}]", tokens=least, limit=limit, at_least=True)

    async def _pairs(self, pairs: Sequence[tuple[str, str]], cut: int | None) -> list[tuple[PromptTokens, int | None]]:
        """Two texts each; the second is what is cut."""
        read = iter(await self._encode([text for pair in pairs for text in pair]))
        limit = cut or self.facts.max_model_len
        framed = []
        for index, (first, second) in enumerate(zip(read, read, strict=True)):
            room = limit - self._framing.special_counts[1] - len(first)
            if room < 1 or (cut is None and len(second) > room):
                tokens = len(first) + len(second) + self._framing.special_counts[1]
                raise InputTooLong(f"input[{index}]", tokens=tokens, limit=limit)
            framed.append(self._framing.wrap_pair(first, second[:room]))
        return framed

    def _work(
        self, envelope: RequestContext, texts: Iterable[tuple[PromptTokens, PoolingParams]], *, model: str, **reply: Any
    ) -> PreparedPooling:
        requests = tuple(
            ValidRequest(
                id=RequestId(f"{envelope.id}/{index}"),
                prompt=pack_token_ids(tokens),
                block_hashes=(),
                sampling=READ_ONLY,
                arrival=envelope.arrival,
                qos=envelope.caller.qos(),
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
        return PreparedPooling(requests=requests, model=model, **reply)


def _paths(served: ServedPoolingModel) -> str:
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
