"""The bench: what is counted and compared. How long anything takes is never asserted."""

from __future__ import annotations

import contextlib
import sys

import pytest
import torch
from torch import nn

from anytime import SFAdamW, SFNorMuon
from anytime.bench import floor, peers, race, show
from anytime.bench.floor import Rates
from anytime.bench.peers import Contestant, Listing
from anytime.core.polar import COEFFICIENTS
from anytime.optim.reference import ReferenceSFNorMuon
from anytime.train.errors import UserError
from anytime.train.presets import PRESETS

CPU = torch.device("cpu")
GIGA = Rates(1e9, 1e9)


@pytest.fixture
def tiny(monkeypatch) -> str:
    monkeypatch.setitem(PRESETS, "tiny", {"model": {"layers": 2, "width": 8, "head": 4, "vocabulary": 16}})
    monkeypatch.setattr(race, "measure_rates", lambda device: GIGA)
    return "tiny"


def of(name: str) -> Contestant:
    return next(c for c in peers.contestants(CPU) if c.name == name)


# ------------------------------------------------------------------ the floor


@pytest.mark.parametrize(
    ("preset", "forms"),
    [("125M", (2.06, 1.445, 1.07)), ("772M", (28.7, 20.1, 14.9))],  # milliseconds at 790 TFLOP/s, counted by hand
)
def test_products_of_the_papers_models(preset, forms):
    matrices, _ = race.preset_shapes(preset)
    options = ({"symmetric": False, "gram": False}, {"gram": False}, {})
    for option, expected in zip(options, forms, strict=True):
        found = sum(floor.polar_flops(*shape, **option) for shape in matrices.values())
        assert found / 790e9 == pytest.approx(expected, rel=5e-3)


def test_products_of_one_matrix():
    """Five steps of X Xᵀ, A A and B X; a symmetric product is half of one; tall and wide are alike."""
    m, n = 6, 10
    naive = 5 * (2 * m * m * n + 2 * m**3 + 2 * m * m * n)
    half = 5 * (m * m * n + m**3 + 2 * m * m * n)
    for shape in ((m, n), (n, m)):
        assert floor.polar_flops(*shape, symmetric=False, gram=False) == pytest.approx(naive)
        assert floor.polar_flops(*shape) == pytest.approx(half)
    assert floor.polar_flops(4, 12) == (6 * 3 + 14) * 64  # from a ratio of 3 on the Gram matrix
    assert floor.polar_flops(4, 11) == pytest.approx((15 * 11 / 4 + 5) * 64)


def test_products_of_four_steps():
    """On the Gram matrix; from 512 rows on in one part, below in two."""
    four = COEFFICIENTS["polar-express-4"]

    def counted(n: int, k: int, *parts: int) -> float:
        total = 0
        for steps in parts:
            total += n * n * k + 2 * n * n * k  # X Xᵀ by half, at last Q X
            for step in range(steps):
                total += n**3  # R²
                total += 2 * n**3 * (step < steps - 1)  # R F, F R F
                total += n**3 * (step > 0)  # Q F
        return total

    assert floor.polar_flops(512, 2048, four) == counted(512, 2048, 4)
    assert floor.polar_flops(2044, 511, four) == counted(511, 2044, 2, 2)
    assert floor.polar_flops(6, 10, four) == pytest.approx(floor.polar_flops(6, 10) * 4 / 5)


@pytest.mark.parametrize(
    ("dtype", "matrix", "rest"), [(torch.float32, 32, 28), (torch.bfloat16, 34, 30), (torch.float16, 34, 30)]
)
def test_bytes_of_a_parameter(dtype, matrix, rest):
    assert floor.moved_bytes(dtype, matrix=True) == matrix
    assert floor.moved_bytes(dtype, matrix=False) == rest


def test_the_floor_by_hand():
    matrices, rest = {"a": (4, 4), "b": (12, 4)}, {"e": (10, 4)}
    rates = Rates(bandwidth=100.0, products=1000.0)
    found = floor.floor_seconds(matrices, rest, torch.float32, rates)
    assert found == pytest.approx((64 * 32 + 40 * 28) / 100 + (20 * 64 + 32 * 64) / 1000)
    elementwise = floor.floor_seconds(matrices, rest, torch.float32, rates, None)
    assert elementwise == pytest.approx(104 * 28 / 100)


def test_the_measured_rates_are_rates(monkeypatch):
    """By a clock that goes a second at a time: ten copies a second, and ten products."""
    seconds = iter(range(100))
    monkeypatch.setattr(floor, "settled", lambda device: next(seconds))
    monkeypatch.setattr(torch, "ones", lambda size, device: torch.zeros(1000))
    rates = floor.measure_rates(CPU)
    assert rates.bandwidth == pytest.approx(10 * 2 * 4 * 1000)  # read and written
    assert rates.products == pytest.approx(10 * 2 * 1024**3)


# ------------------------------------------------------------ the paper's listing


@pytest.mark.parametrize("shape", [(6, 6), (4, 12), (12, 4)])
def test_the_listing_is_sf_normuon(shape):
    """The reference, and our optimizer, with the listing's own polar factor."""
    torch.manual_seed(0)
    start = torch.randn(shape)
    options = {"lr": 0.05, "momentum": 0.8, "weight_decay": 0.1, "warmup_steps": 3}

    def polar(M):
        return peers.newton_schulz(M).float()

    theirs, ours = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    listing = Listing([theirs], betas=(0.9, 0.95), polar=polar, **options)
    mine = SFNorMuon([("w", ours)], betas=(0.9, 0.95), polar=polar, **options)
    oracle = ReferenceSFNorMuon(start, polar=polar, beta=0.9, beta2=0.95, decay_at="z", **options)
    for _ in range(6):
        gradient = torch.randn(shape)
        theirs.grad, ours.grad = gradient.clone(), gradient.clone()
        listing.step()
        mine.step()
        oracle.step(gradient)
        torch.testing.assert_close(theirs.detach(), oracle.y, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(theirs.detach(), ours.detach(), atol=1e-5, rtol=1e-4)
    assert not torch.allclose(theirs.detach(), start, atol=1e-2)


def test_the_listings_polar_factor_is_newton_schulz_in_bfloat16():
    from anytime.core.polar import polar

    torch.manual_seed(0)
    for shape in ((16, 16), (8, 32), (32, 8)):
        M = torch.randn(shape)
        found = peers.newton_schulz(M)
        assert found.dtype == torch.bfloat16
        assert (found.float() - polar(M)).norm() < 0.05 * polar(M).norm()


# -------------------------------------------------------------- the contestants


def test_ours_come_first_and_graphs_only_on_cuda():
    here, there = peers.contestants(CPU), peers.contestants(torch.device("cuda"))
    assert [c.name for c in here if c.ours] == ["SFNorMuon", "SFNorMuon, four steps", "SFAdamW"]
    names = ["SFNorMuon", "SFNorMuon, four steps"]
    with_graph = [*(f"{name}, {how}" for name in names for how in ("graph", "own graph")), "SFAdamW, graph"]
    assert [c.name for c in there if c.ours] == [*with_graph, *(c.name for c in here if c.ours)]
    assert {c.name for c in here} < {c.name for c in there}
    for names in ([c.name for c in here], [c.name for c in there]):
        assert len({*names}) == len(names)


def test_the_graph_is_asked_for(monkeypatch):
    asked: list[tuple[str, dict[str, object]]] = []
    for name in ("SFNorMuon", "SFAdamW"):
        made = nn.Module()
        made.state = {}
        monkeypatch.setattr(peers, name, lambda params, n=name, m=made, **options: asked.append((n, options)) or m)
    for contestant in peers.contestants(torch.device("cuda")):
        if contestant.ours:
            assert isinstance(contestant.make([]), peers.Recorded) is contestant.name.endswith("own graph")
            assert contestant.polar == ("polar-express-4" if "four" in contestant.name else "newton-schulz")
    four = {"polar": "polar-express-4"}
    assert asked == [
        ("SFNorMuon", {"graph": True}),
        ("SFNorMuon", {}),
        ("SFNorMuon", {"graph": True, **four}),
        ("SFNorMuon", four),
        ("SFAdamW", {"graph": True}),
        ("SFNorMuon", {}),
        ("SFNorMuon", four),
        ("SFAdamW", {}),
    ]


def test_a_graph_of_ones_own_is_recorded_once_and_replayed(monkeypatch):
    """What is done, with a graph that only notes it."""
    done: list[str] = []

    class Graph:
        def replay(self):
            done.append("replayed")

    class Optimizer:
        def __init__(self):
            self.state = {"here": torch.ones(3)}

        def step(self):
            done.append("step")

    @contextlib.contextmanager
    def recording(graph):
        done.append("begun")
        yield
        done.append("ended")

    monkeypatch.setattr("torch.cuda.CUDAGraph", Graph)
    monkeypatch.setattr("torch.cuda.graph", recording)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: done.append("waited"))
    recorded = peers.Recorded(Optimizer())
    for _ in range(4):
        recorded.step()
    assert done == ["step", "step", "waited", "begun", "step", "ended", "replayed", "replayed"]
    assert race.state_bytes([recorded]) == 12


def test_only_names_choose_whatever_their_spelling():
    among = peers.contestants(CPU)
    assert [c.name for c in peers.chosen(among, ["sf-normuon"])[0]] == ["SFNorMuon", "SFNorMuon, four steps"]
    assert [c.name for c in peers.chosen(among, ["torch-adamw", "LISTING"])[0]] == [
        "paper's listing",
        "torch AdamW, fused",
    ]
    with pytest.raises(UserError, match="did you mean 'SFAdamW'"):
        peers.chosen(among, ["SFAdmaW"])


def test_a_package_that_is_missing_leaves_all_its_optimizers_out():
    among = [Contestant("a", SFAdamW, ours=True), Contestant("b one", SFAdamW, "no_such_package")]
    among.append(Contestant("b two", SFAdamW, "no_such_package"))
    found, missing = peers.chosen(among, [])
    assert [c.name for c in found] == ["a"]
    assert missing == ["no_such_package"]
    assert peers.chosen(among, ["a"]) == ([among[0]], [])  # of those not asked for nothing is said


def test_nothing_left_to_measure():
    with pytest.raises(UserError, match="nothing to measure: no_such_package is not installed"):
        peers.chosen([Contestant("b", SFAdamW, "no_such_package"), of("SFAdamW")], ["b"])


def test_versions_of_peers():
    assert of("torch Muon").version == torch.__version__
    assert Contestant("x", SFAdamW, "no_such_package").version is None
    assert of("SFNorMuon").version is None  # the row has ours


# ------------------------------------------------------------------ measuring


def test_shapes_of_a_preset():
    matrices, rest = race.preset_shapes("125M")
    assert len(matrices) == 72
    assert matrices["blocks.3.up.weight"] == (3072, 768)
    assert rest == {"embedding.weight": (50304, 768)}


@pytest.mark.parametrize(("part", "parameters"), [("matrices", 1536), ("all", 1536 + 128)])
def test_rows_are_complete(tiny, part, parameters):
    among = [of(name) for name in ("SFNorMuon", "SFAdamW", "paper's listing", "torch AdamW, fused", "torch Muon")]
    rows = race.measure(tiny, part, among, CPU, steps=3, also=lambda step: {"kernels": 7})
    assert [row["contestant"] for row in rows] == [c.name for c in among]
    for row, contestant in zip(rows, among, strict=True):
        assert "error" not in row
        assert (row["preset"], row["part"], row["dtype"], row["steps"]) == (tiny, part, "float32", 3)
        assert (row["parameters"], row["matrices"], row["kernels"], row["heat"]) == (parameters, 12, 7, 0)
        assert (row["device"], row["torch"], row["ours"]) == ("cpu", torch.__version__, contestant.ours)
        assert {"version", "commit", "threads", "peer_version"} <= row.keys()
        assert 0 < row["wall_min_ms"] <= row["wall_ms"] <= row["wall_max_ms"]
        assert row["of_floor"] == pytest.approx(row["floor_ms"] / row["wall_ms"])
        helped = part == "all" and contestant.matrices_only
        assert row.get("rest") == ("torch AdamW, fused" if helped else None)
    flops = 2 * (4 * 20 + 2 * 38) * 512
    whole, plain = (1536 * 32 + (parameters - 1536) * 28 + flops) / 1e6, parameters * 28 / 1e6
    assert [row["floor_ms"] for row in rows] == pytest.approx([whole, plain, whole, plain, whole])
    state = {row["contestant"]: row["state_bytes"] for row in rows}
    assert state["torch AdamW, fused"] == 8 * parameters + 4 * (12 if part == "matrices" else 13)  # and step counts
    assert state["torch Muon"] == 4 * 1536 + (0 if part == "matrices" else 8 * 128 + 4)


def test_narrow_weights(tiny):
    seen = []

    def make(named):
        seen.extend((p.dtype, p.grad.dtype) for _, p in named)
        return SFNorMuon(named)

    (row,) = race.measure(tiny, "all", [Contestant("x", make, ours=True)], CPU, steps=1, dtype=torch.bfloat16)
    assert row["dtype"] == "bfloat16"
    assert {*seen} == {(torch.bfloat16, torch.bfloat16)}


def spy(log: list, write=None):
    """A contestant that notes the weights and gradients of every step, and does what it is told to them."""

    class Spy(torch.optim.SGD):
        def step(self, closure=None):
            params = self.param_groups[0]["params"]
            log.append([(p, p.grad, p.grad.clone()) for p in params])
            for p in params:
                if write is not None:
                    write(p)

    return lambda params: Spy(params, lr=0.1)


def test_each_has_weights_and_gradients_of_its_own_that_are_the_same_at_every_step(tiny):
    """One that spoils its gradients, one that drops them, one that only reads."""

    def spoil(p):
        p.grad.zero_()
        p.detach().zero_()

    def drop(p):
        p.grad = None

    logs: list[list] = [[], [], []]
    writes = zip("abc", logs, (spoil, drop, None), strict=True)
    among = [Contestant(name, spy(log, write)) for name, log, write in writes]
    rows = race.measure(tiny, "all", among, CPU, steps=2)
    assert not any("error" in row for row in rows)
    first = [value for _, _, value in logs[2][0]]
    storages = []
    for log in logs:
        assert len(log) == race.WARMUP["cpu"] + 2
        for step in log:
            for (p, grad, value), (p0, grad0, _), expected in zip(step, log[0], first, strict=True):
                assert p is p0
                assert grad is grad0
                assert torch.equal(value, expected)
                assert value.std() > 0
        storages += [tensor.data_ptr() for p, grad, _ in log[0] for tensor in (p, grad)]
    assert len({*storages}) == len(storages)
    for (p, _, _), (q, _, _) in zip(logs[1][0], logs[2][0], strict=True):
        assert torch.equal(p, q)  # both began there, and neither has moved
        assert p.std() > 0


def test_they_take_turns(tiny):
    order: list[str] = []

    def noting(name):
        return Contestant(name, spy([], lambda p: order.append(name) if p.numel() == 128 else None))

    race.measure(tiny, "all", [noting("a"), noting("b")], CPU, steps=3)
    assert "".join(order) == "aa" + "bb" + "ababab"


@pytest.mark.parametrize("when", [0, 1, 3, 5])
def test_one_that_fails_is_noted_and_the_others_go_on(tiny, when):
    """While it is made, warmed up, timed, or looked at besides."""
    log: list = []

    def fail(p):
        if len(log) == when:
            raise ValueError("first line\nsecond line")

    def make(params):
        if when == 0:
            raise ValueError("first line\nsecond line")
        return spy(log, fail)(params)

    rows = race.measure(tiny, "all", [Contestant("bad", make), of("SFAdamW")], CPU, steps=2, also=lambda s: s() or {})
    assert rows[0]["error"] == "ValueError: first line"
    assert "wall_ms" not in rows[0]
    assert "error" not in rows[1]
    assert rows[1]["wall_ms"] > 0


def test_heats():
    among = [Contestant(str(i), SFAdamW) for i in range(7)]

    def names(each, room):
        return [[c.name for c in heat] for heat in race.heats(among, each, room)]

    assert names(10, 70) == [["0", "1", "2", "3", "4", "5", "6"]]
    assert names(10, 69) == [["0", "2", "4", "6"], ["1", "3", "5"]]
    assert len(names(10, 5)) == 7  # one alone is tried even where it may not fit


def test_heats_lose_nobody_and_keep_the_order(tiny, monkeypatch):
    monkeypatch.setattr(race, "_room", lambda device: 2 * race.BYTES * 1664)
    among = [Contestant(name, spy([])) for name in "abcde"]
    rows = race.measure(tiny, "all", among, CPU, steps=1)
    assert [row["contestant"] for row in rows] == list("abcde")
    assert [row["heat"] for row in rows] == [0, 1, 2, 0, 1]


def test_state_is_counted_once_wherever_it_lies():
    a, b, c = torch.zeros(3), torch.zeros(2, dtype=torch.float64), torch.zeros(5)

    class Inner:
        state = {1: {"a": a, "c": c, "step": 3}}  # noqa: RUF012

    class Outer:
        optimizer = Inner()
        state = {1: {0: [b, (a,)]}}  # noqa: RUF012

    assert race.state_bytes([Outer()]) == 12 + 16 + 20
    assert race.state_bytes([Outer(), Inner()]) == 12 + 16 + 20


# -------------------------------------------------------------------- showing


ROW = {"preset": "tiny", "part": "all", "dtype": "float32", "steps": 2, "device": "cpu", "torch": "2", "matrices": 3}
ROW |= {"parameters": 2_500_000, "bandwidth": 2e9, "products": 3e12, "floor_ms": 0.5, "ours": False, "spectral": True}
ROWS = [
    {**ROW, "contestant": "a", "ours": True, "wall_ms": 1234.567, "of_floor": 0.251, "state_bytes": 3 << 20},
    {**ROW, "contestant": "b", "wall_ms": 2.0, "of_floor": 0.5, "state_bytes": 1 << 20, "rest": "torch AdamW, fused"},
    {**ROW, "contestant": "c", "error": "ValueError: no", "spectral": False, "floor_ms": 0.25},
]


def test_cells_without_empty_columns():
    assert show.cells(ROWS) == [
        ["optimizer", "step ms", "of the floor", "state MiB", "note"],
        ["a", "1,234.57", "25%", "3.0", ""],
        ["b", "2.00", "50%", "1.0", "the rest: torch AdamW, fused"],
        ["c", "", "", "", "ValueError: no"],
    ]
    more = {"device_ms": 1.0, "host_ms": 0.5, "extra_bytes": 1 << 19, "kernels": 40, "launches": 1}
    (head, line) = show.cells([{**ROWS[0], **more}])
    assert head == ["optimizer", "step ms", "of the floor", "device ms", "host ms", "state MiB", "extra MiB", "kernels",
                    "launches"]  # fmt: skip
    assert line[3:] == ["1.00", "0.50", "3.0", "0.5", "40", "1"]


def test_what_stands_around_the_table():
    assert show.heading(ROWS[0]) == "tiny, all parameters: 2.5M in float32 on cpu, torch 2, median of 2"
    assert show.heading({**ROW, "part": "matrices"}).startswith("tiny, 3 matrices: ")
    assert show.floor_line(ROWS) == (
        "floor: 0.50 ms with a polar factor, 0.25 ms without a polar factor "
        "(at 2 GB/s and 3.00 TFLOP/s, measured in this run)"
    )


def test_the_picture(tmp_path):
    pytest.importorskip("matplotlib")
    show.draw([*ROWS, {**ROWS[1], "part": "matrices"}], tmp_path / "bars.svg")
    drawn = (tmp_path / "bars.svg").read_text()
    for words in ("tiny, all parameters", "tiny, 3 matrices", "1.23e+03", "floor 0.5"):
        assert f"<!-- {words}" in drawn
    assert "<!-- c -->" not in drawn  # it has no time
    assert drawn.count(show.COLOURS[True, True]) == 1
    assert drawn.count(show.COLOURS[False, True]) == 2


def test_a_picture_that_cannot_be_drawn(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="must end in"):
        show.draw(ROWS, tmp_path / "bars.txt")
    with pytest.raises(UserError, match="every optimizer failed"):
        show.draw(ROWS[2:], tmp_path / "bars.svg")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UserError, match="pip install matplotlib"):
        show.draw(ROWS, tmp_path / "bars.svg")
