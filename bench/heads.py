"""What a draft head brings: tokens a step on stories nobody trained with, and the time of answers with it and without.

    python bench/heads.py                      # the bundled model and its head, alone and eight at a time
    python bench/heads.py depths               # how often the first guess stands, the first two, and so on
    python bench/heads.py replay --model DIR   # the same acceptance on another model, with a random head of its shape

Each answer is compared token by token with the one without guesses.  ``replay`` is for a model that may write nonsense,
such as one of random weights: a head of its shape really guesses, in its full time, and then its guesses are replaced
by such as are right and wrong as often as those of the bundled head were.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import ml_dtypes
import numpy as np
from speculation import REQUESTS, STEP_TOKENS, TOKENS_AT_ONCE, Engine, Mode, Tally, arguments, compared, repetition, run
from tokenizers import Tokenizer

from penstock.bundled import storyteller
from penstock.clock import Clock, MonotonicClock
from penstock.engine.core.plan import DraftProposer, SampledTokens, ScheduledTokens
from penstock.engine.models.eagle import build_head
from penstock.engine.models.registry import build_model
from penstock.engine.runner.model_runner import ModelRunner
from penstock.engine.spec.draft_model import SLOT_TOKENS, Drafter, EagleSource
from penstock.engine.spec.proposer import DraftModelProposer
from penstock.kernels.select import make_ops
from penstock.types import PAGE_TOKENS, RequestId, SamplingParams
from penstock.weights.checkpoint_reader import Checkpoint
from penstock.weights.compression_convert import compress_folder
from penstock.weights.eagle import FOLDER, inspect_draft_head, load_draft_head
from penstock.weights.inspect import compute_dtype_for, inspect_model
from penstock.weights.load import load_model

HELD_OUT = (
    "Make up a story about Ole Luckoie.",
    "Please tell me a story about Mistress and a cock.",
    "Write a story about a well and a hat.",
    "Make up a story about Rhodes.",
    "Write a story called Uncle Wiggily and the Water Lilies.",
    "Continue: But he thought he would try just one more place, so he looked down a hollow stump, but Snowball was not "
    "there.",
    "Tell me a story about a miller, a donkey and a wolf.",
    "Write a story about a king who lost his shadow.",
)
"""Like requests for texts that the model was not trained on; the others ask for stories as it tells them best."""

DEEPEST = 6
"""Guesses after which nobody looks any more."""


class Pair:
    """A model with its head: an engine that hands hidden states out, one that does not, and whoever guesses."""

    def __init__(self, folder: Path, head: Path, threads: int, longest: int) -> None:
        self.spec = inspect_model(folder)
        self.ops = make_ops(compute_dtype=compute_dtype_for(self.spec, "auto"), threads=threads)
        loaded = load_model(folder, self.spec, self.ops, threads=threads)
        model = build_model(loaded, self.ops, min(self.spec.max_positions, longest))
        found = load_draft_head(head, inspect_draft_head(head, self.spec), loaded.weights_hash, self.ops)
        self.head = build_head(found, loaded, self.ops, SLOT_TOKENS)
        pages = 8 * -(-longest // PAGE_TOKENS) + 8

        def runner(tapped: tuple[int, ...]) -> ModelRunner:
            kv = self.ops.new_kv(self.spec.kv, pages=pages)
            return ModelRunner(model, self.ops, kv, self.ops.record(model, kv, tapped=tapped))

        self.runner = runner(self.head.tapped)
        self.runner.record_hidden_states(self.head.tapped, self.head.hidden)
        self.guessing = Engine(self.runner, self.spec.parameters, longest)
        self.plain = Engine(runner(()), self.spec.parameters, longest)

    def drafter(self, clock: Clock) -> Drafter:
        guide = EagleSource(self.head, self.spec.vocab, self.runner)
        return Drafter(guide, self.ops, vocab=self.spec.vocab, places=16, clock=clock)

    def speculator(self, clock: Clock) -> DraftModelProposer:
        return DraftModelProposer(self.drafter(clock), most_each=TOKENS_AT_ONCE, most=STEP_TOKENS)


class Deep:
    """Guesses ``DEEPEST`` tokens in every step, whatever that costs."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        drafter.set_active(True)

    def propose(self, rows: Sequence[ScheduledTokens]) -> Sequence[tuple[int, ...]]:
        return self._drafter.draft(rows, DEEPEST)

    def on_step(self, rows: Sequence[ScheduledTokens], drawn: Sequence[SampledTokens], seconds: float) -> None:
        pass

    def remove_request(self, request: RequestId) -> None:
        self._drafter.remove_request(request)


def bundled(args: argparse.Namespace) -> tuple[Pair, list[list[int]]]:
    folder = Path(storyteller())
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = HELD_OUT if args.held_out else REQUESTS
    prompts = [tokenizer.encode(f"<|begin|><|user|>{text}<|end|><|assistant|>").ids for text in texts]
    return Pair(folder, args.head or folder / FOLDER, args.threads, 1024), prompts


def sampling_of(args: argparse.Namespace, temperature: float) -> SamplingParams:
    return SamplingParams(seed=7, max_tokens=args.tokens, temperature=temperature, stop_token_ids=(1,))


def stories(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Greedy and sampled; one answer at a time and eight side by side."""
    pair, prompts = bundled(args)
    found = []
    for temperature in (0.0, 0.7):
        for batch in (1, len(prompts)):
            groups = [prompts[first : first + batch] for first in range(0, len(prompts), batch)]
            name = f"stories, temperature {temperature:g}, {batch} at a time"
            sampling = sampling_of(args, temperature)
            found.append(compared(name, (pair.plain, pair.guessing), groups, sampling, pair.speculator, args))
    return found


def stood(args: argparse.Namespace, temperature: float) -> tuple[list[int], float]:
    """How many of ``DEEPEST`` guesses stood, step by step, and how much of the stories was repeated."""
    pair, prompts = bundled(args)
    counts, repeated = list[int](), list[float]()
    for prompt in prompts:
        tally = Tally(Deep(pair.drafter(MonotonicClock())))
        (answer,), _ = pair.guessing.answer([prompt], sampling_of(args, temperature), tally, MonotonicClock())
        (wanted,), _ = pair.plain.answer([prompt], sampling_of(args, temperature), Tally(None), MonotonicClock())
        if answer != wanted:
            raise SystemExit("guessing changed an answer")
        counts += [right for guessed, right in tally.guesses if guessed == DEEPEST]
        repeated.append(repetition(answer))
    return counts, statistics.mean(repeated)


def depths(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One line a temperature."""
    for temperature in (0.0, 0.7):
        counts, repeated = stood(args, temperature)
        chain = [sum(count >= depth for count in counts) / len(counts) for depth in range(1, DEEPEST + 1)]
        tokens = [1 + sum(chain[:depth]) for depth in range(1, DEEPEST + 1)]
        print(f"temperature {temperature:g}: stood {' '.join(f'{share:.2f}' for share in chain)}")
        print(
            f"   tokens a step by depth {' '.join(f'{count:.2f}' for count in tokens)}, {100 * repeated:.0f} % repeated"
        )
    return []


# --- the same acceptance elsewhere -----------------------------------------------------------------------------------


class Replayed:
    """A drafter whose guesses are replaced, after it has made them, by such as are right so often."""

    def __init__(self, inner: Drafter, answer: Sequence[int], counts: Sequence[int]) -> None:
        self._inner, self._answer = inner, answer
        self._counts, self._random = counts, Random(7)
        self.places = inner.places

    @property
    def seconds(self) -> tuple[float, float]:
        return self._inner.seconds

    def guess(self, rows: Sequence[ScheduledTokens], depth: int) -> list[tuple[int, ...]]:
        (draft,) = self._inner.draft(rows, depth) or ((),)
        done, right = len(rows[0].request.output), self._random.choice(self._counts)
        tokens = list(self._answer[done : done + len(draft)])
        if right < len(tokens):
            tokens[right] += 1 if tokens[right] == 0 else -1
        return [tuple(tokens)]

    def follow(self, wanted: bool) -> None:
        self._inner.set_active(wanted)

    def forget(self, request: RequestId) -> None:
        self._inner.remove_request(request)


def random_head(folder: Path, model: Path, outputs: int) -> Path:
    """A head of the model's shape, of random weights, compressed if the model is."""
    config = json.loads((model / "config.json").read_text())
    rng, width, inner = np.random.default_rng(5), config["hidden_size"], config["intermediate_size"]
    size = config.get("head_dim") or width // config["num_attention_heads"]
    queries, keys = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    shapes = {
        "fc": (width, 3 * width),
        "midlayer.self_attn.q_proj": (queries, 2 * width),
        "midlayer.self_attn.k_proj": (keys, 2 * width),
        "midlayer.self_attn.v_proj": (keys, 2 * width),
        "midlayer.self_attn.o_proj": (width, queries),
        "midlayer.mlp.gate_proj": (inner, width),
        "midlayer.mlp.up_proj": (inner, width),
        "midlayer.mlp.down_proj": (width, inner),
        "lm_head": (outputs, width),
        **{f"midlayer.{name}": (width,) for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")},
        "norm": (width,),
    }
    header, end, parts = dict[str, Any](), 0, list[bytes]()
    for name, shape in shapes.items():
        values = rng.standard_normal(shape, np.float32) / np.sqrt(shape[-1]) if len(shape) == 2 else np.ones(shape)
        parts.append(values.astype(ml_dtypes.bfloat16).tobytes())
        header[f"{name}.weight"] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + len(parts[-1])]}
        end += len(parts[-1])
    parts.append(np.zeros(outputs, np.int64).tobytes())
    header["d2t"] = {"dtype": "I64", "shape": [outputs], "data_offsets": [end, end + len(parts[-1])]}
    raw = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + b"".join(parts))
    own = config | {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": outputs}
    (folder / "config.json").write_text(json.dumps(own))
    with Checkpoint(model) as checkpoint:
        if not any(file.is_compressed for file in checkpoint.files):
            return folder
    compress_folder(folder, folder / "compressed", threads=2, report=lambda one: None)
    return folder / "compressed"


def replay(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One stream."""
    found = []
    sampling = SamplingParams(seed=0, max_tokens=args.tokens, temperature=0.0)
    prompt = list(range(1000, 1064))
    counts = {temperature: stood(args, temperature)[0] for temperature in (0.0, 0.7)}
    with tempfile.TemporaryDirectory() as folder:
        head = random_head(Path(folder), args.model, args.outputs)
        pair = Pair(args.model, head, args.threads, 64 + args.tokens)
    (answer,), _ = pair.plain.answer([prompt], sampling, Tally(None), MonotonicClock())
    for temperature, own in counts.items():

        def make(clock: Clock, own: Sequence[int] = own) -> DraftProposer:
            drafter: Any = Replayed(pair.drafter(clock), answer, own)
            return DraftModelProposer(drafter, most_each=TOKENS_AT_ONCE, most=STEP_TOKENS)

        name = f"acceptance of stories, temperature {temperature:g}"
        found.append(compared(name, (pair.plain, pair.guessing), [[prompt]], sampling, make, args))
        found[-1].pop("repeated")
    return found


MODES: dict[str, Mode] = {"stories": stories, "depths": depths, "replay": replay}


def main() -> int:
    parser = arguments(__doc__, MODES)
    parser.add_argument("--head", type=Path, help="another head for the bundled model")
    parser.add_argument("--held-out", action="store_true", help="stories that the model finds hard")
    parser.add_argument("--outputs", type=int, default=32_000, help="tokens that the head of replay can guess")
    return run(parser, MODES)


if __name__ == "__main__":
    sys.exit(main())
