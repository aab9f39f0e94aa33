"""Files of slabs: whose they are, what is in them after a restart, a crash, a flipped bit."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.store_rig import IDENTITY, LAYOUT, SIZE, final_of, flip, key_of, page_of, slab_tier

from penstock.errors import ConfigError, PageCorrupt
from penstock.kv.store.page_index import index_bytes
from penstock.kv.store.slab_tier import BLOCK, slab_head
from penstock.types import ModelIdentity

PLACES = slab_head(IDENTITY, LAYOUT, SIZE, encrypted=False).places


def fill(path: Path, count: int, **more: object) -> None:
    tier = slab_tier(path, **more)
    for number in range(count):
        assert tier.write_page(final_of(number), memoryview(page_of(number)))
    tier.close()


def read(tier, number: int) -> bytes | None:
    into = bytearray(LAYOUT.page_bytes)
    return bytes(into) if tier.read_page(key_of(number), memoryview(into)) else None


def test_the_size_is_kept_and_taken_at_once(tmp_path: Path):
    fill(tmp_path / "f", 1)
    stat = (tmp_path / "f").stat()
    assert stat.st_size == BLOCK + index_bytes(PLACES) + PLACES * BLOCK <= SIZE
    assert stat.st_blocks * 512 >= stat.st_size
    assert stat.st_mode & 0o777 == 0o600
    with pytest.raises(ConfigError, match="hold no KV page"):
        slab_head(IDENTITY, LAYOUT, 1 << 16, encrypted=False)


def test_all_of_it_is_there_after_a_restart(tmp_path: Path):
    fill(tmp_path / "f", 40)
    tier = slab_tier(tmp_path / "f")
    assert tier.pages == 40
    assert [read(tier, number) for number in range(40)] == [page_of(number) for number in range(40)]
    assert tier.write_page(final_of(40), memoryview(page_of(40)))
    tier.close()


def test_other_shares_find_it_in_places_of_their_own(tmp_path: Path):
    fill(tmp_path / "f", 20, share=(0, 1))
    tiers = [slab_tier(tmp_path / "f", share=(n, 3)) for n in range(3)]
    assert [read(tiers[2], number) for number in range(20)] == [page_of(number) for number in range(20)]
    tiers[1].write_page(final_of(99), memoryview(page_of(99)))
    assert tiers[0].contains([key_of(99)]) == [True]
    assert read(tiers[0], 99) == page_of(99)
    for tier in tiers:
        tier.close()


def test_who_comes_second_reads_only(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    first = slab_tier(tmp_path / "f")
    second = slab_tier(tmp_path / "f")
    assert "another service" in caplog.text
    first.write_page(final_of(1), memoryview(page_of(1)))
    assert second.contains([key_of(1)]) == [True]
    assert read(second, 1) == page_of(1)
    assert not second.write_page(final_of(2), memoryview(page_of(2)))
    first.close()
    second.close()


def test_a_file_of_another_model_is_refused(tmp_path: Path):
    fill(tmp_path / "f", 3)
    for other in (
        ModelIdentity(fingerprint="b" * 64, numerics=IDENTITY.numerics),
        ModelIdentity(fingerprint=IDENTITY.fingerprint, numerics="null-2"),
    ):
        with pytest.raises(ConfigError, match="another model"):
            slab_tier(tmp_path / "f", identity=other)
    tier = slab_tier(tmp_path / "f")
    assert read(tier, 1) == page_of(1), "refusing changes nothing"
    tier.close()


def test_pages_of_an_older_version_of_the_kernels_are_dropped(tmp_path: Path):
    """Their bits are another order's: the keys would never be asked for again, and the file may not refuse to serve."""
    old, new = (ModelIdentity(fingerprint="a" * 64, numerics=f"cpp-avx2-{version}-bf16") for version in (1, 2))
    other = ModelIdentity(fingerprint="a" * 64, numerics="cpp-avx512-2-bf16")
    fill(tmp_path / "f", 3, identity=old)
    with pytest.raises(ConfigError, match="another model"):
        slab_tier(tmp_path / "f", identity=other)
    tier = slab_tier(tmp_path / "f", identity=new)
    assert tier.pages == 0
    assert read(tier, 1) is None
    tier.close()


def test_what_is_damaged_or_of_another_size_begins_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = tmp_path / "f"
    for damage in ("head", "short", "size", "text"):
        fill(path, 3)
        if damage == "head":
            flip(path, 0, 200, random.Random(1))
        elif damage == "short":
            with path.open("r+b") as file:
                file.truncate(BLOCK + index_bytes(PLACES) + 5)
        elif damage == "text":
            path.write_bytes(b"anything else")
        caplog.clear()
        tier = slab_tier(path, nbytes=SIZE if damage != "size" else SIZE + (1 << 20))
        assert "begins anew" in caplog.text
        assert tier.pages == 0
        assert read(tier, 1) is None
        tier.close()
        path.unlink()


def test_a_file_in_use_is_not_begun_anew(tmp_path: Path):
    first = slab_tier(tmp_path / "f")
    with pytest.raises(ConfigError, match="is used by another"):
        slab_tier(tmp_path / "f", nbytes=SIZE + (1 << 20))
    first.write_page(final_of(1), memoryview(page_of(1)))
    assert read(first, 1) == page_of(1)
    first.close()


def test_a_file_that_somebody_only_reads_is_not_begun_anew(tmp_path: Path):
    writer = slab_tier(tmp_path / "f")
    writer.write_page(final_of(1), memoryview(page_of(1)))
    reader = slab_tier(tmp_path / "f")
    writer.close()
    with pytest.raises(ConfigError, match="is used by another"):
        slab_tier(tmp_path / "f", nbytes=SIZE + (1 << 20))
    assert read(reader, 1) == page_of(1)
    reader.close()
    slab_tier(tmp_path / "f", nbytes=SIZE + (1 << 20)).close()


def test_a_folder_that_cannot_be_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file"):
        slab_tier(tmp_path / "file" / "f")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="link"):
        slab_tier(tmp_path / "link")


def test_when_it_is_full_the_least_missed_page_goes(tmp_path: Path):
    tier = slab_tier(tmp_path / "f")
    for number in range(tier.places):
        tier.write_page(final_of(number, saves_s=1.0 if number % 2 else 0.001), memoryview(page_of(number)))
    assert read(tier, 0) == page_of(0)  # used, and so worth more than its equals
    for number in range(tier.places, tier.places + 50):
        tier.write_page(final_of(number, saves_s=1.0), memoryview(page_of(number)))
    assert tier.pages == tier.places
    gone = [number for number in range(tier.places) if not tier.contains([key_of(number)])[0]]
    assert len(gone) == 50
    assert all(number % 2 == 0 for number in gone)
    assert 0 not in gone
    tier.close()


def flips(path: Path, count: int, rng: random.Random, kept: int) -> tuple[int, int]:
    """Turn a bit anywhere, read every page that it could concern, turn it back.  (bits, pages that were refused)."""
    refused = 0
    tier = slab_tier(path, direct=False)
    slabs = BLOCK + index_bytes(PLACES)
    place_of = {number: tier._directory.find(key_of(number))[0] for number in range(kept)}
    entries = slabs - index_bytes(PLACES) + tier._directory._entries_at
    for _ in range(count):
        number = rng.randrange(kept)
        place = place_of[number]
        if rng.random() < 0.3:
            start = entries + place * 128
            back = flip(path, start, start + 128, rng)
        else:
            start = slabs + place * BLOCK
            back = flip(path, start, start + LAYOUT.page_bytes, rng)
        try:
            found = read(tier, number)
        except PageCorrupt:
            found = None
        assert found is None or found == page_of(number), "a flipped bit came through"
        refused += found is None
        back()
        tier._directory.scan()
    tier.close()
    return count, refused


def test_every_flipped_bit_is_found(tmp_path: Path):
    fill(tmp_path / "f", 40)
    count, refused = flips(tmp_path / "f", 500, random.Random(5), 40)
    assert refused == count


@pytest.mark.long
@pytest.mark.timeout(300)
def test_ten_thousand_flipped_bits_are_found(tmp_path: Path):
    fill(tmp_path / "f", 200)
    count, refused = flips(tmp_path / "f", 10_000, random.Random(6), 200)
    assert refused == count


WRITE_FOR_EVER = """
import sys
from pathlib import Path
from tests.store_rig import final_of, page_of, slab_tier
tier = slab_tier(Path(sys.argv[1]), direct=False)
number = int(sys.argv[2])
tier.write_page(final_of(number), memoryview(page_of(number)))
print("writing", flush=True)
while True:
    number += 1
    tier.write_page(final_of(number), memoryview(page_of(number)))
"""


@pytest.mark.parametrize("kills", [1, pytest.param(60, marks=(pytest.mark.long, pytest.mark.timeout(400)))])
def test_who_is_killed_while_writing_leaves_whole_pages(tmp_path: Path, kills: int):
    rng = random.Random(7)
    for kill in range(kills):
        words = [sys.executable, "-c", WRITE_FOR_EVER, str(tmp_path / "f"), str(kill * 100_000)]
        root = Path(__file__).resolve().parents[4]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, cwd=root, env={"PYTHONPATH": f"{root}/src:{root}"})
        assert process.stdout is not None
        assert process.stdout.readline() == b"writing\n"
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(rng.uniform(0.01, 0.1))
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        tier = slab_tier(tmp_path / "f")
        assert tier.pages > 0
        into = bytearray(LAYOUT.page_bytes)
        numbers = {key_of(number): number for number in range(kill * 100_000, kill * 100_000 + 20_000)}
        for place, key in tier._directory.known_places():
            assert tier.read_page(key, memoryview(into)), f"place {place}"
            if key in numbers:
                assert into == page_of(numbers[key])
        tier.close()
