"""The block chain knows which images its tokens stand for, and where each began."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from penstock.hashing import block_hashes, chain_root, media_hash
from penstock.types import AudioInput, BlockHash, ImageInput, ModelIdentity, PlacedImage

ROOT = chain_root(ModelIdentity(fingerprint="f", numerics="n"))
TOKENS = [7] * 64


def chain(*images: PlacedImage, tokens: Sequence[int] = TOKENS) -> list[BlockHash]:
    return list(block_hashes(ROOT, tokens, images=images))


def placed(name: int, at: int, rows: int = 4, columns: int = 5) -> PlacedImage:
    return PlacedImage(bytes([name] * 32), at, rows, columns)


def test_no_two_sets_of_fields_have_one_root():
    """Neighbors that read alike when they are put together are told apart."""
    fields = ("", "a", "b", "ab", "abc", "c", "bc")
    roots = {
        chain_root(ModelIdentity(fingerprint=model, numerics=numerics), adapter=adapter, tenant_salt=salt)
        for model in fields for numerics in fields for adapter in fields for salt in fields
    }  # fmt: skip
    assert len(roots) == len(fields) ** 4


def test_blocks_before_an_image_are_shared_and_none_behind():
    plain, one, other = chain(), chain(placed(1, 20)), chain(placed(2, 20))
    assert plain[:1] == one[:1] == other[:1]
    assert not set(one[1:]) & set(other[1:])
    assert not set(one[1:]) & set(plain[1:])


def test_an_image_elsewhere_is_another_block():
    assert len({tuple(chain(placed(1, at))) for at in range(20, 24)}) == 4
    assert chain(placed(1, 20, 4, 5))[-1] == chain(placed(1, 20, 4, 5))[-1]


def test_two_images_in_one_block_are_told_from_their_exchange():
    assert chain(placed(1, 16, 1, 4), placed(2, 22, 1, 4)) != chain(placed(2, 16, 1, 4), placed(1, 22, 1, 4))


def test_a_picture_is_named_by_all_that_a_model_sees_of_it():
    one = ImageInput(2, 3, b"abc" * 6, 0.5, (0.0, 0.1, 0.2), (1.0, 1.0, 1.0))
    changes = (
        {"rows": 3, "columns": 2},
        {"pixels": b"abd" * 6},
        {"scale": 0.25},
        {"mean": (0.0, 0.1, 0.3)},
        {"deviation": (1.0, 2.0, 1.0)},
    )
    names = {media_hash(one), *(media_hash(msgspec.structs.replace(one, **change)) for change in changes)}
    assert len(names) == 1 + len(changes)


def test_a_sound_is_named_by_all_that_a_model_hears_of_it():
    one = AudioInput(16, 2, b"abcd" * 8)
    changes = ({"columns": 32}, {"bands": 4}, {"features": b"abce" * 8})
    names = {media_hash(one), *(media_hash(msgspec.structs.replace(one, **change)) for change in changes)}
    assert len(names) == 1 + len(changes)


def test_versions_of_the_kernels_share_no_page():
    """What is stored by another version is missed, but known to be this model's, by the same kernels otherwise."""
    for name in (
        "cpp-avx2-{}-bf16",
        "triton-{}-sm90-3.9.0-torch2.11.0-bf16-kv_fp8_e4m3",
        "torch-{}-cpu_avx2-2.11.0-fp32",
    ):
        old, new = (ModelIdentity(fingerprint="f", numerics=name.format(version)) for version in (1, 2))
        assert chain_root(old) != chain_root(new)
        assert old.unversioned == new.unversioned
        assert old.unversioned != ModelIdentity(fingerprint="g", numerics=new.numerics).unversioned
