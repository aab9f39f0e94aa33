"""Families are found by architecture: built-in ones, and those of installed packages."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.engine.models.registry import BUILT_IN, build_model
from penstock.errors import ModelError
from penstock.kernels.select import make_ops
from penstock.weights.families import registry
from penstock.weights.inspect import inspect_model
from penstock.weights.load import load_model
from runner_bench import GREEDY, RunnerBench
from tiny_models import llama_config, write_model

PLUGIN = '''
"""A family under another name: Llama with its sizes taken from the same fields."""

import msgspec

from penstock.engine.models import decoder as model
from penstock.weights.families import llama
from penstock.weights.families.registry import CheckpointFormat


class Other:
    build = staticmethod(model.build_decoder)
    checkpoint = CheckpointFormat(
        parse=lambda fields: msgspec.structs.replace(llama.parse_llama(fields), architecture="OtherForCausalLM"),
        layout=llama.llama_layout,
    )
'''


@pytest.fixture
def installed_plugin(tmp_path: Path) -> Iterator[None]:
    """A distribution on the path that offers ``OtherForCausalLM``."""
    site = tmp_path / "site"
    (site / "other_family-1.0.dist-info").mkdir(parents=True)
    (site / "other_family.py").write_text(PLUGIN)
    info = site / "other_family-1.0.dist-info"
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other-family\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[penstock.models]\nOtherForCausalLM = other_family:Other\n")
    sys.path.insert(0, str(site))
    yield
    sys.path.remove(str(site))
    sys.modules.pop("other_family", None)


def test_both_halves_of_the_built_in_families_are_there() -> None:
    assert BUILT_IN.keys() == registry.BUILT_IN.keys()


@pytest.mark.usefixtures("installed_plugin")
def test_a_family_of_an_installed_package(tmp_path: Path) -> None:
    config = llama_config()
    plain = RunnerBench(write_model(tmp_path / "plain", config))
    folder = write_model(tmp_path / "other", config)
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["OtherForCausalLM"]}))
    other = RunnerBench(folder)
    assert other.spec.architecture == "OtherForCausalLM"
    prompt = list(range(20))
    assert other.read(other.request(prompt, GREEDY), 20) == plain.read(plain.request(prompt, GREEDY), 20)


def test_without_the_package_the_architecture_is_refused(tmp_path: Path) -> None:
    config = llama_config(architectures=["OtherForCausalLM"])
    with pytest.raises(
        ModelError,
        match=r"'OtherForCausalLM' cannot be served; these of like names can: .*docs.models.md",
    ):
        inspect_model(write_model(tmp_path, config))


def test_more_positions_than_the_model_has_are_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path, llama_config())
    ops = make_ops(compute_dtype="fp32")
    loaded = load_model(folder, inspect_model(folder), ops)
    with pytest.raises(ModelError, match="has 512 positions, 513 were asked for"):
        build_model(loaded, ops, 513)
