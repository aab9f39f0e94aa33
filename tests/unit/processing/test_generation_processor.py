"""From JSON to engine requests, with the bundled model's tokenizer and template, and with made ones."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

import penstock
import small_tokenizers
from pauses import longest_pause_of_the_loop
from penstock.config.limits import RequestLimits
from penstock.errors import BadField, ModelError, PromptTooLong, RequestError
from penstock.hashing import block_hashes, chain_root
from penstock.interfaces import PreparedGeneration, RequestContext
from penstock.processing.service import GenerationProcessor
from penstock.types import FinishReason, ModelIdentity, RequestId, TokenBatch

STORYTELLER = Path(penstock.__file__).parent / "bundled" / "storyteller"
IDENTITY = ModelIdentity(fingerprint="f" * 64, numerics="test-1-fp32")
ENVELOPE = RequestContext(id=RequestId("x"), arrival=12.5, identity=IDENTITY)
END = 1


def intake_of(folder: Path = STORYTELLER, **options: Any) -> GenerationProcessor:
    limits = options.pop("limits", RequestLimits())
    return GenerationProcessor(
        folder, name="m", max_model_len=options.pop("max_model_len", 2048), limits=limits, created=7
    )


@pytest.fixture(scope="module")
def intake() -> GenerationProcessor:
    return intake_of()


async def chat(intake: GenerationProcessor, content: Any = "Hi", **fields: Any) -> PreparedGeneration:
    return await intake.chat({"model": "m", "messages": [{"role": "user", "content": content}]} | fields, ENVELOPE)


async def complete(intake: GenerationProcessor, prompt: Any = "Hi", **fields: Any) -> PreparedGeneration:
    return await intake.completion({"model": "m", "prompt": prompt} | fields, ENVELOPE)


async def test_a_chat_becomes_one_request_with_its_models_defaults(intake: GenerationProcessor):
    prepared = await chat(intake, "Hi there")
    (request,) = prepared.requests
    assert (request.prompt[0], request.prompt[1], request.prompt[-1]) == (0, 3, 4)  # begin, user, assistant
    sampling = request.sampling
    # The model's generation_config suggests 0.7 and 0.9; what it does not say is OpenAI's default.
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.7, 0.9, None, 0.0)
    assert sampling.stop_token_ids == (END,)
    assert sampling.max_tokens == 2048 - len(request.prompt)
    assert sampling.logprobs is None
    assert 0 <= prepared.reply.seed < 1 << 53
    assert sampling.seed == prepared.reply.seed
    assert request.arrival == 12.5


async def test_a_drawn_seed_is_drawn_anew(intake: GenerationProcessor):
    assert (await chat(intake)).reply.seed != (await chat(intake)).reply.seed


@pytest.mark.parametrize(("seed", "key"), [(0, 0), (-1, (1 << 64) - 1), (-(1 << 63), 1 << 63), ((1 << 63) - 1,) * 2])
async def test_every_signed_seed_is_a_key_of_its_own(intake: GenerationProcessor, seed: int, key: int):
    prepared = await chat(intake, seed=seed)
    assert prepared.reply.seed == seed
    assert prepared.requests[0].sampling.seed == key


async def test_choices_are_counted_over_prompts_and_n(intake: GenerationProcessor):
    prepared = await complete(intake, ["a story", [9, 8, 7]], n=3, seed=5)
    assert [request.sampling.choice for request in prepared.requests] == [0, 1, 2, 3, 4, 5]
    assert [request.id for request in prepared.requests] == [f"x/{i}" for i in range(6)]
    assert {request.sampling.seed for request in prepared.requests} == {5}
    assert tuple(prepared.requests[3].prompt) == (9, 8, 7)
    assert prepared.prompt_tokens == len(prepared.requests[0].prompt) + 3


async def test_hashes_are_those_of_the_prompts_full_pages(intake: GenerationProcessor):
    ids = list(range(10, 60))
    (plain,) = (await complete(intake, ids)).requests
    (salted,) = (await complete(intake, ids, cache_salt="tenant")).requests
    assert plain.block_hashes == tuple(block_hashes(chain_root(IDENTITY), ids))
    assert salted.cache_salt == ENVELOPE.caller.cache_salt("tenant") != ""
    assert salted.block_hashes == tuple(block_hashes(chain_root(IDENTITY, tenant_salt=salted.cache_salt), ids))
    assert not set(salted.block_hashes) & set(plain.block_hashes)
    assert len(plain.block_hashes) == 3


async def test_what_does_not_fit_is_told_with_both_numbers(intake: GenerationProcessor):
    ids = [10] * 2000
    with pytest.raises(
        PromptTooLong, match=r"2048 tokens.*2049 tokens \(2000 in the prompt, 49 in the answer\).*'max_tokens' to 48"
    ):
        await complete(intake, ids, max_tokens=49)
    (fits,) = (await complete(intake, ids, max_tokens=48)).requests
    assert fits.sampling.max_tokens == 48
    with pytest.raises(PromptTooLong, match="3000 in the prompt"):
        await complete(intake, [10] * 3000)
    with pytest.raises(PromptTooLong, match="maximum context length is 2048"):
        await chat(intake, "word " * 2100)


async def test_a_chat_gets_what_room_there_is(intake: GenerationProcessor):
    (request,) = (await chat(intake, "word " * 1800)).requests
    assert len(request.prompt) + request.sampling.max_tokens == 2048


async def test_a_prompt_far_too_long_is_refused_before_it_is_read(intake: GenerationProcessor):
    text = "x" * (12 << 20)
    began = time.process_time()
    for ask in (chat(intake, text), complete(intake, text)):
        with pytest.raises(PromptTooLong, match="at least"):
            await ask
    assert time.process_time() - began < 0.5  # encoding it takes seconds


async def test_a_completion_without_max_tokens_gets_openais_sixteen(intake: GenerationProcessor):
    (request,) = (await complete(intake)).requests
    assert request.sampling.max_tokens == 16


async def test_special_token_text_is_text_in_a_chat_and_a_token_in_a_prompt(intake: GenerationProcessor):
    (chatted,) = (await chat(intake, "a<|end|>b")).requests
    assert tuple(chatted.prompt).count(END) == 1  # the template's own
    (prompted,) = (await complete(intake, "a<|end|>b")).requests
    assert tuple(prompted.prompt).count(END) == 1


async def test_parts_of_a_content_cannot_make_a_control_token(intake: GenerationProcessor):
    parts = [{"type": "text", "text": "<|en"}, {"type": "text", "text": "d|>"}]
    (request,) = (await chat(intake, parts)).requests
    assert tuple(request.prompt).count(END) == 1


async def test_a_developer_is_a_system(intake: GenerationProcessor):
    ask = {"model": "m", "messages": [{"role": "developer", "content": "Be kind."}]}
    (request,) = (await intake.chat(ask, ENVELOPE)).requests
    assert request.prompt[1] == 2  # <|system|>


async def test_an_answer_can_be_continued(intake: GenerationProcessor):
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Once upon"}]
    ask = {"model": "m", "messages": messages, "continue_final_message": True}
    (request,) = (await intake.chat(ask, ENVELOPE)).requests
    assert request.prompt[-1] != 4
    assert (await intake.detokenize({"tokens": list(request.prompt)})).endswith("<|assistant|>Once upon")


async def test_ignoring_the_end_leaves_the_clients_own_ends(intake: GenerationProcessor):
    (request,) = (await chat(intake, ignore_eos=True, stop_token_ids=[50, 60, 50])).requests
    assert request.sampling.stop_token_ids == (50, 60)
    (request,) = (await chat(intake, stop_token_ids=[50, END])).requests
    assert request.sampling.stop_token_ids == (END, 50)


async def test_echo_with_no_tokens_gives_the_prompt_back(intake: GenerationProcessor):
    prepared = await complete(intake, "Once upon a time", echo=True, max_tokens=0, logprobs=1)
    (request,), (answer,) = prepared.requests, prepared.answers
    assert request.sampling.max_tokens == 1
    assert request.sampling.prompt_logprobs == 1
    piece = answer.push(TokenBatch(tokens=(9,), finish=FinishReason.LENGTH))
    assert (piece.text, piece.tokens) == ("Once upon a time", 0)


async def test_echo_of_token_ids_is_their_text(intake: GenerationProcessor):
    tokens = (await intake.tokenize({"prompt": "Once upon a time"})).tokens
    prepared = await complete(intake, tokens, echo=True, max_tokens=1)
    piece = prepared.answers[0].push(TokenBatch(tokens=(END,), finish=FinishReason.STOP))
    assert piece.text == "Once upon a time"


async def test_tokenize_and_back(intake: GenerationProcessor):
    told = await intake.tokenize({"prompt": "Once upon a time", "return_token_strs": True})
    assert told.count == len(told.tokens) == len(told.token_strs or ())
    assert told.max_model_len == 2048
    assert await intake.detokenize({"tokens": told.tokens}) == "Once upon a time"
    chatted = await intake.tokenize({"messages": [{"role": "user", "content": "Hi"}]})
    assert chatted.tokens == list((await chat(intake, "Hi")).requests[0].prompt)
    assert await intake.detokenize({"model": "m", "tokens": []}) == ""


async def test_what_is_too_long_to_tokenize_is_refused():
    made = intake_of(limits=RequestLimits(max_tokenize_chars=100))
    assert (await made.tokenize({"prompt": "x" * 100})).count > 1
    with pytest.raises(BadField, match="at most 100 characters"):
        await made.tokenize({"prompt": "x" * 101})


async def test_telling_the_strings_of_many_tokens_holds_up_nobody(intake: GenerationProcessor):
    body = {"prompt": "Once upon a time there was a fox. " * 20_000, "return_token_strs": True}
    assert len((await intake.tokenize(body)).token_strs or ()) > 90_000
    assert await longest_pause_of_the_loop(lambda: intake.tokenize(body), allowed_s=0.05) < 0.05


async def test_a_model_without_a_template_completes_but_does_not_chat(tmp_path: Path):
    made = intake_of(small_tokenizers.save(small_tokenizers.sentence_piece(), tmp_path))
    with pytest.raises(RequestError, match="no chat template"):
        await chat(made)
    assert (await complete(made, "the fox")).requests


async def test_a_token_beyond_the_models_rows_is_refused(tmp_path: Path):
    tokenizer = small_tokenizers.byte_level()
    folder = small_tokenizers.save(tokenizer, tmp_path)
    rows = tokenizer.token_to_id("<think>")  # the last
    (folder / "config.json").write_text(json.dumps({"vocab_size": rows, "eos_token_id": 1}))
    made = intake_of(folder)
    with pytest.raises(RequestError, match=f"does not know: {rows}"):
        await complete(made, "a<think>")
    with pytest.raises(RequestError, match=f"token ids from 0 to {rows - 1}"):
        await complete(made, [rows])


async def test_end_tokens_come_from_generation_config_first(tmp_path: Path):
    folder = small_tokenizers.save(small_tokenizers.byte_level(), tmp_path, eos_token="<|end|>")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    (request,) = (await complete(intake_of(folder), "a")).requests
    end = small_tokenizers.byte_level().token_to_id("<|end|>")
    assert request.sampling.stop_token_ids == (5, 6, end)


async def test_end_tokens_that_the_model_cannot_draw_are_none(tmp_path: Path):
    """A tokenizer may know more tokens than its model, and workers give back what names one of those."""
    tokenizer = small_tokenizers.byte_level()
    folder = small_tokenizers.save(tokenizer, tmp_path, eos_token="<think>")
    rows = tokenizer.token_to_id("<think>")  # the last
    (folder / "config.json").write_text(json.dumps({"vocab_size": rows, "eos_token_id": [1, -1]}))
    made = intake_of(folder)
    (request,) = (await complete(made, "a")).requests
    assert request.sampling.stop_token_ids == made.vocabulary().end_tokens == (1,)


@pytest.mark.parametrize("files", [{"config.json": "{}"}, {"config.json": "["}, {"tokenizer_config.json": "[]"}])
def test_a_folder_that_is_no_model_is_refused(tmp_path: Path, files: dict[str, str]):
    folder = small_tokenizers.save(small_tokenizers.byte_level(), tmp_path)
    for name, text in files.items():
        (folder / name).write_text(text)
    with pytest.raises(ModelError, match=r"vocab_size|not JSON|not a JSON object"):
        intake_of(folder)


async def test_a_long_chat_holds_up_nobody():
    long = intake_of(max_model_len=1 << 20, limits=RequestLimits(max_template_s=30.0))
    messages = [{"role": "user", "content": "Once upon a time there was a fox. " * 40}] * 300
    body = {"model": "m", "messages": messages, "max_tokens": 4}
    prepared = await long.chat(body, ENVELOPE)
    assert len(prepared.requests[0].prompt) > 90_000
    assert len(prepared.requests[0].block_hashes) == len(prepared.requests[0].prompt) // 16
    assert await longest_pause_of_the_loop(lambda: long.chat(body, ENVELOPE), allowed_s=0.1) < 0.1
    long.close()


async def test_the_form_of_an_answer_travels_with_every_choice():
    """End tokens end a constrained answer even where the client would have them ignored."""
    intake = intake_of()
    schema = {"type": "object", "properties": {"ü": {"type": "integer"}}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": False}}
    prepared = await chat(intake, response_format=form, n=2, ignore_eos=True, stop_token_ids=[9])
    for request in prepared.requests:
        grammar = request.sampling.grammar
        assert grammar is not None
        assert (grammar.kind, json.loads(grammar.text), grammar.compact) == ("json_schema", schema, False)
        assert request.sampling.stop_token_ids == (END, 9)
    told = {"structured_outputs": {"json": json.dumps(schema), "disable_any_whitespace": True, "regex": None}}
    (request,) = (await complete(intake, **told)).requests
    assert request.sampling.grammar is not None
    assert request.sampling.grammar.compact
    for none in ({"response_format": {"type": "text"}}, {"structured_outputs": {"json_object": False}}):
        (request,) = (await chat(intake, **none)).requests
        assert request.sampling.grammar is None
    intake.close()


def test_the_vocabulary_of_grammars_is_what_answers_are_made_of():
    intake = intake_of()
    vocabulary = intake.vocabulary()
    assert len(vocabulary.tokens) == 4096
    assert vocabulary.end_tokens == (END,)
    assert set(range(6)) <= set(vocabulary.special)
    assert {bytes((byte,)) for byte in range(256)} <= set(vocabulary.tokens)
    intake.close()
