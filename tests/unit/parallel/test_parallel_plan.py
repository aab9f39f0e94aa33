"""Plans hold every layer once, count every byte, and never promise tokens that do not fit."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config.mesh import TENSOR_WAYS
from penstock.errors import ConfigError
from penstock.parallel.plan import (
    GIB,
    CacheSize,
    Devices,
    LayerSize,
    ModelSize,
    balance_stages,
    make_plan,
    parse_devices,
    plan_for_tensor,
)

caches = st.builds(
    lambda a_head, heads, window: CacheSize(a_head * heads, heads, window),
    st.integers(1, 4096),
    st.sampled_from([1, 2, 3, 8]),
    st.none() | st.integers(16, 9000),
)
layers = st.builds(LayerSize, st.integers(0, 10**9), st.integers(0, 10**9), st.integers(0, 10**6), caches)
models = st.builds(
    ModelSize,
    embedding=st.integers(0, 10**9),
    head=st.integers(0, 10**9),
    layers=st.lists(layers, min_size=8, max_size=12).map(tuple),
    other=st.integers(0, 10**8),
    activation_bytes=st.integers(0, 10**8),
    max_positions=st.integers(1, 10**6),
)


def devices(count: int, gib: float) -> Devices:
    return Devices(count=count, name="a device", memory_bytes=int(gib * GIB), is_cpu=False)


def used(model: ModelSize, share_layers: range, tokens: int, tensor: int) -> int:
    """Bytes that one sequence of so many tokens takes on a device, counted token by token's rule."""
    total = 0
    for index in share_layers:
        cache = model.layers[index].cache
        kept = tokens if cache.window is None else min(tokens, cache.window)
        total += kept * cache.on_device(tensor)
    return total


@given(models, st.sampled_from([1, 2, 4, 8]), st.floats(0.5, 40))
def test_a_plan_has_every_layer_once_and_its_tokens_fit(model: ModelSize, count: int, gib: float) -> None:
    plan = make_plan(model, devices(count, gib))
    assert [i for share in plan.stages for i in share.layers] == list(range(len(model.layers)))
    assert plan.tensor * len(plan.stages) == count
    for share in plan.stages:
        parts = share.weights + share.activations + share.runtime + share.kv
        assert parts == plan.devices.memory_bytes
        if plan.fits:
            assert used(model, share.layers, plan.kv_tokens, plan.tensor) <= share.kv
    full = min((s.kv - used(model, s.layers, plan.kv_tokens + 16, plan.tensor) for s in plan.stages), default=0)
    assert full < 0 or plan.kv_tokens >= 1 << 40 or not plan.fits


@given(models, st.sampled_from(TENSOR_WAYS))
def test_weights_are_counted_in_full(model: ModelSize, tensor: int) -> None:
    plan = plan_for_tensor(model, devices(tensor, 100), tensor)
    copies = (tensor - 1) * (model.other + sum(layer.whole for layer in model.layers))
    rounding = tensor * (len(model.layers) + 2)
    assert 0 <= plan.weight_bytes - model.weight_bytes - copies <= rounding


@given(models.filter(lambda m: len(m.layers) <= 9), st.integers(1, 4))
def test_stages_are_as_balanced_as_any_cut(model: ModelSize, stages: int) -> None:
    def greatest(ends: tuple[int, ...]) -> int:
        plan_weights = []
        for begin, end in pairwise((0, *ends)):
            weights = model.other + sum(model.layers[i].on_device(1) for i in range(begin, end))
            weights += model.embedding if begin == 0 else 0
            if end == len(model.layers):
                weights += model.head or (model.embedding if begin else 0)
            plan_weights.append(weights)
        return max(plan_weights)

    every = [(*inner, len(model.layers)) for inner in combinations(range(1, len(model.layers)), stages - 1)]
    assert greatest(balance_stages(model, stages, 1)) == min(map(greatest, every))


def test_a_latent_cache_is_kept_by_every_device_and_heads_are_divided() -> None:
    assert CacheSize(1152, 1).on_device(8) == 1152
    assert CacheSize(4096, 8).on_device(2) == 2048
    assert CacheSize(4096, 8).on_device(8) == 512
    assert CacheSize(3072, 3).on_device(2) == 2048


@pytest.mark.parametrize(
    ("text", "count", "gib"),
    [("8xH100", 8, 79.1), ("h200", 1, 139.8), ("2x48GiB", 2, 48.0), ("cpu:64GiB", 1, 64.0), ("4xH100:70GiB", 4, 70.0)],
)
def test_devices_by_name_and_size(text: str, count: int, gib: float) -> None:
    found = parse_devices(text)
    assert (found.count, found.memory_bytes) == (count, int(gib * GIB))
    assert found.is_cpu == text.startswith("cpu")


@pytest.mark.parametrize("text", ["", "8x", "0xH100", "9999xH100", "3xH900", "H100,H200", "8xH100:0x", "x"])
def test_devices_that_are_not_understood_are_refused_with_what_is(text: str) -> None:
    with pytest.raises(ConfigError, match=r"devices|device"):
        parse_devices(text)
