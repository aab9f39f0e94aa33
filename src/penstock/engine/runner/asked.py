"""What some rows of a step ask for beside a token: masks of grammars before it is drawn, scores of prompt tokens after.

Knows spans and operations, not which runner has them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from penstock.engine.models.port import Model
from penstock.engine.runner.constraint import MaskThreads
from penstock.engine.runner.span import Span, token_logprob
from penstock.kernels.operands import Array
from penstock.kernels.ops import Ops

SCORED_ROWS = 64
"""Prompt positions scored at once: bounds the logits held in memory to this many rows of the vocabulary."""


def look_ahead(spans: Sequence[Span], masks: MaskThreads, *, may_sit_out: bool) -> Callable[[], None] | None:
    """Work out masks beside the step that they are for; what is returned waits for them, for so long as
    ``MaskThreads.patience`` says if rows may sit the step out."""
    work = [
        (span.answer.constraint, tuple(span.drawn), span.draft) for span in spans if span.answer.constraint is not None
    ]
    return masks.begin(work, may_sit_out=may_sit_out).finish if work else None


def go_on(spans: Sequence[Span], masks: MaskThreads) -> None:
    """A step has drawn: where masks are slow, the next ones are worked out from now on."""
    for span in spans:
        if span.answer.constraint is not None and span.answer.constraint.slow:
            masks.go_on(span.answer.constraint, span.result().tokens)


def score(model: Model, ops: Ops, spans: Sequence[Span], hidden_RD: Array) -> None:
    """Log-probabilities of prompt tokens, for the first rows of ``hidden_RD``: span by span, piece by piece."""
    begin = 0
    for span in spans:
        targets_R = np.array(span.targets, np.int32)
        top = span.answer.request.sampling.prompt_logprobs or 0
        for first in range(0, len(targets_R), SCORED_ROWS):
            piece_R = targets_R[first : first + SCORED_ROWS]
            rows_R = np.arange(begin + first, begin + first + len(piece_R), dtype=np.int32)
            logits_RV = model.logits(ops, ops.rows(hidden_RD, rows_R))
            scored = ops.token_logprobs(logits_RV, piece_R, top)
            span.prompt_logprobs.extend(token_logprob(one) for one in scored)
        begin += len(targets_R)
