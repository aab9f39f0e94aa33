"""OpenVINO GenAI, offline: ``LLMPipeline`` on token ids, with bf16 as its inference precision.

Its own clock readings, one a new token of all streams together, say when a step ended.
"""

from __future__ import annotations

import time

import numpy as np
import openvino as ov
import openvino_genai as genai
from task import WARM_STEPS, Task, prefill_rates, serve


class Engine:
    def __init__(self, task):
        settings = {"INFERENCE_PRECISION_HINT": "bf16", "INFERENCE_NUM_THREADS": task.threads}
        self.pipeline = genai.LLMPipeline(task.model, "CPU", **settings)

    def write(self, prompts, tokens):
        """Seconds at which each step's tokens were there."""
        ids = np.array(prompts, np.int64)
        inputs = genai.TokenizedInputs(ov.Tensor(ids), ov.Tensor(np.ones_like(ids)))
        config = genai.GenerationConfig(max_new_tokens=tokens, ignore_eos=True, do_sample=False)
        found = self.pipeline.generate(inputs, config)
        times = [1e-3 * moment for moment in found.perf_metrics.raw_metrics.m_new_token_times]
        assert len(times) == tokens, f"{len(times)} steps instead of {tokens}"
        return times


def decode(engine, task):
    found = {}
    for streams in task.decode:
        times = engine.write(task.prompts(streams), WARM_STEPS + task.steps)
        found[str(streams)] = [streams * task.steps / (times[-1] - times[WARM_STEPS - 1])]
    return found


def main():
    task = Task.from_arguments()
    began = time.perf_counter()
    engine = Engine(task)
    load_s = time.perf_counter() - began
    engine.write([task.prompt(task.context, "warm")], 2)
    serve(
        task,
        load_s,
        lambda asked: prefill_rates(asked, lambda prompt: engine.write([prompt], 1)),
        lambda asked: decode(engine, asked),
    )


main()
