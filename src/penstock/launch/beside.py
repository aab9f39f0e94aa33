"""How large is what will be loaded beside a model: from configurations and headers, before anything is loaded.

Knows the sizes of heads, draft models and adapters; not where they lie (``config.resolve``, ``parallel.plan``).
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.config.facts import Beside
from penstock.config.schema import MAX_DRAFTING, EngineSettings, NamedAdapter
from penstock.kernels.operands import KvShape
from penstock.launch.drafting import DRAFT_POSITIONS, Found, FoundHead
from penstock.weights.eagle import HeadSpec
from penstock.weights.spec import ModelSpec

NUMBER_BYTES = 2


def beside_of(
    config: EngineSettings, found: Found | None, loras: Sequence[NamedAdapter] = (), *, more_loras: bool = False
) -> tuple[Beside, ...]:
    """What these settings load beside the model.  ``found``: what guesses for it (``drafting.find``); ``more_loras``:
    other adapters may come while it runs."""
    drafts: tuple[Beside, ...] = ()
    if found is not None:
        drafts = (of_head(found.spec) if isinstance(found, FoundHead) else of_model(found.spec),)
    adapters = of_adapters([own.nbytes for own in loras], config.lora_memory if more_loras else None)
    return (*drafts, *adapters)


def of_head(spec: HeadSpec) -> Beside:
    """A head, and the memory of what it reads."""
    kv = KvShape.plain(layers=1, kv_heads=spec.attention.kv_heads, head_dim=spec.attention.head_dim)
    return _draft("draft head", spec.parameters, kv)


def of_model(spec: ModelSpec) -> Beside:
    """A draft model, and the memory of what it reads."""
    return _draft("draft model", spec.parameters, spec.kv)


def of_adapters(nbytes: Sequence[int], room: int | None) -> tuple[Beside, ...]:
    """Adapters whose files have so many bytes; ``room``: up to so many bytes of adapters may be in memory later."""
    together = sum(nbytes)
    if not together and not room:
        return ()
    why = f"{len(nbytes)} adapters as large as their files"
    if room is None:
        return (Beside(name="LoRA adapters", shared_bytes=together, why=why),)
    more = max(0, room - together)
    return (
        Beside(
            name="LoRA adapters",
            shared_bytes=together,
            worker_bytes=more,
            why=f"{why}, and {more:,} bytes more in each worker, up to --lora-memory",
        ),
    )


def _draft(name: str, parameters: int, kv: KvShape) -> Beside:
    numbers = kv.layers * kv.kv_heads * (kv.key_dim + (0 if kv.shared else kv.value_dim))
    a_token = numbers * NUMBER_BYTES
    return Beside(
        name=name,
        shared_bytes=parameters * NUMBER_BYTES,
        worker_bytes=MAX_DRAFTING * DRAFT_POSITIONS * a_token,
        why=(
            f"{parameters / 1e6:,.1f} M weights in bf16; in each worker {MAX_DRAFTING} contexts of {DRAFT_POSITIONS:,} "
            f"tokens, {a_token:,} bytes each"
        ),
    )
