"""What the engine's loop needs of a runner.

Two implementations: ``model_runner.ModelRunner`` (a model, kernels, KV memory) and ``null_runner.NullRunner`` (a hash).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from penstock.engine.core.plan import SampledTokens, StepPlan
from penstock.types import RequestId


class Runner(Protocol):
    """Computes plans.  It never changes a request: what it drew is taken up by the scheduler's ``commit``."""

    def run(self, plan: StepPlan) -> Sequence[SampledTokens]:
        """One ``SampledTokens`` per row, in the order of ``plan.rows``; ``mask_late``: the row must be computed again.

        A row that samples draws ``plan.steps`` tokens, the first for position ``start + count``; each is the input
        of the next.  A row with a draft (then ``steps`` is 1) samples one more after each draft token, and returns the
        accepted ones (``accepted_count``) and the one after them.  The pages of ``row.request`` already reach as far as
        the last token that is computed.
        """
        ...

    def remove_request(self, request: RequestId) -> None:
        """Drop what is kept for this request between steps; an unknown one is no error."""
        ...


class PipelinedRunner(Runner, Protocol):
    """A runner whose model has stages, which compute several plans at once."""

    def launch(self, plan: StepPlan) -> None:
        """Let the first stage begin a plan with rows.  Plans are ``run`` in the order in which they were launched."""
        ...
