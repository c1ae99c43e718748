"""The protocol of the frontier: searches, what is frozen, regrets; on made-up losses, and once on real runs."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anytime.experiments import frontier
from anytime.experiments.anytime import (
    LATER,
    RATES,
    STUDIES,
    SWEPT,
    TRIES,
    Choice,
    Found,
    Study,
    freeze,
    frozen,
    inherited,
    study_of,
)  # fmt: skip
from anytime.experiments.methods import METHODS, PARTS, RECIPE, Method
from anytime.experiments.recipes import MissingRow
from anytime.experiments.regret import Regret, span, student, token_ratio
from anytime.experiments.search import FARTHEST, Try, bracket, coordinates, search
from anytime.optim import sf_spectral
from anytime.train.errors import UserError

NANO = dataclasses.replace(STUDIES["nano"], tries=TRIES, later=LATER)


# ------------------------------------------------------------------ arithmetic


@pytest.mark.parametrize(
    ("freedom", "value"), [(1, 12.7062), (2, 4.30265), (3, 3.18245), (8, 2.30600), (30, 2.04227), (1000, 1.96234)]
)
def test_students_quantile(freedom, value):
    assert student(freedom) == pytest.approx(value, abs=2e-5)


def test_students_quantile_of_another_part():
    assert student(4, 0.95) == pytest.approx(2.13185, abs=2e-5)


def test_regret_by_hand():
    regret = Regret.of({1: [3.0, 3.2], 2: [2.5, 2.5]}, {1: [2.9, 3.1], 2: [2.5, 2.6]})
    assert regret.means == pytest.approx({1: 0.1, 2: -0.05})
    most, upper = regret.most
    assert most == pytest.approx(0.1)  # without spread; the other horizon is lower, but its end is higher
    assert upper == pytest.approx(-0.05 + student(1) * statistics.stdev([0.0, -0.1]) / math.sqrt(2))
    mean, upper = regret.mean
    assert mean == pytest.approx(0.025)  # the seeds' own are 0.05 and 0
    assert upper == pytest.approx(0.025 + student(1) * statistics.stdev([0.05, 0.0]) / math.sqrt(2))


def test_one_seed_has_no_interval():
    regret = Regret.of({1: [3.0]}, {1: [2.9]})
    assert regret.most == (pytest.approx(0.1), math.inf)
    assert regret.mean == (pytest.approx(0.1), math.inf)


def test_the_interval_holds_the_true_mean_nineteen_times_in_twenty():
    draw, missed = random.Random(0), 0
    for _ in range(2000):
        mean, upper = Regret({1: [draw.gauss(0, 1) for _ in range(4)]}).mean
        missed += not 2 * mean - upper <= 0 <= upper
    assert 70 <= missed <= 130


@settings(max_examples=50)
@given(st.floats(0.3, 3), st.floats(1.5, 3.9), st.floats(0.5, 3))
def test_token_ratio_undoes_a_power_law(ratio, horizon, slope):
    """On a curve that is straight over log H, the ratio is exact."""
    envelope = {h: 4 - slope * math.log(h) for h in (1, 2, 4, 8)}
    wanted = ratio * horizon
    found = token_ratio(envelope, horizon, 4 - slope * math.log(wanted))
    if 1 <= wanted <= 8:
        assert found == pytest.approx(ratio, rel=1e-6)
    else:
        assert found is None


def test_span_of_a_parabola():
    rates = [2.0 ** (k / 2) for k in range(-4, 5)]
    width, seen = span({r: 3 + 0.05 * math.log2(r) ** 2 for r in rates}, within=0.05)
    assert seen
    assert width == pytest.approx(2.0)
    width, seen = span({r: 3 + 0.001 * math.log2(r) ** 2 for r in rates})
    assert not seen
    assert width == pytest.approx(4.0)


def test_span_between_points_and_beside_a_divergence():
    losses = {1.0: 3.04, 2.0: 3.0, 4.0: math.inf}
    width, seen = span(losses)
    assert seen
    assert width == pytest.approx(0.5)
    assert span({1.0: math.inf, 2.0: 3.0, 4.0: 3.01, 8.0: 3.1, 16.0: 3.0})[0] == pytest.approx(1 + 0.01 / 0.09)


def test_span_where_all_diverged():
    assert span({1.0: math.inf, 2.0: math.inf, 4.0: math.inf}) == (0.0, True)


def test_a_seed_that_diverged_leaves_no_upper_end():
    regret = Regret.of({1: [3.0, math.inf], 2: [2.5, 2.5]}, {1: [2.9, 3.1], 2: [2.5, 2.6]})
    assert regret.most == (math.inf, math.inf)


@pytest.mark.parametrize(("loss", "said"), [(3.0, "1.00"), (3.1, "0.71"), (2.99, "> 1"), (3.61, "< 0.125")])
def test_the_token_ratio_in_words(loss, said):
    """Beyond the envelope's ends nothing is known but the side."""
    envelope = {h: 3.6 - 0.2 * math.log2(h) for h in (1, 2, 4, 8)}
    assert frontier._ratio(envelope, loss) == said


def test_a_method_of_one_seed_is_set_beside_that_seed_alone():
    """Its losses are the envelope's there, whatever the envelope's other seed has."""
    method = METHODS[RECIPE]
    envelope = {h: [3.0 - h / 10, 2.5 - h / 10] for h in NANO.horizons}
    losses = {method.name: {h: values[:1] for h, values in envelope.items()}}
    table = frontier.regrets(NANO, [method], losses, envelope, {method.name: Choice({}, 0)})
    said = dict(zip(table.head, table.body[0], strict=True))
    assert (said["max R"], said["mean R"]) == ("+0.0000", "+0.0000")
    assert said[f"ρ {NANO.horizons[-1]:g}×"] == "1.00"


# -------------------------------------------------------------------- searches


def searched(rule, loss, limit=TRIES, draw=None):
    """(what was asked for, batch by batch; what was tried, the best first). Losses come one by one, with `draw` in a
    random order."""
    known, batches = {}, []
    while True:
        wants, ranked = search(rule, known.get, limit)
        assert set(ranked) == known.keys()
        assert ranked == sorted(ranked, key=known.get)
        if not wants:
            return batches, ranked
        assert len(set(wants)) == len(wants)
        assert not set(wants) & known.keys()
        assert len(known) + len(wants) <= limit
        batches.append(wants)
        for point in draw.sample(wants, len(wants)) if draw else wants:
            assert set(search(rule, known.get, limit)[0]) == set(wants) - known.keys()
            known[point] = loss(point)


def walk(method, start=None):
    return functools.partial(coordinates, method.axes, start or method.first)


def every(method):
    """All of its settings."""
    return [dict(zip(method.axes, values, strict=True)) for values in itertools.product(*method.axes.values())]


def neighbours(method, point, by=2):
    """One step away along an axis, or `by` half octaves."""
    at = {axis: values.index(dict(point.setting)[axis]) for axis, values in method.axes.items()}
    for setting in every(method):
        away = sum(abs(values.index(setting[axis]) - at[axis]) for axis, values in method.axes.items())
        for octave in {0: [-by, by], 1: [0]}.get(away, []):
            if abs(point.octave + octave) <= FARTHEST:
                yield Try.of(setting, point.octave + octave)


@st.composite
def spaces(draw):
    axes = {f"axis {i}": tuple(range(n)) for i, n in enumerate(draw(st.lists(st.integers(1, 4), max_size=3)))}
    start = {axis: draw(st.sampled_from(values)) for axis, values in axes.items()}
    return Method("any", {}, axes), Try.of(start, draw(st.integers(-FARTHEST, FARTHEST)))


@settings(max_examples=150)
@given(spaces(), st.integers(1, 60), st.integers(0, 10**6), st.sampled_from([2, 5, 1000]))
def test_any_search_ends_whatever_the_losses_and_their_order(space, limit, seed, levels):
    """Within its limit, or where no step helps; ties and divergences among the losses."""
    method, start = space

    def loss(point):
        drawn = random.Random(f"{seed} {point}").randrange(levels + 1)
        return math.inf if drawn == levels else drawn / 10

    rule = walk(method, start)
    _, ranked = searched(rule, loss, limit)
    assert searched(rule, loss, limit, random.Random(seed))[1] == ranked
    assert len(ranked) <= limit
    if len(ranked) < limit:
        ends = [p for p in ranked if set(neighbours(method, p)) <= set(ranked)]
        assert any(all(loss(p) <= loss(n) for n in neighbours(method, p)) for p in ends)
        assert loss(ranked[0]) <= loss(start)


@settings(max_examples=60)
@given(spaces(), st.randoms(use_true_random=False))
def test_where_coordinates_do_not_depend_on_each_other_the_best_is_found(space, draw):
    method, start = space
    best = Try.of(
        {axis: draw.choice(values) for axis, values in method.axes.items()}, draw.randint(-FARTHEST, FARTHEST)
    )

    def loss(point):
        return abs(point.octave - best.octave) / 7 + sum(
            abs(value - wanted) * 2**i
            for i, ((_, value), (_, wanted)) in enumerate(zip(point.setting, best.setting, strict=True))
        )

    assert searched(walk(method, start), loss, 10**6)[1][0] == best


PLANE = Method("plane", {}, {"a": (0, 1, 2), "b": (0, 1, 2)})


def at(a, b, octave=0):
    return Try.of({"a": a, "b": b}, octave)


def test_a_search_step_by_step():
    assert PLANE.first == at(1, 1)
    crossed = {at(2, 1): 2.0, at(1, 2): 1.0, at(2, 2): 4.0, at(1, 2, -2): 0.5, at(1, 2, -3): 0.4}
    batches, ranked = searched(walk(PLANE), lambda point: crossed.get(point, 3.0))
    assert batches == [
        [at(1, 1), at(1, 1, -2), at(1, 1, 2), at(0, 1), at(2, 1), at(1, 0), at(1, 2)],
        [at(2, 2), at(2, 2, -2), at(2, 2, 2)],  # both steps at once, and what is around
        [at(1, 2, -2), at(1, 2, 2), at(0, 2)],  # which was worse: the better of the two
        [at(1, 2, -4), at(0, 2, -2)],
        [at(1, 2, -3), at(1, 2, -1)],
    ]
    assert ranked[:2] == [at(1, 2, -3), at(1, 2, -2)]


@pytest.mark.parametrize("limit", range(1, 13))
def test_at_the_limit_the_nearest_come_first(limit):
    """The point that all better steps lead to, then its rates, then its axes."""
    batches, ranked = searched(walk(PLANE), lambda p: -sum(value for _, value in p.setting) - p.octave, limit)
    first = [at(1, 1), at(1, 1, -2), at(1, 1, 2), at(0, 1), at(2, 1), at(1, 0), at(1, 2)]
    second = [at(2, 2, 2), at(2, 2), at(2, 2, 4), at(1, 2, 2), at(2, 1, 2)]
    assert [point for batch in batches for point in batch] == [*first, *second][:limit]
    assert len(ranked) == limit


def given_points(name):
    return [Try.of(setting, octave) for setting in every(METHODS[name])[:4] for octave in RATES]


@pytest.mark.parametrize(("slope", "end"), [(-1.0, FARTHEST), (1.0, -FARTHEST)])
def test_a_search_does_not_go_on_for_ever(slope, end):
    for rule in (walk(METHODS["NorMuon"]), functools.partial(bracket, given_points("NorMuon"))):
        _, ranked = searched(rule, lambda point: slope * point.octave, 1000)
        assert max(abs(point.octave) for point in ranked) == FARTHEST
        assert ranked[0].octave == end


@pytest.mark.parametrize("centre", [-9, -5, -1, 0, 1, 2, 3, 6, 9])
@pytest.mark.parametrize("number", [0, 3])
def test_of_given_settings_the_rate_alone_is_searched(centre, number):
    points = given_points("NorMuon")
    best = points[number * len(RATES)].setting
    batches, ranked = searched(
        functools.partial(bracket, points), lambda p: 3 + 0.1 * abs(p.octave - centre) + (p.setting != best)
    )
    assert batches[0] == points
    assert ranked[0] == Try(best, centre)
    assert {Try(best, centre + way) for way in (-1, 1)} <= set(ranked)
    assert {point.setting for point in ranked} == {point.setting for point in points}


def test_what_diverged_is_never_the_best():
    _, ranked = searched(
        walk(METHODS["anytime"]), lambda p: math.inf if p.octave >= 0 else 3.0 + 0.01 * abs(p.octave + 1)
    )
    assert ranked[0].octave == -1


def test_every_search_begins_on_its_axes():
    for method in METHODS.values():
        assert [setting for setting in every(method) if Try.of(setting, 0) == method.first]
        assert (method.published or method.name == RECIPE) == (not method.axes)
        assert len(next(walk(method)({}))) <= LATER  # so that a later horizon sees every step


def test_all_runs_can_be_trained():
    """Their settings are of optimizers that take them, at every study; and no two runs are the same."""
    from anytime.train.build import OURS, optimizer_class, settled
    from anytime.train.model import GPT

    model = GPT(NANO.run(METHODS["anytime"], Try((), 0), 1, 0).config.model)
    for study in STUDIES.values():
        keys = []
        for method in METHODS.values():
            for setting in every(method):
                run = study.run(method, Try.of(setting, 0), study.horizons[0], 0)
                config = settled(run.config)
                assert run.steps == study.steps(study.horizons[0] * (1 + method.after))
                keys.append(run.key)
                said = {k: v for k, v in run.settings["optimizer"].items() if k not in OURS}
                assert "warmup" not in said.values()
                if study is NANO:
                    optimizer_class(config.optimizer.name)(model, **said)
        assert len(set(keys)) == len(keys)


def test_a_method_is_what_it_says_and_nothing_of_a_preset():
    from anytime.train.config import FILLED, OptimizerConfig, flat, plain

    usual = flat(plain(OptimizerConfig()))
    for method in METHODS.values():
        point = method.first
        run = STUDIES["2M"].run(method, point, 1, 0)
        said = {k for k, v in flat(plain(run.config.optimizer)).items() if v != usual.get(k)}
        stated = {
            *method.options,
            *dict(point.setting),
            "lr",
            "warmup_steps",
            *(["horizon"] if method.scheduled else []),
            *(FILLED if "recipe" in method.options else []),
        }
        assert said <= stated, method.name


def test_the_warmup_stands_in_for_its_name():
    study = dataclasses.replace(NANO, warmup=77)
    for name, option in (("AMUSE", "beta_growth_start"), ("ScheduleFree+", "averaging_warmup")):
        options = study.run(METHODS[name], Try((), 0), 1, 0).settings["optimizer"]
        assert options["warmup_steps"] == options[option] == 77


def test_a_rate_of_another_scale_has_its_own_middle():
    for study in STUDIES.values():
        rates = [study.run(METHODS["ScheduleFree+"], Try((), o), 1, 0).settings["optimizer"]["lr"] for o in (-2, 0, 2)]
        assert rates == [0.5, 1.0, 2.0]
        assert study.run(METHODS["SF-AdamW"], Try((), 0), 1, 0).settings["optimizer"]["lr"] == study.rate


def test_a_cooldown_that_is_not_charged_is_run_beyond_its_horizon():
    method = METHODS["NorMuon, 1 − √ cooldown not charged"]
    options = STUDIES["2M"].run(method, Try.of({"momentum": 0.9}, 0), 2, 0).config.optimizer
    assert options.horizon == STUDIES["2M"].steps(2.4)
    assert options.horizon * (1 - options.decay_part) == pytest.approx(STUDIES["2M"].steps(2), abs=1)


def test_studies_by_name():
    assert study_of("2M").steps(1) == 1150
    with pytest.raises(UserError, match="there is no study '2m'"):
        study_of("2m")
    with pytest.raises(UserError, match="did you mean 'anytime'"):
        frontier.methods_of(["anytme"])
    assert [m.name for m in frontier.methods_of(["anytime"])] == ["NorMuon", "anytime"]
    assert frontier.methods_of([]) == list(METHODS.values())


# ----------------------------------------------------------- from try to page

HEIGHT = {"NorMuon": 1.0, "anytime": 1.02}
TUNED = {"momentum": 0.9, "schedule": "cosine", "weight_decay": 0.2, "adam_weight_decay": None}


def made_up(study: Study, run, offset=0.0):
    """Losses fall with the steps; the rate is best 1/√2 below the study's for schedules, at twice it for the rest."""
    free = "to " not in run.name.split(",")[0]
    asked = run.config.optimizer
    away = abs(round(2 * math.log2(asked.lr / study.rate)) / 2 - (1.0 if free else -0.5))
    worse = 0.05 * (run.settings["optimizer"].get("momentum") not in (0.9, None)) + 0.03 * (asked.schedule == "linear")
    if run.name.startswith("NorMuon"):
        worse += 0.02 * (asked.weight_decay != 0.2)
    worse += 0.2 * sum(part in run.name for part in PARTS)
    height = next((h for name, h in HEIGHT.items() if run.name.startswith(name)), 1.3)

    def loss(steps):
        return round(2 + height * (1 + 0.1 * away + worse) * 10 / math.sqrt(steps) + run.seed / 1000 + offset, 6)

    losses = {str(s): loss(s) for s in run.config.eval_at}
    return {"key": run.key, "name": run.name, "seed": run.seed, "settings": dict(run.settings), "losses": losses}


def finished(study, methods, **more):
    """All rows of a study, tried, chosen and run."""
    rows = {}
    found = Found(study, rows)
    rounds = []
    while tries := [run for m in methods for run in found.next_tries(m)]:
        rounds.append(tries)
        rows |= {run.key: made_up(study, run, **more) for run in tries}
    choices = {m.name: found.choice(m) for m in methods}
    runs = [*frontier.finals(found, methods, choices), *frontier.besides(found, methods, choices)]
    rows |= {run.key: made_up(study, run) for run in runs}
    return found, choices, rounds


@pytest.fixture(scope="module")
def whole():
    methods = frontier.methods_of(["anytime", "SF-NorMuon, the paper's"])
    return methods, *finished(NANO, methods)


def test_tries_are_on_seeds_set_apart_and_short_horizons(whole):
    _, _, _, rounds = whole
    tried = [run for runs in rounds for run in runs]
    assert {run.seed for run in tried} == set(NANO.set_apart)
    assert not {run.seed for run in tried} & set(NANO.seeds)
    free = [run for run in tried if run.name.startswith("anytime")]
    assert {run.steps for run in free} == {NANO.steps(NANO.short[-1])}
    assert {run.steps for run in tried if run.name.startswith("NorMuon")} == {NANO.steps(h) for h in NANO.horizons}
    assert not any(run.name.startswith("SF-NorMuon, the paper's") for run in tried)
    by_round = [{run.steps for run in runs if run.name.startswith("NorMuon")} for runs in rounds]
    assert by_round[0] == {NANO.steps(1)}
    assert by_round[-1] == {NANO.steps(2)}
    assert all(len(steps) < 2 for steps in by_round)  # the longer one waits for the shorter
    assert len({run.key for run in tried if run.name.startswith("NorMuon to 2×")}) == 9 + 2  # steps, half octaves


def test_a_study_says_how_many_are_tried():
    study = dataclasses.replace(NANO, tries=10, later=5)
    _, choices, rounds = finished(study, frontier.methods_of(["anytime", "AMUSE"]))
    names = [run.name for runs in rounds for run in runs]
    assert [sum(name.startswith(what) for name in names) for what in ("NorMuon to 1×", "NorMuon to 2×")] == [10, 5]
    assert [choices[name].tried for name in ("NorMuon", "AMUSE")] == [15, 10]


def test_the_best_are_chosen(whole):
    _, _, choices, _ = whole
    for horizon in NANO.horizons:
        first, second = choices["NorMuon"].points[horizon]
        assert dict(first.setting) == TUNED
        assert first.octave == -1
        assert second != first
    (point,) = choices["anytime"].points[2]
    assert point == Try((), 2)
    assert choices["anytime"].tried == 3 + 1 + 2  # around the first, beyond the next, half octaves
    assert choices["SF-NorMuon, the paper's"] == Choice({h: [Try((), 0)] for h in NANO.horizons}, 0)


def test_the_losses_that_count_are_of_other_seeds(whole):
    _, found, choices, _ = whole
    losses = found.losses(METHODS["NorMuon"], choices["NorMuon"])
    steps = NANO.steps(1)
    expected = [2 + 10 / math.sqrt(steps) + seed / 1000 for seed in NANO.seeds]
    assert losses[1] == pytest.approx(expected, abs=1e-5)


def test_what_no_claim_rests_on_is_run_on_the_first_seeds(whole):
    methods, found, choices, _ = whole
    for method in methods:
        losses = found.losses(method, choices[method.name])
        assert {len(values) for values in losses.values()} == {2 if method.claimed else 1}
    assert [m.name for m in METHODS.values() if m.claimed] == ["NorMuon", RECIPE]
    changed, points = found.without(METHODS[RECIPE], choices[RECIPE], next(iter(PARTS)))
    assert {(run.seed, run.steps) for run in found.final(changed, points)} == {(s, NANO.steps(1)) for s in NANO.seeds}
    wide = dataclasses.replace(NANO, seeds=(0, 1, 2, 3, 4))
    assert [len(wide.seeds_of(m)) for m in (METHODS[RECIPE], changed, METHODS["AMUSE"])] == [5, 3, 1]
    assert found.losses(changed, points).keys() == {1}  # the last but one


def test_of_several_kept_the_one_with_the_lowest_mean_counts(whole):
    _, found, choices, _ = whole
    _, second = choices["NorMuon"].points[1]
    rows = dict(found.rows)
    for seed in NANO.seeds:
        run = NANO.run(METHODS["NorMuon"], second, 1, seed)
        rows[run.key] = {**rows[run.key], "losses": {str(run.steps): 1.5 + seed}}
    assert Found(NANO, rows).losses(METHODS["NorMuon"], choices["NorMuon"])[1] == [1.5, 2.5]


def test_a_row_that_is_missing_is_named(whole):
    _, found, choices, _ = whole
    gone = found.final(METHODS["anytime"], choices["anytime"])[1]
    rows = {key: row for key, row in found.rows.items() if key != gone.key}
    with pytest.raises(MissingRow, match=r"anytime, rate .*, seed 1, 560 steps"):
        Found(NANO, rows).losses(METHODS["anytime"], choices["anytime"])


def test_a_row_that_was_not_looked_at_is_named(whole):
    """Unlike one that diverged before."""
    _, found, choices, _ = whole
    run = found.final(METHODS["anytime"], choices["anytime"])[0]
    row = {**found.rows[run.key], "losses": {}}
    with pytest.raises(UserError, match=r"the row of 'anytime, rate .*', seed 0, was not looked at in step 280"):
        Found(NANO, {**found.rows, run.key: row}).losses(METHODS["anytime"], choices["anytime"])
    failed = Found(NANO, {**found.rows, run.key: {**row, "failed": "the loss is nan at step 3"}})
    assert failed.losses(METHODS["anytime"], choices["anytime"])[1][0] == math.inf


def test_settings_at_the_end_of_their_values_are_marked():
    """The best may lie beyond; an axis of two values has nothing beyond."""
    method, rate = METHODS["NorMuon"], 0
    inner = {"weight_decay": 0.1, "adam_weight_decay": 0.0, "momentum": 0.9, "schedule": "linear"}
    points = {1: [Try.of(inner, rate)], 2: [Try.of({**inner, "weight_decay": 0.2, "momentum": 0.8}, rate)]}
    rows = {}
    for horizon, (best,) in points.items():
        for axis, values in (("momentum", (0.8, 0.9, 0.95)), ("weight_decay", (0.05, 0.1, 0.2))):
            for value in values:
                point = Try.of({**dict(best.setting), axis: value}, rate)
                run = NANO.run(method, point, horizon, NANO.set_apart[0])
                rows[run.key] = made_up(NANO, run)
    counts = NANO.run(method, Try.of({**inner, "momentum": 0.7}, rate), 2, NANO.seeds[0])  # no try
    rows[counts.key] = made_up(NANO, counts)
    table = frontier.settings(Found(NANO, rows), [method], {"NorMuon": Choice(points, 2)})
    assert [row[1:2] + row[4:] for row in table.body] == [["1×", ""], ["2×", "weight_decay, momentum"]]


def test_an_axis_of_lists_is_compared_with_what_a_file_has():
    method = METHODS["SF-NorMuon, retuned"]
    tried = [{"betas": [b, 0.95]} for b in (0.6, 0.8)]
    assert method.ends(Try.of({"betas": (0.8, 0.95)}, 0), tried) == ["betas"]
    assert method.ends(Try.of({"betas": (0.8, 0.95)}, 0), [*tried, {"betas": [0.9, 0.95]}]) == []


@pytest.mark.parametrize("octave", [0, 3])
def test_embeddings_at_the_rate_are_at_the_runs(octave):
    changed, choice = Found(NANO, {}).without(
        METHODS[RECIPE], Choice({1: [Try((), octave)], 2: [Try((), octave)]}, 0), "embeddings at the rate"
    )
    run = NANO.run(changed, choice.points[1][0], 1, 0)
    assert run.config.optimizer.adam_lr == run.config.optimizer.lr == NANO.lr(octave)


@pytest.mark.parametrize(
    ("envelope", "loss", "said"),
    [({1: 3.0}, 3.0, "1.00"), ({1: 2.9, 2: 3.0}, 3.0, "1.00"), ({1: 3.0}, 2.9, "> 1"),
     ({1: 3.0, 2: 2.9}, math.inf, "—"), ({1: 3.0, 2: 2.9}, 2.95, "0.71"), ({1: 3.0, 2: 2.9}, 3.1, "< 0.5")],
)  # fmt: skip
def test_the_part_of_the_tokens(envelope, loss, said):
    assert frontier._ratio(envelope, loss) == said


def test_what_was_chosen_stays(whole, tmp_path):
    """Later rows cannot change it, and another rate cannot be mistaken for it."""
    _, _, choices, _ = whole
    path = tmp_path / "frozen.json"
    assert freeze(path, NANO, choices) == choices
    assert freeze(path.parent / "not" / "there" / "frozen.json", NANO, choices) == choices
    assert json.loads(path.read_text())["anytime"]["tried"] == choices["anytime"].tried
    other = Choice({h: [Try((), 5)] for h in NANO.horizons}, 3)
    again = freeze(path, NANO, {**choices, "anytime": other, "AMUSE": other})
    assert again["anytime"] == choices["anytime"]
    assert again["AMUSE"] == other
    with pytest.raises(UserError, match=r"was chosen at rates of 0\.05, the study's is 0\.1"):
        freeze(path, dataclasses.replace(NANO, rate=0.1), {})


def test_a_recipe_that_was_frozen_cannot_change(whole, tmp_path, monkeypatch):
    _, _, choices, _ = whole
    path = tmp_path / "frozen.json"
    freeze(path, NANO, choices)
    assert json.loads(path.read_text())["anytime"]["optimizer"]["optimizer.momentum_growth"] == 0.3
    assert frozen(path, NANO) == choices
    plain = sf_spectral.RECIPES["anytime"]
    other = dataclasses.replace(plain, fill=lambda lr, warmup: plain.fill(lr, warmup) | {"momentum": 0.1})
    monkeypatch.setitem(sf_spectral.RECIPES, "anytime", other)
    with pytest.raises(UserError, match=r"has changed since it was frozen: optimizer\.momentum: 0\.1 was 0\.8$"):
        frozen(path, NANO)


def test_settings_may_come_from_another_study(whole, tmp_path, monkeypatch):
    methods, _, choices, _ = whole
    heir = dataclasses.replace(NANO, name="heir", inherits="nano")
    monkeypatch.setitem(STUDIES, "heir", heir)
    with pytest.raises(UserError, match="run `anytime frontier nano` first"):
        frontier.frontier("heir", out=tmp_path / "heir")
    path = tmp_path / "frozen.json"
    freeze(path, NANO, choices)
    taken = [inherited(method, frozen(path, NANO), heir) for method in methods]
    found_there = [{h: points[0] for h, points in choices[m.name].points.items()} for m in methods]
    assert [m.only for m in taken] == [found_there[0], {}, found_there[2]]
    _, found, rounds = finished(heir, taken)
    assert len(rounds[0]) == 2 * len(RATES)
    for method in (m for m in taken if m.only):
        for horizon, points in found[method.name].points.items():
            assert points[0] == choices[method.name].points[horizon][0]
            assert {point.setting for point in points} == {method.only[horizon].setting}
    # Settings that differ by horizon: each place takes the nearest horizon's.
    near, far = (Try.of({**TUNED, "momentum": momentum}, octave) for momentum, octave in ((0.8, 1), (0.95, -2)))
    method = dataclasses.replace(METHODS["NorMuon"], only={1: near, 3: far})
    rows = {}
    for place, point in ((1, near), (2, far)):
        wants = Found(heir, rows).next_tries(method)
        assert sorted(run.settings["optimizer"]["lr"] for run in wants) == [heir.lr(point.octave + o) for o in RATES]
        assert {run.settings["optimizer"]["momentum"] for run in wants} == {dict(point.setting)["momentum"]}
        middle = heir.lr(point.octave)
        for run in wants:
            loss = 3.0 + (run.settings["optimizer"]["lr"] != middle)
            rows[run.key] = {"key": run.key, "losses": {str(heir.steps(place)): loss}}
    assert not Found(heir, rows).next_tries(method)
    with pytest.raises(UserError, match="AMUSE has no settings of nano: anytime frontier nano --methods 'AMUSE'"):
        inherited(METHODS["AMUSE"], choices, heir)


def test_the_page(whole, tmp_path):
    methods, found, choices, _ = whole
    page = frontier.redraw(found, methods, choices, tmp_path).read_text("utf-8")
    body = [line.split("|")[1:-1] for line in page.splitlines() if line.startswith("| anytime ")]
    loss = 2 + 1.02 * 10 / math.sqrt(NANO.steps(1)) + 0.0005
    regret = 0.02 * 10 / math.sqrt(NANO.steps(1))
    cells = [cell.strip() for cell in body[0]]
    assert cells[1].startswith(f"{loss:.4f}")
    assert cells[3] == f"+{regret:.4f}"
    assert cells[5].startswith(f"+{regret:.4f} (+")
    for part in PARTS:
        line = next(line for line in page.splitlines() if line.startswith(f"| {part} "))
        worse = 1.02 * 0.2 * 10 / math.sqrt(NANO.steps(1))
        assert f"+{worse:.4f}" in line
    assert (tmp_path / "frontier.svg").stat().st_size > 2000
    assert (tmp_path / "frontier.pdf").exists()
    assert "≥" not in page


def test_the_page_of_a_study_that_is_not_over(whole, tmp_path):
    """All that was run to its end, and what is still to be run; no page without the envelope."""
    methods, found, choices, _ = whole
    assert "Still to be run" not in frontier.redraw(found, methods, choices, tmp_path).read_text("utf-8")
    changed, points = found.without(METHODS[RECIPE], choices[RECIPE], "β constant")
    swept = found.rates(METHODS["NorMuon"], choices["NorMuon"], 2).values()
    gone = {found.final(changed, points)[0].key, next(r.key for r in swept if r.seed == NANO.set_apart[0])}
    left = Found(NANO, {key: row for key, row in found.rows.items() if key not in gone})
    page = frontier.redraw(left, [*methods, METHODS["AMUSE"]], choices, tmp_path).read_text("utf-8")
    assert "Still to be run: AMUSE; anytime, β constant; the rates of NorMuon." in page
    assert "| β constant |" not in page
    assert "| μ constant |" in page
    none = Found(NANO, {key: row for key, row in found.rows.items() if not row["name"].startswith("NorMuon to 2×")})
    assert frontier.redraw(none, methods, choices, tmp_path) is None


def test_parts_are_judged_on_the_seeds_that_they_were_run_on():
    study = dataclasses.replace(NANO, seeds=(0, 1, 2, 3, 4))
    found, choices, _ = finished(study, frontier.methods_of([RECIPE]))
    losses = found.losses(METHODS[RECIPE], choices[RECIPE])
    assert len(losses[1]) == 5
    losses[1][3:] = [100.0, 100.0]  # on which no part was run
    table = frontier.ablations(found, list(PARTS), choices[RECIPE], losses)
    worse = 1.02 * 0.2 * 10 / math.sqrt(NANO.steps(1))
    assert [row[:2] for row in table.body] == [[part, f"+{worse:.4f}"] for part in PARTS]


def test_searches_go_first_then_what_counts(whole):
    """A search that waits for its next round holds everything up."""
    methods, found, choices, _ = whole
    over = [m for m in methods if m.name == RECIPE]
    begun = Found(NANO, {key: row for key, row in found.rows.items() if not row["name"].startswith("NorMuon to 2×")})
    runs = frontier.in_order(begun, methods, {RECIPE: choices[RECIPE]})
    tries = [run for m in methods if m not in over for run in begun.next_tries(m)]
    counted = frontier.finals(begun, over, choices)
    assert tries
    assert [run.key for run in runs[: len(tries)]] == [run.key for run in tries]
    assert {run.key for run in runs[len(tries) : len(tries) + len(counted)]} == {run.key for run in counted}
    besides = runs[len(tries) + len(counted) :]
    assert {run.key for run in besides} == {run.key for run in frontier.besides(begun, over, choices)}
    assert [run.tokens for run in besides] == sorted((run.tokens for run in besides), reverse=True)


def test_the_sweep_spans_a_factor_of_sixteen(whole):
    _, found, choices, _ = whole
    rates = sorted(found.rates(METHODS[RECIPE], choices[RECIPE], 2))
    assert len(rates) == len(SWEPT)
    assert rates[-1] / rates[0] == pytest.approx(16, rel=0.01)


@pytest.mark.parametrize(
    ("good", "swept"), [((-9, 0), (-10, 4)), ((-5, 5), (-6, 6)), ((2, 99), (-4, 10)), ((), (-4, 4))]
)
def test_the_sweep_goes_on_until_its_ends_are_seen(whole, good, swept):
    """Or as far as it may; where all diverge, not at all."""
    _, _, choices, _ = whole
    rows, point = {}, choices[RECIPE].points[2][0]
    for _ in range(20):
        runs = Found(NANO, rows).rates(METHODS[RECIPE], choices[RECIPE], 2)
        if all(run.key in rows for run in runs.values()):
            break
        for rate, run in runs.items():
            octave = round(2 * math.log2(rate / NANO.lr(point.octave)))
            loss = math.inf if not good else 3.0 if good[0] <= octave <= good[1] else 3.1
            rows[run.key] = made_up(NANO, run) | {"losses": {str(NANO.steps(2)): loss}}
    seen = [round(2 * math.log2(rate / NANO.lr(point.octave))) for rate in runs]
    assert (seen[0], seen[-1], len(seen)) == (*swept, swept[1] - swept[0] + 1)


@pytest.mark.slow
def test_a_small_study_from_its_first_try_to_its_page(tmp_path, monkeypatch, words):
    """Real runs, of a study of a few steps; when time runs out it stops, and goes on from its rows."""
    tiny = dataclasses.replace(
        NANO, name="tiny", horizons=(0.02, 0.04), short=(0.01, 0.02), kept=1, warmup=2, tries=4, later=3,
        settings={**NANO.settings, "data": {}},
    )  # fmt: skip
    monkeypatch.setitem(STUDIES, "tiny", tiny)
    monkeypatch.setattr("torch.get_num_threads", lambda: 1)  # threads that wait for each other on a busy machine
    monkeypatch.setattr("anytime.experiments.search.FARTHEST", 3)
    monkeypatch.setattr("anytime.experiments.anytime.SWEPT", range(-1, 2))
    two = {
        "NorMuon": Method(
            "NorMuon", METHODS["NorMuon"].options | {"schedule": "cosine"}, scheduled=True, enveloped=True, claimed=True
        ),
        "anytime": Method("anytime", METHODS["anytime"].options, claimed=True),
    }
    monkeypatch.setattr("anytime.experiments.frontier.METHODS", two)
    places = {"out": tmp_path / "out", "work": tmp_path / "work", "data": str(words)}
    monkeypatch.setattr("anytime.experiments.frontier.EPOCHS", 0.3)
    with pytest.raises(UserError, match=r"takes 6,144 tokens, more than 0\.3 times the 19,287 in .*: give it"):
        frontier.frontier("tiny", **places)
    monkeypatch.setattr("anytime.experiments.frontier.EPOCHS", 4)
    assert frontier.frontier("tiny", **places, seconds=1e-3) is None
    assert not (tmp_path / "out" / "frozen.json").exists()
    page = frontier.frontier("tiny", **places)
    rows = (tmp_path / "out" / "rows.jsonl").read_bytes()
    assert page is not None
    assert "| anytime " in page.read_text("utf-8")
    costs = []
    assert frontier.frontier("tiny", **places, agree=costs.append) == page
    assert costs == []
    assert (tmp_path / "out" / "rows.jsonl").read_bytes() == rows
