"""``--sparse-attention``: what it makes of a model, and what it refuses."""

from __future__ import annotations

import msgspec
import pytest

from penstock.bundled import storyteller
from penstock.config.load import load_serve
from penstock.config.schema import ServeConfig
from penstock.errors import ConfigError
from penstock.kernels.native.backend import NativeOps, families
from penstock.kernels.operands import Sparse
from penstock.launch.sparse_attention import sparse_line, sparse_numerics, with_sparse_attention
from penstock.weights.architecture.spec import PoolerConfig, PoolingType
from penstock.weights.fingerprint import Fingerprint
from penstock.weights.inspect import inspect_model, spec_for_length

SPEC = inspect_model(storyteller())
ASKED = ServeConfig(sparse_attention=True, sparse_sinks=65, sparse_window=256, sparse_blocks=6, sparse_from=100)


def test_settings_become_whole_blocks_and_another_identity() -> None:
    spec = spec_for_length(with_sparse_attention(SPEC, ASKED), 256)
    assert spec.sparse == Sparse(sinks=2, window=4, chosen=6, start=100)
    assert Fingerprint().hexdigest(spec) != Fingerprint().hexdigest(SPEC)
    other = msgspec.structs.replace(spec, sparse=Sparse(sinks=2, window=4, chosen=6, start=101))
    assert Fingerprint().hexdigest(spec) != Fingerprint().hexdigest(other)
    ops = NativeOps(families()[-1], "bf16")
    assert sparse_numerics(spec, ops.numerics) == f"{ops.numerics}-sparse2.4.6.100"
    assert sparse_numerics(SPEC, ops.numerics) == ops.numerics
    assert "from position 100 on a token attends to at most 768 earlier tokens" in sparse_line(spec.sparse)


def test_off_unless_asked_for() -> None:
    assert with_sparse_attention(SPEC, ServeConfig()) is SPEC
    assert load_serve({"sparse_attention": True, "sparse_blocks": "8"}, {}).sparse_blocks == 8


@pytest.mark.parametrize(
    ("spec", "config", "reason"),
    [
        (SPEC, ServeConfig(sparse_blocks=3), "--sparse-blocks: only used by --sparse-attention"),
        (
            msgspec.structs.replace(SPEC, pooler=PoolerConfig(pooling=PoolingType.MEAN)),
            ASKED,
            "not a generative language model",
        ),
        (msgspec.structs.replace(SPEC, architecture="Plugin"), ASKED, "by its own code"),
    ],
)
def test_refusals(spec: object, config: ServeConfig, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        with_sparse_attention(spec, config)
