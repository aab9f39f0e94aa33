"""Loads a draft head or draft model, and makes a worker's draft proposer from it.

Imported only by processes that load weights or compute.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from penstock.clock import Clock
from penstock.config.schema import SchedulerConfig
from penstock.engine.core.plan import DraftProposer
from penstock.engine.models.eagle import EagleHead, build_head
from penstock.engine.models.interface import Model
from penstock.engine.models.registry import build_model
from penstock.engine.runner.model_runner import ModelRunner
from penstock.engine.spec.draft_model import SLOT_TOKENS, Drafter, DraftModelSource, DraftSource, EagleSource
from penstock.engine.spec.proposer import DraftModelProposer, NgramProposer
from penstock.kernels.operands import Array, KvShape
from penstock.kernels.ops import Ops, StepProgram
from penstock.launch.draft_model import DraftFolder, DraftHeadFolder
from penstock.weights.eagle import load_draft_head
from penstock.weights.load import LoadedModel, load_model

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedDraftModel:
    """A draft model in memory."""

    model: Model
    kv: KvShape
    vocab: int


LoadedDraft = EagleHead | LoadedDraftModel


def load_draft(found: DraftFolder, model: LoadedModel, ops: Ops, threads: int) -> LoadedDraft:
    """Load it into memory that all workers share.  Raises ModelError."""
    if isinstance(found, DraftHeadFolder):
        head = load_draft_head(found.path, found.spec, model.weights_hash, ops)
        log.info("drafting with the head in %s, %d outputs", found.path, found.spec.outputs)
        return build_head(head, model, ops, SLOT_TOKENS)
    loaded = load_model(found.path, found.spec, ops, threads=threads)
    log.info("drafting with %s: %.1f M parameters", found.path, found.spec.parameters / 1e6)
    kv = replace(found.spec.kv, groups=())  # its contexts are shorter than any window
    return LoadedDraftModel(build_model(loaded, ops, SLOT_TOKENS), kv, found.spec.vocab)


def record_step(model: Model, ops: Ops, kv: Array, loaded: LoadedDraft | None) -> StepProgram:
    """The model's step program, which gives a draft head the hidden states that it reads."""
    return ops.record(model, kv, tapped=loaded.tapped if isinstance(loaded, EagleHead) else ())


@dataclass(frozen=True, slots=True)
class ProposerFactory:
    """Builds a worker's draft proposer.  ``loaded`` None: n-gram lookup only.  ``vocab``: of the model."""

    loaded: LoadedDraft | None
    ops: Ops
    vocab: int
    clock: Clock

    def build_proposer(self, config: SchedulerConfig, runner: ModelRunner) -> DraftProposer | None:
        """The proposer; None without speculation.  ``runner`` runs the program of ``record_step``."""
        if config.max_draft_tokens == 0:
            return None
        limits = {"most_each": config.max_draft_tokens, "most": config.max_step_draft_tokens}
        guide: DraftSource
        match self.loaded:
            case None:
                return NgramProposer(**limits, clock=self.clock)
            case EagleHead() as head:
                runner.record_hidden_states(head.tapped, head.hidden)
                guide = EagleSource(head, self.vocab, runner)
            case LoadedDraftModel() as small:
                guide = DraftModelSource(small.model, small.kv, small.vocab)
        drafter = Drafter(guide, self.ops, vocab=self.vocab, places=config.max_drafting, clock=self.clock)
        return DraftModelProposer(drafter, **limits)
