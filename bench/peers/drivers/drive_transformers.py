"""transformers, offline: ``forward`` in a greedy loop over its own cache, without what ``generate`` adds around it."""

from __future__ import annotations

import time

import torch
from task import WARM_STEPS, Task, prefill_rates, serve
from transformers import AutoModelForCausalLM, DynamicCache


class Engine:
    def __init__(self, task):
        torch.set_num_threads(task.threads)
        self.model = AutoModelForCausalLM.from_pretrained(task.model, dtype=torch.bfloat16).eval()

    def read(self, prompts):
        """(the cache, the first new tokens)."""
        cache = DynamicCache(config=self.model.config)
        return cache, self.step(torch.tensor(prompts), cache)

    def step(self, tokens_BT, cache):
        logits = self.model(tokens_BT, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        return logits[:, -1].argmax(-1, keepdim=True)


def decode(engine, task):
    found = {}
    for streams in task.decode:
        cache, tokens = engine.read(task.prompts(streams))
        for step in range(WARM_STEPS - 1 + task.steps):
            if step == WARM_STEPS - 1:
                began = time.perf_counter()
            tokens = engine.step(tokens, cache)
        found[str(streams)] = [streams * task.steps / (time.perf_counter() - began)]
    return found


@torch.inference_mode()
def main():
    task = Task.from_arguments()
    began = time.perf_counter()
    engine = Engine(task)
    load_s = time.perf_counter() - began
    engine.read([task.prompt(task.context, "warm")])
    serve(
        task,
        load_s,
        lambda asked: prefill_rates(asked, lambda prompt: engine.read([prompt])),
        lambda asked: decode(engine, asked),
    )


main()
