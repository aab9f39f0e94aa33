"""What every offline driver is asked and answers.  Standard library only: it runs in each peer's own environment.

A driver gets one JSON object as its argument and prints one as a line of its own::

    {"prefill": {"128": [tokens/s, ...]}, "decode": {"1": [tokens/s]}, "load_s": s}

One that is to ``stay`` then waits: each line that it gets says what of the task is another now, and is answered like
the first.  The end of its input ends it.

Prefill of N tokens: from handing over one prompt of N tokens to having its first new token.
Decode of N streams: N prompts of ``context`` tokens have been read and each stream has had ``WARM_STEPS`` tokens; then
``steps`` more tokens of every stream are timed.  Greedy, nothing ends early.
"""

from __future__ import annotations

import json
import random
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

WARM_STEPS = 2


@dataclass(frozen=True)
class Task:
    model: str
    threads: int
    prefill: list  # of token counts
    decode: list  # of numbers of streams
    steps: int
    context: int
    seed: int
    vocab: int = 0  # 0: what the model's config.json says
    stay: bool = False
    int8: bool = False  # inputs of quantised weights are quantised too, where a driver can choose

    @classmethod
    def from_arguments(cls):
        return cls(**json.loads(sys.argv[1]))

    def repeats(self, tokens):
        """Short prompts are read more often: they are over sooner."""
        return 3 if tokens <= 256 else 2 if tokens <= 1024 else 1

    def prompt(self, tokens, *salt):
        """Token ids that no other prompt of the run begins with."""
        draw = random.Random(f"{self.seed} {tokens} {salt}")
        words = self.words()
        return [draw.randrange(256, words) for _ in range(tokens)]

    def words(self):
        """Token ids from 256 to here are neither bytes nor special."""
        return (self.vocab or json.loads((Path(self.model) / "config.json").read_text())["vocab_size"]) - 256

    def prompts(self, streams):
        return [self.prompt(self.context, "stream", streams, i) for i in range(streams)]


def prefill_rates(task, read):
    """Tokens/s of each prompt, by length; ``read`` returns when the prompt it is given has its first new token."""
    found = {}
    for tokens in task.prefill:
        found[str(tokens)] = rates = []
        for i in range(task.repeats(tokens)):
            prompt = task.prompt(tokens, i)
            began = time.perf_counter()
            read(prompt)
            rates.append(tokens / (time.perf_counter() - began))
    return found


def serve(task, load_s, prefill, decode):
    """Answer the task and, if it is to stay, what is asked next; ``prefill`` and ``decode`` take a task."""
    print(json.dumps({"prefill": prefill(task), "decode": decode(task), "load_s": load_s}), flush=True)
    while task.stay and (line := sys.stdin.readline()):
        task = replace(task, **json.loads(line))
        print(json.dumps({"prefill": prefill(task), "decode": decode(task), "load_s": load_s}), flush=True)
