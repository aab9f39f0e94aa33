"""Fleet files: nodes and their workers, what contradicts itself, the settings of a node, and what is simulated."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.config.fleet_file import FleetFile, read_fleet_file
from penstock.config.load import load_node
from penstock.config.mesh import NodePlace
from penstock.config.schema import ServeConfig
from penstock.errors import ConfigError
from penstock.sim.fleet import load_fleet
from penstock.types import Role

PROFILE = """
[profile.zen.steps]
token_s = 1e-4
[profile.zen.memory]
token_bytes = 1024
device_bytes = 1048576
"""

NODES = """
name = "test"
keys = "/keys"
model = "/models/llama"

[settings]
max_running = 7
scheduling = { interactive_tpot_ms = 40.0 }

[[nodes]]
name = "a"
address = "10.0.0.1"
gateways = 2
http_host = "127.0.0.1"
workers = [{ role = "prefill", count = 2, group = "tp2" }, { role = "decode", count = 1 }]

[[nodes]]
name = "b"
address = "fd00::2"
listen = "::"
port = 9100
workers = [{ role = "decode", count = 3 }]
settings = { max_running = 9 }
"""


def fleet(folder: Path, text: str) -> FleetFile:
    (folder / "fleet.toml").write_text(text)
    return read_fleet_file(str(folder / "fleet.toml"))


def settings_of_all(file: FleetFile) -> list[ServeConfig]:
    return [load_node(file, node, "fleet.toml", environ={}) for node in file.nodes]


def test_each_worker_of_a_node_has_a_name_and_two_ports(tmp_path: Path) -> None:
    file = fleet(tmp_path, NODES)
    names = [[(worker.name, worker.port) for worker in file.members(node)] for node in file.nodes]
    assert names == [
        [("a-prefill-0", 9000), ("a-prefill-1", 9002), ("a-decode-0", 9004)],
        [("b-decode-0", 9100), ("b-decode-1", 9102), ("b-decode-2", 9104)],
    ]
    assert file.endpoints(but="a") == ("tcp://[fd00::2]:9100", "tcp://[fd00::2]:9102", "tcp://[fd00::2]:9104")
    assert file.node("b").endpoint(9100, listen=True) == "tcp://[::]:9100"
    assert file.endpoints(but="b")[0] == "tcp://10.0.0.1:9000"


def test_a_node_has_its_own_settings_over_the_fleets(tmp_path: Path) -> None:
    file = fleet(tmp_path, NODES)
    a, b = (load_node(file, node, "fleet.toml", environ={"PENSTOCK_MAX_RUNNING": "3"}) for node in file.nodes)
    assert (a.max_running, b.max_running) == (7, 9)
    assert a.scheduling.interactive_tpot_ms == b.scheduling.interactive_tpot_ms == 40.0
    assert (a.model, a.keys, a.gateways, a.host) == ("/models/llama", "/keys", 2, "127.0.0.1")
    assert (a.prefill_parallel, a.decode_parallel, b.decode_parallel) == ("tp2", None, None)
    assert a.join == file.endpoints(but="a")


@pytest.mark.parametrize(
    ("change", "because"),
    [
        (('name = "b"', 'name = "a"'), "node a: there are two of this name"),
        (('address = "fd00::2"', 'address = "10.0.0.1"'), ""),  # other ports
        (('address = "fd00::2"\nlisten = "::"\nport = 9100', 'address = "10.0.0.1"\nport = 9004'), "another node"),
        (
            ('address = "fd00::2"\nlisten = "::"\nport = 9100', 'address = "10.0.0.1"\nport = 9005'),
            "10.0.0.1:9005 belongs",
        ),
        (
            ('address = "fd00::2"\nlisten = "::"\nport = 9100', 'address = "10.0.0.1"\nport = 8995'),
            "10.0.0.1:9000 belongs",
        ),
        (('address = "fd00::2"\nlisten = "::"\nport = 9100', 'address = "10.0.0.1"\nport = 9006'), ""),
        (("port = 9100", "port = 65534"), "no port is left for b-decode-1"),
        (("gateways = 2\n", ""), "no node has gateways"),
        (('workers = [{ role = "decode", count = 3 }]\n', ""), "node b: it has neither workers nor gateways"),
        (('group = "tp2"', 'group = "tp3"'), "workers of role prefill: group: tp3"),
        (("count = 3", 'count = 3, profile = "zen"'), "there is no [profile.zen]; profiles: none"),
        (('name = "test"', 'name = "test"\nworkers = [{ count = 1 }]'), "it has both"),
        (('address = "10.0.0.1"', 'address = "10.0.0.1 "'), "address"),
    ],
)
def test_what_contradicts_itself_is_refused(tmp_path: Path, change: tuple[str, str], because: str) -> None:
    assert change[0] in NODES
    text = NODES.replace(*change, 1)
    if not because:
        fleet(tmp_path, text)
        return
    with pytest.raises(ConfigError) as refused:
        fleet(tmp_path, text)
    assert because in str(refused.value)


@pytest.mark.parametrize(
    ("change", "because"),
    [
        (("gateways = 2", "gateway = 2"), "node a: no such field: gateway; did you mean gateways?"),
        (("gateways = 2", 'api_keys = "/k"'), "node a: no such field: api_keys; it is a setting"),
        (('name = "test"', 'name = "test"\nkv_memory = "1GiB"'), "toml: no such field: kv_memory; it is a setting"),
        (("count = 3 }", 'count = 3, grup = "tp2" }'), "node b: workers[0]: no such field: grup; did you mean group?"),
        (('role = "decode", count = 3', 'role = "decod", count = 3'), "roles are prefill, decode and both"),
        (('name = "b"', 'name = "B"'), "node B: name: expected lower-case letters, digits and hyphens"),
        (('name = "b"\n', ""), "node number 2: Object missing required field `name`"),
        (("count = 3", 'count = "3"'), "node b: workers[0].count: Expected `int`, got `str`"),
        (("port = 9100", "port = 9100\nray = { adress = 1 }"), "node b: ray: no such field: adress; did you mean"),
    ],
)
def test_a_mistyped_field_is_named_with_its_node_and_what_would_work(
    tmp_path: Path, change: tuple[str, str], because: str
) -> None:
    assert change[0] in NODES
    with pytest.raises(ConfigError) as refused:
        fleet(tmp_path, NODES.replace(*change, 1))
    assert because in str(refused.value)


@pytest.mark.parametrize(
    ("change", "because"),
    [
        (("max_running = 7", "max_runing = 7"), "max_runing in the settings of fleet.toml: no such setting; did you"),
        (("max_running = 9", "max_running = 0"), "max_running in the settings of node b of fleet.toml"),
        (("max_running = 7", "prefill = 2"), "prefill is no setting of a node"),
        (("max_running = 7", 'members = "ray:x"'), "members is no setting of a node; docs/fleet.md says what"),
        (('http_host = "127.0.0.1"', 'http_host = "0.0.0.0"'), "needs a key"),
        (('keys = "/keys"\n', ""), "keys is missing"),
        (
            ("count = 3 }", 'count = 3 }, { role = "decode", group = "tp2", count = 1 }'),
            "all workers of role decode need the same group",
        ),
    ],
)
def test_settings_that_a_node_cannot_have_are_refused(tmp_path: Path, change: tuple[str, str], because: str) -> None:
    assert change[0] in NODES
    file = fleet(tmp_path, NODES.replace(*change, 1))
    with pytest.raises(ConfigError) as refused:
        settings_of_all(file)
    assert because in str(refused.value)


GROUPS = """
[[groups]]
nodes = ["b", "a"]
group = "tp2,pp3"
count = 2

[[groups]]
nodes = ["a", "b"]
group = "pp2"
"""


def test_a_worker_over_nodes_is_reached_at_the_first_and_has_a_part_on_each(tmp_path: Path) -> None:
    file = fleet(tmp_path, NODES + GROUPS)
    a, b = file.nodes
    assert [(worker.name, worker.port, worker.place.nodes) for worker in file.members(a)][3:] == [("a-both-0", 9006, 2)]
    assert [worker.name for worker in file.members(b)][3:] == ["b-both-0", "b-both-1"]
    (part,) = file.parts(b)
    assert (part.part_name, part.place, part.master()) == (
        "a-both-0.1",
        NodePlace(nodes=2, node=1),
        "tcp://10.0.0.1:9007",
    )
    parts = list(file.parts(a))
    assert [worker.part_name for worker in parts] == ["b-both-0.1", "b-both-1.1"]
    assert [worker.master(listen=True) for worker in parts] == ["tcp://[::]:9107", "tcp://[::]:9109"]
    assert file.endpoints(but="b")[-1] == "tcp://10.0.0.1:9006"
    assert file.joined_nodes(a) == file.joined_nodes(b) == (a, b)
    assert not file.only_follows("a"), "it leads a worker, too"
    assert load_node(file, a, "fleet.toml", environ={}).parallel is None


def test_nodes_are_joined_by_groups_and_by_groups_of_those(tmp_path: Path) -> None:
    more = "".join(f'[[nodes]]\nname = "{name}"\naddress = "10.0.1.{n}"\n' for n, name in enumerate("cde", 1))
    ties = "".join(f'[[groups]]\nnodes = ["{one}", "{other}"]\ngroup = "pp2"\n' for one, other in ("ec", "cd"))
    file = fleet(tmp_path, NODES + more + ties)
    assert [node.name for node in file.joined_nodes(file.node("d"))] == ["c", "d", "e"]
    assert [node.name for node in file.joined_nodes(file.node("a"))] == ["a"]
    assert {node.name for node in file.nodes if file.only_follows(node.name)} == {"d"}


@pytest.mark.parametrize(
    ("change", "because"),
    [
        (('["a", "b"]', '["a", "c"]'), "the group on nodes a, c: there is no node 'c'; nodes: a, b"),
        (('["a", "b"]', '["a", "a"]'), "a is listed twice"),
        (('["a", "b"]', '["a"]'), "length >= 2"),
        (
            ('"pp2"', '"tp2"'),
            "each node has a stage at least, as ranks that divide a layer exchange too much for a net",
        ),
        (('"pp2"', '"tp2"'), 'and tp2 has 1; "tp2,pp2" would work'),
        (('"pp2"', '"pp0"'), "workers of role both: group: plan 'pp0': pp must be at least 1"),
        (('"pp2"', '"pp2"\nrole = "decode"'), 'so it does both phases: role = "both", which is the default'),
        (('"pp2"', '"pp2"\nstages = [0.5, 0.3, 0.2]'), "stages has 3 shares, but pp2 has 2 stages"),
        (('"pp2"', '"pp2"\ncount = 4096'), "more than 4096 workers"),
    ],
)
def test_groups_that_cannot_be_are_refused(tmp_path: Path, change: tuple[str, str], because: str) -> None:
    assert change[0] in GROUPS
    with pytest.raises(ConfigError) as refused:
        fleet(tmp_path, NODES + GROUPS.replace(*change, 1))
    assert because in str(refused.value)


def test_a_group_needs_nodes_and_a_node_needs_a_group_or_something_else(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no node 'b'; nodes: none"):
        fleet(tmp_path, f'name = "x"\nworkers = [{{ count = 1 }}]\n{GROUPS}')
    bare = '[[nodes]]\nname = "c"\naddress = "10.0.1.1"\n'
    with pytest.raises(ConfigError, match="node c: it has neither workers nor gateways"):
        fleet(tmp_path, NODES + bare + GROUPS)
    file = fleet(tmp_path, NODES + bare + GROUPS.replace('["a", "b"]', '["a", "c"]'))
    assert [worker.part_name for worker in file.parts(file.node("c"))] == ["a-both-0.1"]


def test_groups_of_a_file_are_simulated_with_its_nodes(tmp_path: Path) -> None:
    text = NODES.replace(', group = "tp2"', "") + GROUPS + PROFILE + "[profile.zen.ranks]\nlayers = 8\n"
    fleet(tmp_path, text)
    found = load_fleet(str(tmp_path / "fleet.toml"))
    assert [(own.role, own.group, own.count) for own in found.workers][2:] == [
        (Role.BOTH, "tp2,pp3", 2),
        (Role.BOTH, "pp2", 1),
    ]


def test_the_nodes_of_a_file_are_what_is_simulated(tmp_path: Path) -> None:
    fleet(tmp_path, NODES.replace(', group = "tp2"', "") + PROFILE)
    found = load_fleet(str(tmp_path / "fleet.toml"))
    assert [(own.role, own.count) for own in found.workers] == [(Role.PREFILL, 2), (Role.DECODE, 4)]
    assert (found.steps.token_s, found.memory.token_bytes) == (1e-4, 1024)


def test_without_figures_there_is_nothing_to_simulate_with(tmp_path: Path) -> None:
    fleet(tmp_path, NODES)
    with pytest.raises(ConfigError, match=r"no \[profile.NAME\], so there is nothing to simulate with"):
        load_fleet(str(tmp_path / "fleet.toml"))


def test_workers_of_several_profiles_are_not_simulated(tmp_path: Path) -> None:
    text = NODES.replace("count = 3 }", 'count = 3, profile = "zen" }') + PROFILE + PROFILE.replace("zen", "default")
    fleet(tmp_path, text)
    with pytest.raises(ConfigError, match="profiles default, zen; the simulator computes fleets of equal workers"):
        load_fleet(str(tmp_path / "fleet.toml"))


def test_older_files_have_their_figures_at_the_top(tmp_path: Path) -> None:
    """And are read as before."""
    new = '[[workers]]\nrole = "both"\ncount = 2\n' + PROFILE
    fleet(tmp_path, 'name = "x"\nsource = "y"\n' + new)
    wanted = load_fleet(str(tmp_path / "fleet.toml"))
    fleet(tmp_path, 'name = "x"\nsource = "y"\n' + new.replace("profile.zen.", ""))
    assert load_fleet(str(tmp_path / "fleet.toml")) == wanted


@pytest.mark.parametrize(
    ("text", "because"),
    [
        ('name = "x"\n[[workers]]\ncount = 1\n[steps]\ntoken_s = 1.0', r"\[memory\] is missing"),
        ('name = "x"', "it has neither"),
        ('name = "x"\n[[workers]]\ncount = 5000', "5000|count"),
        ("name = x", "not TOML"),
    ],
)
def test_half_a_file_is_refused(tmp_path: Path, text: str, because: str) -> None:
    with pytest.raises(ConfigError, match=because):
        fleet(tmp_path, text)
