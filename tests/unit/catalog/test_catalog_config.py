"""Catalogue files: what an entry says, what it inherits, what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.catalog.config import DEFAULT_KV_BYTES, CatalogEntry, load_catalog
from penstock.config.load import load_serve
from penstock.errors import ConfigError


def entries(tmp_path: Path, text: str, **flags: object) -> tuple[CatalogEntry, ...]:
    file = tmp_path / "models.toml"
    file.write_text(text)
    return load_catalog(load_serve({"catalogue": str(file)} | flags, {}))


def test_an_entry_is_a_service_of_its_own(tmp_path: Path) -> None:
    one, two = entries(
        tmp_path,
        """
        [[model]]
        name = "small"
        path = "~/models/small"
        aliases = ["gpt-4o-mini"]
        pinned = true
        kv-memory = "64MiB"
        aggregated = true
        lora = ["fox=/adapters/fox"]

        [[model]]
        name = "org/large"
        path = "org/large"
        decode = 2
        """,
        prefill=1,
        decode=1,
        model_memory="8GiB",
    )
    assert (one.name, one.path, one.aliases, one.pinned, one.workers) == (
        "small", "~/models/small", ("gpt-4o-mini",), True, 1,
    )  # fmt: skip
    assert one.settings.kv_memory == 64 << 20
    assert one.settings.lora == ("fox=/adapters/fox",)
    assert (one.settings.model, one.settings.served_model_name) == ("~/models/small", "small")
    assert (one.settings.catalogue, one.settings.model_memory) == (None, None)
    assert (two.pinned, two.workers, two.settings.kv_memory) == (False, 3, DEFAULT_KV_BYTES)


def test_one_model_may_have_the_gpu_with_all_that_is_free_there(tmp_path: Path) -> None:
    text = '[[model]]\nname = "a"\npath = "a"\n[[model]]\nname = "b"\npath = "b"\ndevice = "cuda"\nmax_running = 7\n'
    one, two = entries(tmp_path, text)
    assert (one.settings.device, one.settings.max_running, one.settings.kv_memory) == ("auto", 256, DEFAULT_KV_BYTES)
    assert (two.settings.device, two.settings.max_running, two.settings.kv_memory) == ("cuda", 7, None)
    assert (one.workers, two.workers) == (2, 1)


def test_models_of_a_catalog_have_decoded_copies_only_if_that_is_said(tmp_path: Path) -> None:
    text = '[[model]]\nname = "a"\npath = "a"\n[[model]]\nname = "b"\npath = "b"\ndecoded_weights = "1GiB"\n'
    one, two = entries(tmp_path, text)
    assert (one.settings.decoded_weights, two.settings.decoded_weights) == (0, 1 << 30)


def test_a_models_own_gateway_knows_the_names_that_mean_it(tmp_path: Path) -> None:
    """Its aliases, which are no patterns, and those patterns of the front that mean it, or an adapter of it."""
    text = """
        [[model]]
        name = "a"
        path = "a"
        aliases = ["gpt[4]", "big"]
        lora = ["fox=/adapters/fox"]
        [[model]]
        name = "b"
        path = "b"
        """
    one, two = entries(tmp_path, text, model_alias=["claude-*=b", "haiku=fox", "c*=big"])
    assert one.settings.model_alias == ("gpt[[]4]=a", "big=a", "haiku=fox", "c*=a")
    assert two.settings.model_alias == ("claude-*=b",)


MODEL = '[[model]]\nname = "a"\npath = "b"\n'
REFUSED = {
    "no table": ("", "expected 1 to"),
    "another table": (MODEL + "[other]\n", "nothing else"),
    "no path": ('[[model]]\nname = "a"\n', "model 1: path must be a text"),
    "a strange name": ('[[model]]\nname = "a b"\npath = "b"\n', "letters, digits"),
    "an unknown setting": (MODEL + "port = 8000\n", r"model 1 \(a\): no such setting of a model: port"),
    "a wrong value": (MODEL + 'kv_memory = "lots"\n', "kv_memory: expected a size"),
    "a name twice": (MODEL + MODEL.replace('"a"', '"c"\naliases = ["a"]'), "'a' occurs twice"),
    "no TOML": ("[[model", "not valid TOML"),
    "pinned by word": (MODEL + 'pinned = "yes"\n', "pinned must be true or false"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_file_entry_and_field(tmp_path: Path, case: str) -> None:
    text, words = REFUSED[case]
    with pytest.raises(ConfigError, match=words) as refused:
        entries(tmp_path, text)
    assert "models.toml" in str(refused.value)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"catalogue": "x", "model": "y"}, "MODEL belongs into the catalogue"),
        ({"catalogue": "x", "lora": "a=b"}, "--lora belongs into the catalogue"),
        ({"model_memory": "1GiB"}, "--model-memory is for --catalogue"),
        ({"lora": "noequals"}, "expected NAME=DIR"),
        ({"lora": "a=b,a=c"}, "named a already"),
    ],
)
def test_flags_that_do_not_go_together(flags: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_serve(flags, {})
