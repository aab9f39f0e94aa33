"""What a client of ``penstock serve`` gets is what transformers computes: every row of docs/models.md, through HTTP.

A random folder written by transformers is served in fp32 with default settings and asked with token ids.
Log-probabilities, vectors and scores are within 1e-3 of transformers' in fp32; transcribed ids are the same.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from family_cases import CASES, HEARD
from numpy.typing import NDArray
from parity_oracle import Oracle, processed, rename_tensors, write_random_model
from reader_cases import CASES as READERS
from reader_cases import ONE, XLM_R, real
from reader_cases import Case as Reader
from shrunk_models import Case
from tokenizers import Tokenizer
from transformers import AutoModelForSpeechSeq2Seq, WhisperFeatureExtractor
from whole_rows import TOLERANCE

from cluster.server import PATIENCE_S, PenstockServer
from penstock.types import Task
from penstock.weights.config_json import ConfigFields
from penstock.weights.families.registry import checkpoint_format
from penstock.weights.inspect import CONFIG, inspect_model
from penstock.weights.model_files import model_files
from penstock.weights.pooling_config import with_pooler
from tiny_readers import bert_config
from vision_models import IMAGE_TOKEN, KINDS, image_part, picture, write_vision_model
from whisper_models import IDS, PREPROCESSOR, RATE, SUPPRESSED, SUPPRESSED_FIRST, tones, wav, write_whisper
from whisper_models import SMALL as SMALL_WHISPER

PAGE = Path(__file__).parents[2] / "docs/models.md"
FLAGS = ["--dtype", "fp32", "--device", "cpu", "--kv-memory", "32MiB"]
PROMPT, OUTPUT, TOP = 150, 8, 20
QUICK = ("gpt2", "MiniLM")
"""Asked by default; the others are many services of some seconds each."""


def variants() -> dict[str, Reader]:
    """Architectures of embedding models and classifiers that ``reader_cases`` has no case of."""
    found = {
        "RobertaModel": Reader(
            config=bert_config(**XLM_R | {"model_type": "roberta"}, architectures=["RobertaModel"]), normalise=False
        ),
        "RobertaForSequenceClassification": Reader(
            config=bert_config(
                **XLM_R | {"model_type": "roberta"}, architectures=["RobertaForSequenceClassification"], **ONE
            ),
            scores=torch.sigmoid,
        ),
    }
    decoders = {
        "Qwen3": "qwen3_embedding_8b",
        "Mistral": "e5_mistral_7b",
        "Qwen2": "qwen_2_5_0_5b",
        "Llama": "llama_3_2_1b",
        "Gemma": "gemma_7b",
        "Gemma2": "gemma_2_2b",
        "Phi3": "phi_3_mini_128k",
    }
    for name, published in decoders.items():
        (small,) = [case.small for case in CASES if case.config == published][:1] or [{"head_dim": 24}]
        small = small | {"rope_scaling": None} if name == "Phi3" else small  # its divisors depend on what is served
        for kind in ("Model", "ForSequenceClassification"):
            config = real(published, **small | {"architectures": [name + kind]})
            found[name + kind] = Reader(config={key: value for key, value in config.items() if value is not None})
    return found


ALL_READERS = READERS | {name: case for name, case in variants().items() if name not in READERS}


def only_quick(name: str, case: Any) -> Any:
    """The parameter, marked as a long test unless it stands for its kind by default."""
    return pytest.param(case, id=name, marks=[] if name.split(":")[0] in QUICK else pytest.mark.long)


def ask(server: PenstockServer, route: str, body: dict[str, Any]) -> dict[str, Any]:
    response = httpx.post(server.url + route, json=body, timeout=PATIENCE_S, trust_env=False)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def model_name(server: PenstockServer) -> str:
    return str(server.get("/v1/models").json()["data"][0]["id"])


# --- models that generate ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [only_quick(case.name, case) for case in CASES if "_vl_" not in case.config])
def test_log_probabilities_of_prompt_and_output_are_those_of_transformers(case: Case, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    oracle = write_random_model(folder, case.shrunk())
    if case.misnamed is not None:
        rename_tensors(folder, *case.misnamed)
    vocab = inspect_model(folder).vocab
    prompt = np.random.default_rng(1).integers(2, vocab, PROMPT).tolist()
    with PenstockServer([str(folder), *FLAGS], folder=tmp_path) as server:
        body = {"model": model_name(server), "prompt": prompt, "echo": True, "logprobs": TOP, "temperature": 0}
        answer = ask(server, "/v1/completions", body | {"max_tokens": OUTPUT, "ignore_eos": True})
    check_completion(answer, prompt, oracle)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_log_probabilities_after_an_image_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    oracle = Oracle.of(write_vision_model(tmp_path / "source", kind))
    oracle.model.save_pretrained(tmp_path / "saved")
    folder = write_vision_model(tmp_path / "model", kind)  # its tokenizer, template and preprocessor
    shutil.copy(tmp_path / "saved/model.safetensors", folder)
    content = [{"type": "text", "text": "t3 t4"}, image_part(61, 230)]
    with PenstockServer([str(folder), *FLAGS], folder=tmp_path) as server:
        body = {"model": model_name(server), "messages": [{"role": "user", "content": content}], "logprobs": True}
        asked = body | {"top_logprobs": TOP, "temperature": 0, "max_tokens": OUTPUT, "ignore_eos": True}
        answer = ask(server, "/v1/chat/completions", asked)
    image = picture(61, 230)
    (_, rows, columns) = processed([image])["image_grid_thw"][0].tolist()
    shown = "<|image_pad|>" * (rows // 2 * (columns // 2))
    text = f"<|im_start|> user  t3 t4 <|vision_start|>{shown}<|vision_end|><|im_end|><|im_start|> assistant"
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompt = tokenizer.encode(text).ids
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    rows = answer["choices"][0]["logprobs"]["content"]
    tokens = [*prompt, *(tokenizer.token_to_id(row["token"].strip()) for row in rows)]
    want_TV = oracle.logprobs_TV(tokens, [image], IMAGE_TOKEN)[len(prompt) - 1 :]
    for row, want_V in zip(rows, want_TV, strict=False):
        best = [own["logprob"] for own in row["top_logprobs"]]
        assert len(best) == TOP
        np.testing.assert_allclose(best, np.sort(want_V)[::-1][:TOP], atol=TOLERANCE)


def check_completion(answer: dict[str, Any], prompt: list[int], oracle: Oracle) -> None:
    logprobs = answer["choices"][0]["logprobs"]
    tokens = [int(text.strip().removeprefix("t")) for text in logprobs["tokens"]]
    assert tokens[: len(prompt)] == prompt
    assert len(tokens) == len(prompt) + OUTPUT
    want_TV = oracle.logprobs_TV(tokens)
    for position in range(1, len(tokens)):
        want_V = want_TV[position - 1]
        assert abs(logprobs["token_logprobs"][position] - want_V[tokens[position]]) <= TOLERANCE
        best = sorted(logprobs["top_logprobs"][position].values(), reverse=True)[:TOP]
        assert best == pytest.approx(np.sort(want_V)[::-1][: len(best)], abs=TOLERANCE)
    assert len(np.unique(want_TV.argmax(1))) > 10  # a model that ignores what it reads would prove nothing


# --- embeddings and classes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [only_quick(name, case) for name, case in ALL_READERS.items()])
def test_vectors_and_scores_are_those_of_transformers(case: Reader, tmp_path: Path) -> None:
    case = replace(case, second=None)  # ids do not say where a second text begins
    oracle = case.write(tmp_path / "model")
    rng = np.random.default_rng(3)
    texts = [rng.integers(2, case.config["vocab_size"], length).tolist() for length in (40, 17)]
    with PenstockServer([str(tmp_path / "model"), *FLAGS], folder=tmp_path) as server:
        asked = {"model": model_name(server), "input": texts}
        route = "/classify" if case.labels else "/v1/embeddings"
        rows = ask(server, route, asked)["data"]
    for row, tokens in zip(rows, texts, strict=True):
        got = row["probs"] if case.labels else row["embedding"]
        np.testing.assert_allclose(got, case.wanted(oracle, tokens), atol=TOLERANCE, rtol=TOLERANCE)


# --- transcriptions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [only_quick(case.name, case) for case in HEARD])
def test_transcribed_ids_are_those_of_transformers(case: Case, tmp_path: Path) -> None:
    bands = case.real()["num_mel_bins"]
    config = case.real() | SMALL_WHISPER | {"num_mel_bins": bands}
    oracle = write_random_model(tmp_path / "made", config, kind=AutoModelForSpeechSeq2Seq)
    folder = write_whisper(tmp_path / "model")  # its tokenizer and generation config
    for name in ("model.safetensors", "config.json"):
        shutil.copy(tmp_path / "made" / name, folder / name)
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR | {"feature_size": bands}))
    samples_N = tones(0.9)
    with PenstockServer([str(folder), *FLAGS], folder=tmp_path) as server:
        response = httpx.post(
            server.url + "/v1/audio/transcriptions",
            files={"file": ("sound.wav", wav(samples_N))},
            data={"model": model_name(server), "language": "en", "response_format": "verbose_json"},
            timeout=PATIENCE_S,
            trust_env=False,
        )
    assert response.status_code == 200, response.text
    got = [token for segment in response.json()["segments"] for token in segment["tokens"]]
    assert len(got) > 4
    assert got == greedy_transcription(oracle, folder, samples_N, len(got))


def greedy_transcription(oracle: Oracle, folder: Path, samples_N: NDArray[np.float64], most: int) -> list[int]:
    """Transformers' features, and its best token at each step of those that are not suppressed; the end is left out."""
    extractor = WhisperFeatureExtractor.from_pretrained(folder)
    read_N = np.round(samples_N * 32767).astype("<i2").astype(np.float32) / 32768
    features = extractor(read_N, sampling_rate=RATE, return_tensors="pt").input_features
    tokens = [IDS[name] for name in ("<|startoftranscript|>", "<|en|>", "<|transcribe|>", "<|notimestamps|>")]
    begin = len(tokens)
    while len(tokens) < begin + most:
        with torch.inference_mode():
            told = oracle.model(input_features=features, decoder_input_ids=torch.tensor([tokens]))
        logits_V = told.logits[0, -1].numpy()
        logits_V[[*SUPPRESSED, *(SUPPRESSED_FIRST if len(tokens) == begin else [])]] = -np.inf
        tokens.append(int(logits_V.argmax()))
    return tokens[begin:]


# --- the page ---------------------------------------------------------------------------------------------------------


def test_every_row_of_the_page_is_asked() -> None:
    """The first table is made of ``family_cases``; the second names architectures, or what stands for several."""
    embeddings = PAGE.read_text().split("return vectors or label scores")[1].split("\n\n")[1]
    named = set(re.findall(r"\b[A-Z]\w+(?:Model|ForSequenceClassification)\b", embeddings))
    families = re.search(r"\{(.*)\}Model", embeddings)
    assert families is not None
    named |= {name + kind for name in families[1].split(", ") for kind in ("Model", "ForSequenceClassification")}
    assert named <= {case.architecture for case in ALL_READERS.values()}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_models_with_a_language_model_head_are_taken_for_such(case: Case, tmp_path: Path) -> None:
    (tmp_path / CONFIG).write_text(json.dumps(case.real()))
    family, fields = checkpoint_format(case.architecture, CONFIG), ConfigFields(case.real(), CONFIG)
    spec = with_pooler(family.parse(fields), case.architecture, fields, model_files(tmp_path))
    assert spec.task is Task.GENERATE
