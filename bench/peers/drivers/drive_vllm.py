"""vLLM, offline: its engine in this process, driven step by step through ``LLM``'s own engine.

Prefix caching is off: every prompt is new anyway.
"""

from __future__ import annotations

import os
import time

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from task import WARM_STEPS, Task, prefill_rates, serve
from vllm import LLM, SamplingParams


class Engine:
    def __init__(self, task):
        longest = max([*task.prefill, task.context + task.steps + 8]) + 64
        self.engine = LLM(
            model=task.model,
            dtype="bfloat16",
            max_model_len=longest,
            max_num_seqs=max([*task.decode, 1]),
            max_num_batched_tokens=max(longest, 2048),
            enable_prefix_caching=False,
            disable_log_stats=True,
            seed=0,
        ).llm_engine
        self.serial = 0

    def add(self, prompt, tokens):
        self.serial += 1
        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        self.engine.add_request(str(self.serial), {"prompt_token_ids": prompt}, sampling)

    def run(self, enough=0):
        """Step until all is done; when every stream first had ``enough`` tokens, and how many there were then and in
        the end."""
        told, marked, streams = {}, None, self.engine.get_num_unfinished_requests()
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                told[output.request_id] = len(output.outputs[0].token_ids)
            if marked is None and len(told) == streams and min(told.values()) >= enough:
                marked = (time.perf_counter(), sum(told.values()))
        return marked, (time.perf_counter(), sum(told.values()))


def first_token(engine, prompt):
    engine.add(prompt, 1)
    engine.run()


def decode(engine, task):
    found = {}
    for streams in task.decode:
        for prompt in task.prompts(streams):
            engine.add(prompt, WARM_STEPS + task.steps)
        (since, before), (until, after) = engine.run(enough=WARM_STEPS)
        found[str(streams)] = [(after - before) / (until - since)]
    return found


def main():
    task = Task.from_arguments()
    began = time.perf_counter()
    engine = Engine(task)
    load_s = time.perf_counter() - began
    engine.add(task.prompt(task.context, "warm"), 2)
    engine.run()
    serve(
        task,
        load_s,
        lambda asked: prefill_rates(asked, lambda prompt: first_token(engine, prompt)),
        lambda asked: decode(engine, asked),
    )


if __name__ == "__main__":
    main()
