"""The request processor of a generation model: parsed JSON to engine requests and their detokenizers.

Long texts are rendered and encoded on threads, without the interpreter lock where possible; hashing yields to the
event loop every few blocks.  Knows nothing about HTTP or workers.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from penstock.config.limits import RequestLimits
from penstock.config.schema import InputFeatures, RequestConfig
from penstock.errors import BadField, GrammarRefused, ModelError, PromptTooLong, RequestError
from penstock.grammar.checker_client import GrammarChecker
from penstock.grammar.checker_process import CheckLimits
from penstock.grammar.matcher import GrammarVocabulary
from penstock.hashing import block_hashes, chain_root
from penstock.interfaces import (
    JsonObject,
    ModelCard,
    PreparedGeneration,
    RequestContext,
    ResponseHistory,
    ResponseOptions,
    ResponsesRequest,
    TokenizeResult,
)
from penstock.kernels.host_ops import hash_blocks
from penstock.processing.chat.render import ChatRenderer, RenderedPrompt, RenderOptions
from penstock.processing.chat.template import ChatTemplates, Conversation, TemplateLimits, load_template_sources
from penstock.processing.detokenizer import IncrementalDetokenizer, OutputOptions, PromptEcho, decode_prompt
from penstock.processing.lora import LoraRegistry, SharedAdapterNames
from penstock.processing.model_aliases import find_card, listed_cards, served_model
from penstock.processing.multimodal.image_fetch import ImageFetcher
from penstock.processing.multimodal.image_preprocessing import pillow_installed, read_image_config
from penstock.processing.multimodal.images import ImagePipeline, MultimodalPrompt
from penstock.processing.requests.anthropic import MessagesOptions, messages_chat
from penstock.processing.requests.fields import BodyFields, unsupported, weights
from penstock.processing.requests.generation import (
    ChatInput,
    ChatRequest,
    GenerationFields,
    Prompt,
    parse_chat,
    parse_completion,
    parse_detokenize,
    parse_model,
    parse_tokenize,
)
from penstock.processing.requests.messages import content_chars
from penstock.processing.requests.responses import translate_responses
from penstock.processing.requests.sampling import ModelProperties, SamplingFields
from penstock.processing.requests.skipped import SkippedKinds
from penstock.processing.requests.tools_and_grammar import RequestedGrammar
from penstock.processing.tokenizer.tokenizer import TextTokenizer
from penstock.types import (
    PAGE_TOKENS,
    AdapterRef,
    BlockHash,
    Grammar,
    RequestId,
    SamplingParams,
    ValidRequest,
    pack_token_ids,
)
from penstock.weights.config_json import SamplingDefaults, sampling_defaults
from penstock.weights.model_files import CONFIG, GENERATION_CONFIG, TOKENIZER_CONFIG, ModelFiles, model_files


def read_json(files: ModelFiles, name: str, *, required: bool = True) -> dict[str, Any]:
    """The object in a file; empty if there is none and none is required.  Raises ModelError."""
    raw, path = files.read(name), files.path_of(name)
    if raw is None:
        if required:
            raise ModelError(f"{path} is missing.")
        return {}
    try:
        value = json.loads(raw)
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object.")
    return value


def named_tokens(*sources: dict[str, Any]) -> dict[str, str]:
    """``bos_token`` and its like, as text; the first source that names one counts."""
    named: dict[str, str] = {}
    for source in sources:
        for key, value in source.items():
            text = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(text, str):
                named.setdefault(key, text)
    return named


def _text_part(config: dict[str, Any]) -> dict[str, Any]:
    """Where the configuration of a model that also sees has what concerns text."""
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else {}


def vocabulary_size(config: dict[str, Any]) -> int:
    """Rows of the embedding.  Raises ModelError."""
    size = config.get("vocab_size", _text_part(config).get("vocab_size"))
    if type(size) is not int or size < 1:
        raise ModelError("config.json has no vocab_size.")
    return size


def end_tokens(files: ModelFiles, config: dict[str, Any], eos_token: int | None) -> tuple[int, ...]:
    """Ids that end an answer: generation_config.json's, else config.json's, and the tokenizer's own.

    Those that the model can draw: a tokenizer may know more tokens than its model.
    """
    generation = read_json(files, GENERATION_CONFIG, required=False)
    given = generation.get("eos_token_id", config.get("eos_token_id", _text_part(config).get("eos_token_id")))
    ids = given if isinstance(given, list) else [given]
    known = range(vocabulary_size(config))
    return tuple(dict.fromkeys(token for token in (*ids, eos_token) if type(token) is int and token in known))


_TOKENS_HASHED_AT_A_TIME = 4096 * PAGE_TOKENS
_HASHES_AT_A_TIME = 512
"""Before others get a turn: some 0.5 ms, of text alone and of blocks that may show images."""

_CHARS_OF_A_MESSAGE = 256
"""What rendering one message costs, in characters of encoding: many short messages, too, go to a thread."""


class GenerationProcessor:
    """The request processor of one model folder or GGUF file."""

    def __init__(
        self,
        folder: Path,
        *,
        name: str,
        max_model_len: int,
        limits: RequestLimits,
        created: int,
        offers: InputFeatures | None = None,
        adapters: SharedAdapterNames | None = None,
        requests: RequestConfig | None = None,
    ) -> None:
        """Reads tokenizer, template, end tokens, sampling defaults, and how images are prepared.  Raises ModelError."""
        offers, requests = offers or InputFeatures(), requests or RequestConfig()
        self._limits = limits
        files = model_files(folder)
        config = read_json(files, CONFIG)
        tokenizer_config = read_json(files, TOKENIZER_CONFIG, required=False)
        special = named_tokens(tokenizer_config, read_json(files, "special_tokens_map.json", required=False))
        sources = load_template_sources(folder, tokenizer_config)
        self._chats = ChatRenderer(_templates(sources, special, limits)) if sources else None
        recipe = read_image_config(files)
        literals = self._chats.literals if self._chats else ()
        self._tokenizer = TextTokenizer(folder, config=tokenizer_config, literals=literals)
        self._facts = ModelProperties(
            name=name,
            max_model_len=max_model_len,
            vocabulary=vocabulary_size(config),
            end_tokens=end_tokens(files, config, self._tokenizer.token_id(special.get("eos_token", ""))),
            sees=recipe is not None,
            sampling=_sampling_defaults(files, requests),
            requests=requests,
        )
        self._images = None if recipe is None else ImagePipeline(recipe, limits, _remote(limits, offers))
        self._adapters = LoraRegistry(offers.lora, folder, name, adapters)
        suggested = msgspec.to_builtins(self._facts.sampling)
        self._card = ModelCard(
            name=name, created=created, max_model_len=max_model_len, sampling=suggested, vision=self._facts.sees
        )
        self._skipped = SkippedKinds("/v1/responses")
        self._messages = MessagesOptions(
            SkippedKinds("/v1/messages"), max_model_len, strip_billing_header=requests.strip_billing_header
        )
        bounds = CheckLimits(cpu_s=limits.max_grammar_s, memory_bytes=limits.max_grammar_memory_bytes)
        self._grammars = GrammarChecker(
            self.vocabulary,
            bounds,
            max_waiting=limits.max_queued_grammars,
            max_remembered_bytes=limits.max_grammar_verdicts_bytes,
        )

    def close(self) -> None:
        """Ends the checks of grammars, and lets the tokenizer's threads end."""
        self._grammars.close()
        self._tokenizer.close()
        if self._images is not None:
            self._images.close()

    def vocabulary(self) -> GrammarVocabulary:
        """The model's tokens as grammars see them."""
        table, size = self._tokenizer.table, self._facts.vocabulary
        return GrammarVocabulary(
            tokens=[table.raw(token) for token in range(size)],
            special=tuple(sorted(token for token in table.special if token < size)),
            end_tokens=self._facts.end_tokens,
        )

    def cards(self) -> Sequence[ModelCard]:
        return listed_cards(self._card, self._adapters.names(), self._facts.requests.model_alias)

    def card(self, name: str) -> ModelCard | None:
        return find_card(self.cards(), name, self._facts.requests.model_alias)

    def adapter(self, body: JsonObject) -> AdapterRef | None:
        facts, adapter = self._asked(body)
        parse_model(BodyFields(body), facts, required=False)
        return adapter

    async def load_adapter(self, body: JsonObject) -> JsonObject:
        return {"id": await self._adapters.load(body), "object": "lora_adapter", "loaded": True}

    async def unload_adapter(self, body: JsonObject) -> JsonObject:
        return {"id": await self._adapters.unload(body), "object": "lora_adapter", "loaded": False}

    def _asked(self, body: JsonObject) -> tuple[ModelProperties, AdapterRef | None]:
        """What the body's model is: the model, or, by the name of an adapter, the model with that.

        It bears the name that was asked for, which may be an alias.
        """
        given = body.get("model")
        if not isinstance(given, str) or given == self._facts.name:
            return self._facts, None
        adapters = self._adapters.names()
        meant = served_model(given, (self._facts.name, *adapters), self._facts.requests.model_alias)
        if meant is None:  # to be refused, with what there is
            return msgspec.structs.replace(self._facts, adapters=tuple(adapters)), None
        return msgspec.structs.replace(self._facts, name=given), self._adapters.find(meant)

    async def chat(self, body: JsonObject, envelope: RequestContext) -> PreparedGeneration:
        facts, adapter = self._asked(body)
        checked = parse_chat(body, self._limits, facts)
        call, keep = checked.call, checked.call.keep
        written = await self._write_chat(checked.text, _render_options(checked), cut=keep is not None)
        call = await self._with_calls_demanded(call, written.grammars, envelope.caller.tenant)
        salt = envelope.caller.cache_salt(call.cache_salt)
        prompt = await self._see(_last_tokens(written.tokens, keep), checked.text, salt)
        wanted = msgspec.structs.replace(self._wanted(call), reply=written.reply)
        room = self._facts.max_model_len - len(prompt.tokens)
        length = _length(call.sampling, room, self._limits.default_max_tokens, clamp=envelope.clamps_length)
        self._check_room(len(prompt.tokens), length.max_tokens, param="messages")
        prepared = await self._prepare(call, [(prompt, wanted)], length, envelope, adapter)
        return _with_model_name(prepared, facts.name)

    async def messages(self, body: JsonObject) -> JsonObject:
        return await self._messages_chat(body, counts=False)

    async def count_message_tokens(self, body: JsonObject) -> int:
        chat = await self._messages_chat(body, counts=True)
        facts, _ = self._asked(chat)
        checked = parse_chat(chat, self._limits, facts)
        written = await self._write_chat(checked.text, _render_options(checked))
        return len((await self._see(written.tokens, checked.text)).tokens)

    async def _messages_chat(self, body: JsonObject, *, counts: bool) -> JsonObject:
        return await self._tokenizer.run_sized(
            await _weigh(body, self._limits.max_body_bytes),
            lambda: messages_chat(body, self._limits, sees=self._facts.sees, options=self._messages, counts=counts),
        )

    async def completion(self, body: JsonObject, envelope: RequestContext) -> PreparedGeneration:
        facts, adapter = self._asked(body)
        checked = parse_completion(body, self._limits, facts)
        max_tokens = checked.call.sampling.max_tokens or 0
        prompts: list[tuple[MultimodalPrompt, OutputOptions]] = []
        for given in checked.prompts:
            keep = checked.call.keep
            read = await self._encode_prompt(given, add_special_tokens=checked.add_special_tokens, cut=keep is not None)
            tokens = _last_tokens(read, keep)
            self._check_room(len(tokens), max(1, max_tokens), param="prompt")
            wanted = self._wanted(checked.call)
            if checked.echo:
                if isinstance(given, str) and len(tokens) == len(read):
                    text = given
                else:
                    text = decode_prompt(self._tokenizer.table, tokens, special=wanted.special)
                wanted = msgspec.structs.replace(
                    wanted, echo=PromptEcho(text=text, tokens=tokens), prompt_only=max_tokens == 0
                )
            prompts.append((MultimodalPrompt(tokens), wanted))
        if checked.echo:
            self._check_echo(checked.call, [len(prompt.tokens) for prompt, _ in prompts])
        prepared = await self._prepare(checked.call, prompts, _OutputLength(max(1, max_tokens)), envelope, adapter)
        return _with_model_name(prepared, facts.name)

    async def responses(self, body: JsonObject, history: ResponseHistory) -> ResponsesRequest:
        return await translate_responses(body, history, self._limits, sees=self._facts.sees, skipped=self._skipped)

    async def tokenize(self, body: JsonObject) -> TokenizeResult:
        request = parse_tokenize(body, self._limits, self._asked(body)[0])
        what, add_special_tokens = request.input, request.add_special_tokens
        if isinstance(what, ChatInput):
            wish = RenderOptions(tooling=what.tooling, add_special_tokens=add_special_tokens)
            tokens = (await self._see((await self._write_chat(what, wish)).tokens, what)).tokens
        else:
            text = what
            tokens = await self._tokenizer.run_sized(
                len(text), lambda: self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
            )
        return TokenizeResult(
            count=len(tokens),
            max_model_len=self._facts.max_model_len,
            tokens=list(tokens),
            token_strs=await self._strings(tokens) if request.token_strings else None,
        )

    async def _strings(self, tokens: tuple[int, ...]) -> list[str]:
        return await self._tokenizer.run_sized(len(tokens), lambda: self._tokenizer.token_strings(tokens))

    async def detokenize(self, body: JsonObject) -> str:
        tokens = parse_detokenize(body, self._asked(body)[0])
        return await self._tokenizer.run_sized(len(tokens), lambda: self._tokenizer.decode(tokens))

    async def _write_chat(self, text: ChatInput, wish: RenderOptions, *, cut: bool = False) -> RenderedPrompt:
        chats = self._chats
        if chats is None:
            raise RequestError(
                "This model has no chat template. Use /v1/completions.", param="messages", code="no_chat_template"
            )
        self._check_size(sum(content_chars(message["content"]) for message in text.messages), "messages", cut=cut)
        size = await self._weighed(text)
        conversation = Conversation(
            messages=text.messages,
            documents=text.documents,
            add_generation_prompt=text.add_generation_prompt,
            continue_final_message=text.continue_final_message,
            arguments=text.arguments,
        )
        written = await self._tokenizer.run_sized(
            size + len(text.messages) * _CHARS_OF_A_MESSAGE,
            lambda: chats.render(
                self._tokenizer, conversation, wish, lambda chars: self._check_size(chars, "messages", cut=cut)
            ),
        )
        self._check_known(written.tokens, param="messages")
        return written

    async def _weighed(self, text: ChatInput) -> int:
        """Characters of all that a template may write.  Raises RequestError where that is more than could ever be read.

        What a template leaves out (reasoning of earlier turns, documents) counts, too; so there is more room than the
        context has, and the written text is weighed again.
        """
        limits = self._limits
        most = max(limits.max_tokenize_chars, self._facts.max_model_len * limits.max_chars_per_token)
        chars = await _weigh((text.messages, text.tooling.tools, text.documents, text.arguments), most)
        if chars > most:
            raise RequestError(
                f"The messages, tools and documents have more than {most} characters together, which no context of "
                f"{self._facts.max_model_len} tokens can hold.",
                param="messages",
                code="context_length_exceeded",
            )
        return chars

    async def _see(self, tokens: tuple[int, ...], text: ChatInput, salt: str = "") -> MultimodalPrompt:
        """The prompt with the images of its chat; who has another ``salt`` shares nothing of them."""
        if self._images is None:
            return MultimodalPrompt(tokens)
        if text.images and not pillow_installed():
            raise unsupported(
                text.images[0].where, "images need Pillow on the server; pip install 'penstock[vision]' brings it."
            )
        return await self._images.process(tokens, text.images, salt)

    async def _encode_prompt(self, prompt: Prompt, *, add_special_tokens: bool, cut: bool) -> tuple[int, ...]:
        if not isinstance(prompt, str):
            return prompt
        self._check_size(len(prompt), "prompt", cut=cut)
        tokens = await self._tokenizer.run_sized(
            len(prompt), lambda: self._tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
        )
        if not tokens:
            raise RequestError("The prompt is empty: it has no tokens.", param="prompt", code="empty_prompt")
        return self._check_known(tokens, param="prompt")

    def _check_size(self, chars: int, param: str, *, cut: bool) -> None:
        """Refuses what cannot fit before any of it is read; of what is cut afterwards, what is too long to be read."""
        most = self._limits.max_tokenize_chars
        if cut and chars > most:
            want = f"at most {most} characters (max_tokenize_chars)"
            raise BadField(param, got=f"{chars} characters", want=want, code="string_above_max_length")
        if cut:
            return
        least = self._tokenizer.min_tokens(chars, self._facts.max_model_len, self._limits.max_chars_per_token)
        if least is not None:
            raise PromptTooLong(
                prompt_tokens=least,
                max_tokens=1,
                limit=self._facts.max_model_len,
                param=param,
                at_least=True,
                model_len=self._facts.requests.max_positions,
            )

    def _check_known(self, tokens: tuple[int, ...], *, param: str) -> tuple[int, ...]:
        """Some tokenizers have more tokens than their model has rows."""
        if max(tokens, default=0) >= self._facts.vocabulary:
            raise RequestError(
                f"The text has a token that the model does not know: {max(tokens)}, of {self._facts.vocabulary}.",
                param=param,
                code="unknown_token",
            )
        return tokens

    def _check_room(self, prompt_tokens: int, max_tokens: int, *, param: str) -> None:
        if prompt_tokens + max_tokens > self._facts.max_model_len:
            raise PromptTooLong(
                prompt_tokens=prompt_tokens,
                max_tokens=max_tokens,
                limit=self._facts.max_model_len,
                param=param,
                model_len=self._facts.requests.max_positions,
            )

    def _check_echo(self, call: GenerationFields, lengths: Sequence[int]) -> None:
        """Log-probabilities of a prompt are many: some 15 bytes each between processes, and 20 in the response."""
        if call.logprobs is None:
            return
        tokens, each, most = sum(lengths) * call.sampling.n, 1 + call.logprobs, self._limits.max_prompt_logprobs
        if tokens * each > most:
            raise RequestError(
                f"'echo' with 'logprobs': {call.logprobs} asks for {tokens * each} log-probabilities of the prompt "
                f"({tokens} tokens x {each}, all choices together), and at most {most} may be asked for. Send a "
                "shorter prompt or ask for fewer.",
                param="logprobs",
                code="too_many_logprobs",
            )

    def _wanted(self, call: GenerationFields) -> OutputOptions:
        return OutputOptions(
            stops=call.sampling.stops,
            stop_token_ids=_shared_set(call.sampling.stop_token_ids),
            min_tokens=call.sampling.min_tokens,
            logprobs=call.logprobs is not None,
            token_ids=call.token_ids,
            special=call.special,
            stop_shown=call.stop_shown,
        )

    async def _checked_grammar(self, call: GenerationFields, tenant: str) -> Grammar | None:
        """The grammar as workers are to have it.  Raises RequestError for one that cannot be followed."""
        asked = call.grammar
        if asked is None:
            return None
        if not self._facts.end_tokens:
            raise unsupported(asked.field, "this model has no end token, so no answer could be complete.")
        try:
            return await self._grammars.check(asked.grammar, tenant)
        except GrammarRefused as error:
            raise RequestError(
                f"Invalid '{asked.field}': {error}.", param=asked.field, code="invalid_grammar"
            ) from None

    async def _with_calls_demanded(
        self, call: GenerationFields, grammars: Sequence[Grammar], tenant: str
    ) -> GenerationFields:
        """The call under the first of ``grammars`` that can be followed, instead of what it asked for."""
        for grammar in grammars if self._facts.end_tokens else ():
            with suppress(GrammarRefused):
                asked = RequestedGrammar(await self._grammars.check(grammar, tenant), "tools")
                ends = tuple(dict.fromkeys((*self._facts.end_tokens, *call.sampling.stop_token_ids)))
                sampling = msgspec.structs.replace(call.sampling, stop_token_ids=ends)
                return msgspec.structs.replace(call, grammar=asked, sampling=sampling)
        return call

    async def _prepare(
        self,
        call: GenerationFields,
        prompts: Sequence[tuple[MultimodalPrompt, OutputOptions]],
        length: _OutputLength,
        envelope: RequestContext,
        adapter: AdapterRef | None,
    ) -> PreparedGeneration:
        grammar = await self._checked_grammar(call, envelope.caller.tenant)
        content = "" if adapter is None else adapter.fingerprint
        salt = envelope.caller.cache_salt(call.cache_salt)
        root = chain_root(envelope.identity, adapter=content, tenant_salt=salt)
        requests: list[ValidRequest] = []
        answers: list[IncrementalDetokenizer] = []
        for prompt, wanted in prompts:
            hashes = await _hash_blocks(root, prompt)
            token_ids = pack_token_ids(prompt.tokens)
            sampling = _sampling_params(call, length.max_tokens, grammar, echo=wanted.echo is not None)
            options = wanted
            if wanted.echo is not None:
                options = msgspec.structs.replace(wanted, echo=PromptEcho(text=wanted.echo.text, tokens=token_ids))
            for _ in range(call.sampling.n):
                choice = len(requests)
                requests.append(
                    ValidRequest(
                        id=RequestId(f"{envelope.id}/{choice}"),
                        prompt=token_ids,
                        block_hashes=hashes,
                        sampling=msgspec.structs.replace(sampling, choice=choice),
                        open_ended=length.open_ended,
                        arrival=envelope.arrival,
                        images=prompt.images,
                        pictures=prompt.pictures,
                        session=envelope.session or call.session,
                        adapter=adapter,
                        cache_salt=salt,
                        qos=envelope.caller.qos(call.service),
                    )
                )
                answers.append(
                    IncrementalDetokenizer(self._tokenizer.table, options, identity=f"{envelope.name}/{choice}")
                )
        reply = ResponseOptions(
            model=self._facts.name,
            seed=call.sampling.seed,
            n=call.sampling.n,
            stream=call.stream,
            include_usage=call.options.include_usage,
            continuous_usage=call.options.continuous_usage,
            logprobs=call.logprobs is not None,
            token_ids=call.token_ids,
            length_clamped=length.clamped,
        )
        return PreparedGeneration(requests=tuple(requests), answers=tuple(answers), reply=reply)


@lru_cache(maxsize=256)
def _shared_set(tokens: tuple[int, ...]) -> frozenset[int]:
    """The same object for equal tokens: mostly the model's end tokens, and 216 bytes of each open stream."""
    return frozenset(tokens)


async def _weigh(value: Any, most: int) -> int:
    """Characters of a JSON value, as ``weights`` counts them, some in each turn of the event loop."""
    chars = 0
    for turn, chars in enumerate(weights(value, most)):  # noqa: B007
        if turn:
            await asyncio.sleep(0)
    return chars


def _render_options(chat: ChatRequest) -> RenderOptions:
    call = chat.call
    return RenderOptions(tooling=chat.text.tooling, constrained=call.grammar is not None, closed=call.closed)


def _with_model_name(prepared: PreparedGeneration, model: str) -> PreparedGeneration:
    """The answer bears the name that was asked for."""
    return msgspec.structs.replace(prepared, reply=msgspec.structs.replace(prepared.reply, model=model))


def _sampling_defaults(files: ModelFiles, requests: RequestConfig) -> SamplingDefaults:
    """What the model's own file says of sampling, where the operator takes it."""
    if requests.generation_config == "none":
        return SamplingDefaults()
    return sampling_defaults(read_json(files, GENERATION_CONFIG, required=False))


def _last_tokens(tokens: tuple[int, ...], keep: int | None) -> tuple[int, ...]:
    return tokens if keep is None else tokens[-keep:]


class _OutputLength(NamedTuple):
    """How long an answer may become."""

    max_tokens: int
    open_ended: bool = False  # the request names no length
    clamped: bool = False  # it names more than the context has


def _length(sampling: SamplingFields, room: int, default: int | None, *, clamp: bool) -> _OutputLength:
    """The length of a chat: its own, else the service's ``default_max_tokens``, else the ``room`` in the context."""
    named = sampling.max_tokens
    if named is not None and clamp and named > room:
        return _OutputLength(max(1, room), clamped=True)
    if named is not None:
        return _OutputLength(named)
    most = room if default is None else min(room, default)
    return _OutputLength(max(1, most, sampling.min_tokens), default is None)


def _sampling_params(call: GenerationFields, max_tokens: int, grammar: Grammar | None, *, echo: bool) -> SamplingParams:
    sampling = call.sampling
    return SamplingParams(
        seed=sampling.key,
        max_tokens=max_tokens,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=sampling.logit_bias,
        min_tokens=sampling.min_tokens,
        stop_token_ids=sampling.stop_token_ids,
        logprobs=call.logprobs,
        prompt_logprobs=call.logprobs if echo else None,
        grammar=grammar,
    )


def _remote(limits: RequestLimits, offers: InputFeatures) -> ImageFetcher | None:
    if not offers.remote_images:
        return None
    hosts = offers.remote_image_hosts
    return ImageFetcher(max_bytes=limits.max_image_bytes, max_seconds=limits.remote_image_s, hosts=hosts)


async def _hash_blocks(root: BlockHash, prompt: MultimodalPrompt) -> tuple[BlockHash, ...]:
    """Others get a turn every now and then."""
    hashes: list[BlockHash] = []
    if prompt.images:
        for block in block_hashes(root, prompt.tokens, images=prompt.images):
            hashes.append(block)
            if len(hashes) % _HASHES_AT_A_TIME == 0:
                await asyncio.sleep(0)
        return tuple(hashes)
    for start in range(0, len(prompt.tokens), _TOKENS_HASHED_AT_A_TIME):
        if start:
            await asyncio.sleep(0)
        end = min(len(prompt.tokens), start + _TOKENS_HASHED_AT_A_TIME)
        hashes += hash_blocks(hashes[-1] if hashes else root, prompt.tokens, start, end)
    return tuple(hashes)


def _templates(sources: dict[str, str], special: dict[str, str], limits: RequestLimits) -> ChatTemplates:
    bounds = TemplateLimits(max_output_bytes=limits.max_template_output_bytes, max_seconds=limits.max_template_s)
    return ChatTemplates(sources, special=special, limits=bounds)
