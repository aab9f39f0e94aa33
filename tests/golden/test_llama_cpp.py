"""Files of llama.cpp's own converter and quantizer, and its own answers.  Needs ``python -m bench.peers install``.

- Its converter's file of a tiny model of every architecture gives transformers' log-probabilities, and its server's
  greedy tokens.
- Its quantizer's file of every type gives the log-probabilities of the same file dequantized, and the greedy tokens of
  its server where that has dequantized it, too; else its products round activations to 8 bits, and only tokens that are
  nearly as likely differ.
"""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from socket import socket
from time import monotonic, sleep
from typing import Any

import gguf
import numpy as np
import pytest
from bench.peers.drivers.to_gguf import add_settings, own_name
from bench.peers.places import Workplace, default_workdir
from parity_oracle import Oracle, write_random_model
from test_gguf_models import MODELS, GgufCase
from tokenizers import Tokenizer
from whole_rows import TOLERANCE, read_rows

from gguf_models import read_gguf_model
from penstock.weights.checkpoint_reader import Checkpoint
from penstock.weights.gguf.tokenizer import PRE_TOKENIZERS, tokenizer_json
from runner_bench import RunnerBench
from tiny_gguf import of_byte_level
from tiny_models import llama_config, random_tensors, write_tokenizer, write_weights

PLACE = Workplace(default_workdir())
TOOLS = [PLACE.llama_tool(name) for name in ("llama-quantize", "llama-server")]
SOURCE = next(iter(sorted(PLACE.root.glob("source/*/vendor/llama.cpp"))), None)
LENGTH = 100
AGREEMENT = 0.99
START_S = 60.0
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        SOURCE is None or not all(tool.is_file() for tool in TOOLS),
        reason="NOT RUN: no llama.cpp here: python -m bench.peers install llama.cpp",
    ),
]

CONVERT = """
import runpy, sys
source, tests, folder, out = sys.argv[1:5]
sys.path[:0] = [source, source + "/gguf-py", tests]
import convert_hf_to_gguf as converter
from tiny_gguf import add_bytes_tokenizer
find = converter.get_model_class
def tokenless(*given, **named):
    made = find(*given, **named)
    made.set_vocab = lambda self: add_bytes_tokenizer(self.gguf_writer, self.hparams)
    return made
converter.get_model_class = tokenless
sys.argv = ["convert", folder, "--outfile", out, "--outtype", "f32"]
converter.main()
"""
"""The converter knows published tokenizers only: it writes one of bytes instead."""


def converted(folder: Path, out: Path) -> Path:
    assert SOURCE is not None
    tests = Path(__file__).parents[1]
    command = [sys.executable, "-c", CONVERT, str(SOURCE), f"{tests}", str(folder), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tests.parent)
    assert done.returncode == 0, done.stderr[-3000:]
    return out


@contextmanager
def llama_server(path: Path, log: Path) -> Iterator[str]:
    with socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [PLACE.llama_tool("llama-server"), "-m", path, "--port", port, "-t", 1, "-c", 512, "-np", 1]
    command += ["--cache-type-k", "f32", "--cache-type-v", "f32", "-fa", "off", "--no-warmup"]
    with log.open("wb") as output, subprocess.Popen(map(str, command), stdout=output, stderr=output) as server:
        try:
            end = monotonic() + START_S
            while not healthy(port):
                assert server.poll() is None, log.read_text(errors="replace")[-3000:]
                assert monotonic() < end
                sleep(0.2)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.kill()


def healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def greedy(url: str, prompt: Sequence[int]) -> int:
    """The likeliest token after the prompt."""
    body = {"prompt": list(prompt), "n_predict": 1, "n_probs": 1, "temperature": 0.0, "ignore_eos": False}
    found = post(f"{url}/completion", body)
    return int(found["completion_probabilities"][0]["top_logprobs"][0]["id"])


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as reply:
        found: dict[str, Any] = json.load(reply)
    return found


def agreement(path: Path, log: Path, tokens: Sequence[int], got_TV: Any) -> float:
    """The part of the greedy tokens that are llama.cpp's."""
    with llama_server(path, log) as url:
        theirs_T = np.array([greedy(url, tokens[:end]) for end in range(1, len(got_TV) + 1)])
    return float((got_TV.argmax(1) == theirs_T).mean())


@pytest.mark.parametrize("name", MODELS)
def test_converted_files_give_the_same_answers(name: str, tmp_path: Path) -> None:
    config, folder = MODELS[name].shrunk(), tmp_path / "hf"
    if MODELS[name].architecture == "gpt-oss":
        config["rope_scaling"] = {"rope_type": "default"}  # llama.cpp rounds the ends of YaRN's ramp to whole columns
    if config["model_type"] == "deepseek_v2":  # llama.cpp chooses groups by the sum of two experts, V2 by the best one
        config |= {"topk_method": "greedy", "n_group": 1, "topk_group": 1}
    oracle = write_random_model(folder, config)
    path = converted(folder, tmp_path / "m.gguf")
    tokens = np.random.default_rng(1).integers(2, config["vocab_size"], LENGTH).tolist()
    want_TV, got_TV = oracle.logprobs_TV(tokens), read_rows(RunnerBench(path), tokens, 37)
    assert np.abs(got_TV - want_TV[: len(got_TV)]).max() <= TOLERANCE
    window = config.get("sliding_window") if MODELS[name].architecture == "phi3" else None
    seen = got_TV[:window]  # llama.cpp ignores Phi-3's window
    same = agreement(path, tmp_path / "server.log", tokens, seen)
    print(f"{name}: top-1 {same:.3f}")
    assert same >= AGREEMENT


STORYTELLER = Path(__file__).parents[2] / "src/penstock/bundled/storyteller"
TEXTS = [
    "Once upon a time, there was a little girl named Lily.",
    "  two  spaces,\ttabs\n\n and lines \r\n  \n end",
    "It's 12345 o'clock; WE'LL see... caf\u00e9, \u00c4rger, \u6771\u4eac\u306f\u591c, "
    "\u043f\u0440\u0438\u0432\u0435\u0442 \u043c\u0438\u0440!",
    "def f(x_1, y2): return {'camelCase': XMLHttp, \"a\": [1234567, 0.5]} // 100%\n\n\n",
]


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_texts_are_cut_as_llama_cpp_cuts_them(pre: str, tmp_path: Path) -> None:
    """With the bundled vocabulary, which has merges across what each of these rules cuts."""
    metadata = of_byte_level(json.loads((STORYTELLER / "tokenizer.json").read_text()), pre)
    tokens = metadata["tokenizer.ggml.tokens"]
    config = llama_config(vocab_size=len(tokens), hidden_size=32, num_attention_heads=2, num_hidden_layers=1)
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "llama")
    add_settings(writer, config)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(metadata["tokenizer.ggml.token_type"])
    writer.add_token_merges(metadata["tokenizer.ggml.merges"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    for name, value in random_tensors(config, dtype="fp32").items():
        writer.add_tensor(own_name(name), value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    made = Tokenizer.from_buffer(tokenizer_json(metadata, "m"))
    with llama_server(tmp_path / "m.gguf", tmp_path / "server.log") as url:
        for text in TEXTS:
            theirs = post(f"{url}/tokenize", {"content": text, "add_special": False})["tokens"]
            assert made.encode(text, add_special_tokens=False).ids == theirs


QUANTS = {
    **{kind: kind for kind in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q6_K", "IQ4_NL", "IQ4_XS")},
    "Q3_K_M": "Q3_K",
    "Q4_K_M": "Q4_K",
    "Q5_K_M": "Q5_K",
    "IQ3_S": "IQ3_S",
    "IQ3_XXS": "IQ3_XXS",
    "IQ2_M": "IQ2_S",
    **{kind: kind for kind in ("IQ2_XS", "IQ2_XXS", "IQ1_M", "IQ1_S", "TQ1_0", "TQ2_0")},
}
"""What the quantizer is to write, and a type that is in its file."""

WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 64}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("quantized")
    config = GgufCase(config="llama_3_2_1b", architecture="llama", changes=WIDE).shrunk()
    write_random_model(folder / "hf", config)
    write_imatrix(folder / "imatrix.gguf", converted(folder / "hf", folder / "m.gguf"))
    return folder, config


def write_imatrix(path: Path, model: Path) -> None:
    """All columns of all matrices matter as much: types of one and two bits are not written without such a file."""
    writer = gguf.GGUFWriter(str(path), "imatrix")
    writer.add_type("imatrix")
    writer.add_array("imatrix.datasets", ["none"])
    writer.add_uint32("imatrix.chunk_count", 1)
    writer.add_uint32("imatrix.chunk_size", 512)
    for tensor in gguf.GGUFReader(model).tensors:
        if len(tensor.shape) == 2:
            writer.add_tensor(f"{tensor.name}.in_sum2", np.ones((1, int(tensor.shape[0])), np.float32))
            writer.add_tensor(f"{tensor.name}.counts", np.ones((1, 1), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("kind", QUANTS)
def test_quantized_files_are_what_they_say(kind: str, plain: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    (folder, config), path = plain, tmp_path / f"{kind}.gguf"
    quantize("--imatrix", folder / "imatrix.gguf", folder / "m.gguf", path, kind)
    assert QUANTS[kind] in {tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}
    said = tmp_path / "said"
    said.mkdir()
    (said / "config.json").write_text(json.dumps(config))
    write_tokenizer(said, config["vocab_size"])
    with Checkpoint(folder / "hf") as checkpoint:
        like = {name: np.array(checkpoint.array(name)) for name in checkpoint.names}
    write_weights(said, read_gguf_model(path, "llama", config, like))
    tokens = np.random.default_rng(1).integers(2, config["vocab_size"], LENGTH).tolist()
    want_TV, got_TV = Oracle.of(said).logprobs_TV(tokens), read_rows(RunnerBench(path), tokens, 37)
    assert np.abs(got_TV - want_TV[: len(got_TV)]).max() <= TOLERANCE
    wide = tmp_path / "wide.gguf"
    quantize("--allow-requantize", path, wide, "F32")
    of_codes = agreement(path, tmp_path / "server.log", tokens, got_TV)
    same = agreement(wide, tmp_path / "server.log", tokens, got_TV)
    print(f"{kind}: top-1 {same:.3f}, of llama.cpp's products with activations of 8 bits {of_codes:.3f}")
    assert same >= AGREEMENT
    assert of_codes >= 0.8  # random weights hardly prefer one token to others


STORY = (
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the sunshine. One "
    "day, she saw a big, red ball in the park. Lily wanted to play with it, but a boy named Tom had it "
    'first. Tom said, "You can play with me if you share your cookies." Lily smiled and gave him a '
    "cookie. They played together all day, and the ball went up, up, up into the sky! When the sun went "
    'down, their moms came to take them home. "Goodbye, Tom!" said Lily. "Can we play again tomorrow?" '
    "That night, Lily told her mom about her new friend, and they were very happy."
)
ROUNDING = 0.1
"""Of llama.cpp's products with activations of 8 bits, in log-probability, on the bundled model."""


def test_a_trained_model_has_the_same_tokens_but_where_they_are_as_likely(
    plain_storyteller: Path, tmp_path: Path
) -> None:
    path = tmp_path / "q8.gguf"
    quantize(converted(plain_storyteller, tmp_path / "m.gguf"), path, "Q8_0")
    tokenizer = Tokenizer.from_file(str(STORYTELLER / "tokenizer.json"))
    tokens = [0, *tokenizer.encode(STORY, add_special_tokens=False).ids]
    got_TV = read_rows(RunnerBench(path), tokens, 37)
    with llama_server(path, tmp_path / "server.log") as url:
        theirs_T = np.array([greedy(url, tokens[:end]) for end in range(1, len(got_TV) + 1)])
    differ_T = np.flatnonzero(got_TV.argmax(1) != theirs_T)
    print(f"{len(differ_T)} of {len(got_TV)} tokens differ")
    behind_T = got_TV[differ_T].max(1) - got_TV[differ_T, theirs_T[differ_T]]
    assert (behind_T < ROUNDING).all()
    assert len(differ_T) <= 0.03 * len(got_TV)


def quantize(*words: object) -> None:
    done = subprocess.run([str(TOOLS[0]), *map(str, words), "1"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
