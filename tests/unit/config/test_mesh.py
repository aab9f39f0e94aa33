"""A mesh numbers its ranks, groups them, and is read from text with errors that say what would work."""

from __future__ import annotations

from itertools import product

import pytest

from penstock.config.mesh import Mesh, NodePlace, Place, parse_mesh
from penstock.errors import ConfigError


@pytest.mark.parametrize(("tensor", "pipeline"), list(product((1, 2, 4, 8), (1, 2, 3))))
def test_every_rank_has_one_place_and_each_group_every_part_once(tensor: int, pipeline: int) -> None:
    mesh = Mesh(tensor=tensor, pipeline=pipeline)
    places = [mesh.place(rank) for rank in range(mesh.ranks)]
    assert len(set(places)) == mesh.ranks == tensor * pipeline
    for rank, place in enumerate(places):
        assert mesh.rank(place) == rank
        assert [places[peer] for peer in mesh.tensor_group(rank)] == [
            Place(tensor=part, stage=place.stage) for part in range(tensor)
        ]
        assert [places[peer] for peer in mesh.pipeline_group(rank)] == [
            Place(tensor=place.tensor, stage=stage) for stage in range(pipeline)
        ]
    with pytest.raises(ValueError, match=f"rank {mesh.ranks} of {mesh.ranks}"):
        mesh.place(mesh.ranks)


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("pipeline", range(1, 8))
def test_machines_have_whole_stages_and_the_first_one_leads(tensor: int, pipeline: int) -> None:
    mesh = Mesh(tensor=tensor, pipeline=pipeline)
    for nodes in range(1, pipeline + 1):
        found = [mesh.node_ranks(NodePlace(nodes=nodes, node=node)) for node in range(nodes)]
        assert [rank for own in reversed(found) for rank in own] == list(range(mesh.ranks))
        assert all(len(own) >= tensor and len(own) % tensor == 0 for own in found)
        assert mesh.leader in found[0]
        assert all(mesh.node_of(rank, nodes) == node for node, own in enumerate(found) for rank in own)


@pytest.mark.parametrize(
    ("text", "mesh"),
    [
        ("tp2", Mesh(tensor=2)),
        ("pp3", Mesh(pipeline=3)),
        ("tp2,pp2", Mesh(tensor=2, pipeline=2)),
        (" pp2 , tp8 ", Mesh(tensor=8, pipeline=2)),
        ("tp1", Mesh()),
        ("tp1,pp1", Mesh()),
    ],
)
def test_a_plan_is_read_and_named(text: str, mesh: Mesh) -> None:
    assert parse_mesh(text) == mesh
    assert parse_mesh(mesh.name) == mesh


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "expected tp and pp with numbers, such as tp2,pp2"),
        ("2", "plan '2' is not understood"),
        ("tp", "plan 'tp' is not understood"),
        ("tp2;pp2", "not understood"),
        ("tp-2", "not understood"),
        ("xx2", "not understood"),
        ("tp3", "1, 2, 4 or 8 ranks, because sums are cut into 8 segments; tp2 would work"),
        ("tp16", "tp8 would work"),
        ("tp0", "tp must be at least 1"),
        ("pp0", "pp must be at least 1"),
        ("tp2,tp4", "has tp twice"),
        ("tp8,pp999", "7992 ranks, 1 to 1024 are possible"),
        ("tp2,ep8", "expert parallelism is not supported yet; tp and pp are"),
        ("cp2", "context parallelism is not supported yet"),
        ("dp2", "data parallelism is not supported yet"),
    ],
)
def test_another_plan_is_one_line_that_says_what_would_work(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_mesh(text)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
