"""Which parameter goes where: every form in which parameters can be given, patterns, options, and their errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import anytime
from anytime.core.layout import Layout
from anytime.core.polar import METHODS
from anytime.optim.options import CHECKS

MATRIX, REST = "normuon", "sf-adamw"


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(3, 4, 8))


class Zoo(nn.Module):
    """One of everything."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.norm = nn.LayerNorm(6)
        self.attention = nn.ModuleDict({"qkv": nn.Linear(6, 18), "out": nn.Linear(6, 6, bias=False)})
        self.experts = Experts()
        self.row = nn.Linear(5, 1)
        self.column = nn.Linear(1, 5, bias=False)
        self.temperature = nn.Parameter(torch.tensor(1.0))
        self.conv1 = nn.Conv1d(3, 4, 5)
        self.conv2 = nn.Conv2d(3, 4, 2, bias=False)
        self.conv3 = nn.Conv3d(2, 4, 2, bias=False)
        self.depthwise = nn.Conv2d(4, 4, 3, groups=4, bias=False)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.empty = nn.Parameter(torch.zeros(0, 6))
        self.lm_head = nn.Linear(6, 11, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight


def build(params: Any = None, **more: Any) -> anytime.SFNorMuon:
    return anytime.SFNorMuon(Zoo() if params is None else params, **more)


def rule_of(optimizer: torch.optim.Optimizer, p: Tensor) -> str:
    (rule,) = [group["rule"] for group in optimizer.param_groups for member in group["params"] if member is p]
    return rule


def option(optimizer: torch.optim.Optimizer, p: Tensor, key: str) -> Any:
    (value,) = [group[key] for group in optimizer.param_groups for member in group["params"] if member is p]
    return value


def finite_after_steps(optimizer: torch.optim.Optimizer, steps: int = 2) -> bool:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for _ in range(steps):
        for p in params:
            p.grad = torch.randn_like(p) if p.requires_grad else None
        optimizer.step()
    return all(p.isfinite().all() for p in params)


# ---------------------------------------------------------------- a whole module

EXPECTED: dict[str, tuple[str, str, str]] = {
    # name: rule, read as, part of the reason
    "embed.weight": (REST, "matrix", "embedding"),
    "norm.weight": (REST, "matrix", "vector"),
    "norm.bias": (REST, "matrix", "vector"),
    "attention.qkv.weight": (MATRIX, "matrix", "looks fused"),
    "attention.qkv.bias": (REST, "matrix", "vector"),
    "attention.out.weight": (MATRIX, "matrix", "hidden matrix"),
    "experts.up": (MATRIX, "matrix", "3 matrices of 4×8"),
    "row.weight": (REST, "matrix", "1×5: a side of 1"),
    "row.bias": (REST, "matrix", "vector"),
    "column.weight": (REST, "matrix", "5×1: a side of 1"),
    "temperature": (REST, "matrix", "scalar"),
    "conv1.weight": (MATRIX, "flat", "kernel as 4×15"),
    "conv1.bias": (REST, "matrix", "vector"),
    "conv2.weight": (MATRIX, "flat", "kernel as 4×12"),
    "conv3.weight": (MATRIX, "flat", "kernel as 4×16"),
    "depthwise.weight": (MATRIX, "flat", "kernel as 4×9"),
    "frozen.weight": (MATRIX, "matrix", "hidden matrix"),
    "frozen.bias": (REST, "matrix", "vector"),
    "empty": (REST, "matrix", "empty"),
}


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_the_plan_of_a_module(tied: bool) -> None:
    model = Zoo(tied)
    optimizer = build(model)
    expected = dict(EXPECTED)
    if not tied:
        expected["lm_head.weight"] = (REST, "matrix", "head")
    assert {entry.name for entry in optimizer.plan.entries} == set(expected)
    assert len(optimizer.plan) == len(expected)
    for name, p in model.named_parameters():
        entry = optimizer.plan[name]
        rule, layout, reason = expected[name]
        assert (entry.rule, str(entry.layout)) == (rule, layout), name
        assert reason in entry.reason, name
        assert entry.shape == p.shape
        assert entry.matrix == (rule == MATRIX)
        assert entry.frozen == name.startswith("frozen")
        assert entry.rate == 1.0
        assert rule_of(optimizer, p) == rule
    assert finite_after_steps(optimizer)


@pytest.mark.parametrize(("kind", "gates"), [(nn.LSTM, 4), (nn.GRU, 3), (nn.LSTMCell, 4), (nn.GRUCell, 3)])
def test_gates_of_recurrent_layers_are_told(kind: type[nn.Module], gates: int) -> None:
    model = kind(5, 6)
    plan = anytime.SFNorMuon(model).plan
    fused = [name for name, p in model.named_parameters() if p.ndim == 2]
    assert len(fused) == 2
    for name in fused:
        assert plan[name].reason == f"hidden matrix; {gates} gates, split them?"
    split = anytime.SFNorMuon(model, rules={"weight_*": {"split": gates}}).plan
    assert {str(split[name].layout) for name in fused} == {str(split[fused[0]].layout)} != {"matrix"}
    plain = anytime.SFNorMuon(nn.RNN(5, 6)).plan
    assert plain["weight_hh_l0"].reason == "hidden matrix"
    projected = anytime.SFNorMuon(nn.LSTM(5, 6, proj_size=2)).plan
    assert projected["weight_hr_l0"].reason == "hidden matrix"


def test_the_plan_prints_every_parameter() -> None:
    optimizer = build(rules={"attention.qkv.weight": {"split": 3, "rate": 0.5}})
    text = str(optimizer.plan)
    lines = {line.split()[0]: line for line in text.splitlines() if line}
    for entry in optimizer.plan.entries:
        line = lines[entry.name]
        assert entry.rule in line
        assert entry.reason in line
        assert ("×".join(map(str, entry.shape)) or "scalar") in line
    assert "embed.weight = lm_head.weight" in lines["embed.weight"]
    assert "embedding, tied" in lines["embed.weight"]
    assert "normuon (frozen)" in lines["frozen.weight"]
    assert "matrix rows 6+6+6" in lines["attention.qkv.weight"]
    assert " 0.5 " in lines["attention.qkv.weight"]
    totals: dict[str, list[int]] = {MATRIX: [0, 0], REST: [0, 0]}
    for entry in optimizer.plan.entries:
        totals[entry.rule][0] += 1
        totals[entry.rule][1] += torch.Size(entry.shape).numel()
    for rule, (count, size) in totals.items():
        assert f"{rule}: {count} tensors, {size:,} parameters" in text


def test_the_plan_by_name() -> None:
    plan = build().plan
    assert plan["lm_head.weight"] is plan["embed.weight"]
    assert plan["embed.weight"].aliases == ("lm_head.weight",)
    with pytest.raises(KeyError, match="nowhere"):
        plan["nowhere"]


def test_a_tied_weight_belongs_to_its_embedding_whichever_comes_first() -> None:
    class HeadFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(6, 11, bias=False)
            self.words = nn.Embedding(11, 6)
            self.out.weight = self.words.weight

    optimizer = build(HeadFirst())
    assert len(optimizer.plan) == 1
    assert optimizer.plan["words.weight"].rule == REST
    assert "embedding" in optimizer.plan["out.weight"].reason


def test_a_head_is_known_by_its_size_too() -> None:
    model = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 6), nn.Linear(6, 11))
    plan = build(model).plan
    assert plan["2.weight"].rule == REST
    assert plan["1.weight"].rule == MATRIX


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_hidden_layers_as_wide_as_a_table_of_positions_stay_matrices(tied: bool) -> None:
    """A context as long as the model is wide is common and makes no hidden layer a head."""

    class Transformer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(50, 16)
            self.positions = nn.Embedding(16, 16)
            self.up = nn.Linear(16, 16)
            self.down = nn.Linear(16, 16)
            self.out = nn.Linear(16, 50, bias=False)
            if tied:
                self.out.weight = self.words.weight

    plan = build(Transformer()).plan
    assert plan["out.weight"].rule == REST
    assert plan["up.weight"].rule == MATRIX
    assert plan["down.weight"].rule == MATRIX


def test_a_head_of_a_small_vocabulary_beside_a_longer_table_of_positions() -> None:
    class Bytes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(32, 8)
            self.positions = nn.Embedding(64, 8)
            self.up = nn.Linear(8, 16)
            self.down = nn.Linear(16, 8)
            self.out = nn.Linear(8, 32)

    plan = build(Bytes()).plan
    assert plan["out.weight"].rule == REST
    assert plan["up.weight"].rule == plan["down.weight"].rule == MATRIX


@pytest.mark.parametrize("name", ["head", "lm_head", "classifier", "unembed", "head.fc", "model.lm_head"])
def test_heads_by_their_names(name: str) -> None:
    p = nn.Parameter(torch.randn(7, 5))
    optimizer = build([(f"{name}.weight", p)])
    assert rule_of(optimizer, p) == REST
    assert "by its name" in optimizer.plan[f"{name}.weight"].reason


@pytest.mark.parametrize(
    "name", ["embed.weight", "transformer.wte.weight", "wpe.weight", "embed_tokens.weight", "tok_embeddings.weight"]
)
def test_embeddings_by_their_names_where_there_is_no_module(name: str) -> None:
    p = nn.Parameter(torch.randn(7, 5))
    optimizer = build([(name, p)])
    assert rule_of(optimizer, p) == REST
    assert "embedding" in optimizer.plan[name].reason


@pytest.mark.parametrize(
    "name", ["layers.0.headwise.weight", "multihead.proj.weight", "mlp.up.weight", "heads.0.attention.weight"]
)
def test_hidden_matrices_with_names_close_to_a_heads(name: str) -> None:
    p = nn.Parameter(torch.randn(7, 5))
    assert rule_of(build([(name, p)]), p) == MATRIX


def test_attention_of_torch_and_recurrent_layers() -> None:
    model = nn.ModuleDict(
        {"attention": nn.MultiheadAttention(6, 2), "lstm": nn.LSTM(4, 3), "bilinear": nn.Bilinear(3, 4, 5)}
    )
    optimizer = build(model)
    assert optimizer.plan["attention.in_proj_weight"].rule == MATRIX
    assert "split it?" in optimizer.plan["attention.in_proj_weight"].reason
    assert optimizer.plan["attention.in_proj_bias"].rule == REST
    assert optimizer.plan["lstm.weight_hh_l0"].shape == (12, 3)
    assert finite_after_steps(optimizer)


def test_a_shared_module_is_one_parameter_with_two_names() -> None:
    layer = nn.Linear(4, 4)
    optimizer = build(nn.ModuleDict({"first": layer, "second": layer}))
    assert len(optimizer.plan) == 2
    assert optimizer.plan["second.weight"].name == "first.weight"


def test_frozen_parameters_of_other_types_are_left_alone() -> None:
    """As the integer weights under a low-rank adapter."""
    model = nn.Linear(3, 3)
    model.register_parameter("packed", nn.Parameter(torch.zeros(3, 3, dtype=torch.int8), requires_grad=False))
    optimizer = build(model)
    assert optimizer.plan["packed"].frozen
    assert finite_after_steps(optimizer)
    with optimizer.averaged():
        assert optimizer.averaged_state_dict(model)["packed"].dtype == torch.int8
    optimizer.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("name", ["SFAdamW", "SFSGD", "SFLion", "AdamW", "SignSGD", "Lion"])
def test_an_elementwise_optimizer_has_one_rule_for_all(name: str) -> None:
    optimizer = getattr(anytime, name)(Zoo())
    assert len({entry.rule for entry in optimizer.plan.entries}) == 1
    assert len(optimizer.param_groups) == 1
    assert finite_after_steps(optimizer)


# ------------------------------------------------------------- forms of parameters


def test_bare_parameters() -> None:
    params = [nn.Parameter(torch.randn(s)) for s in [(4, 5), (5,), (), (2, 3, 3, 3), (2, 4, 5)]]
    optimizer = build(params)
    assert [rule_of(optimizer, p) for p in params] == [MATRIX, REST, REST, MATRIX, MATRIX]
    assert [entry.name for entry in optimizer.plan.entries] == [f"parameter {i}" for i in range(5)]
    assert str(optimizer.plan["parameter 3"].layout) == "flat"
    assert "2 matrices of 4×5" in optimizer.plan["parameter 4"].reason
    assert all("param_names" not in group for group in optimizer.param_groups)
    assert [sorted(i for g in optimizer.param_groups for i in g["order"])] == [[0, 1, 2, 3, 4]]


def test_a_generator_of_parameters_and_of_named_ones() -> None:
    model = Zoo()
    by_module, by_name, bare = build(model), build(model.named_parameters()), build(model.parameters())
    assert [entry.name for entry in by_name.plan.entries] == [entry.name for entry in by_module.plan.entries]
    assert len(bare.plan) == len(by_name.plan)
    for name, p in model.named_parameters():
        if name not in ("embed.weight", "conv1.weight"):
            assert rule_of(by_name, p) == rule_of(by_module, p), name
    assert by_name.plan["embed.weight"].rule == REST


def test_groups_with_options() -> None:
    a, b = nn.Linear(4, 5), nn.Linear(5, 4)
    optimizer = build(
        [
            {"params": a.parameters(), "lr": 0.1, "momentum": 0.5},
            {"params": b.weight, "rate": 2.0},
            {"params": [b.bias], "weight_decay": 0.0},
        ],
        lr=0.3,
    )
    assert [option(optimizer, p, "lr") for p in (a.weight, a.bias, b.weight, b.bias)] == [0.1, 0.1, 0.3, 0.3]
    assert option(optimizer, a.weight, "momentum") == 0.5
    assert option(optimizer, b.weight, "momentum") == 0.8
    assert option(optimizer, b.weight, "rate") == 2.0
    assert optimizer.plan["parameter 2"].rate == 2.0
    assert option(optimizer, b.bias, "weight_decay") == 0.0
    assert option(optimizer, a.bias, "weight_decay") == 0.05


def test_a_module_as_the_parameters_of_a_group() -> None:
    a, b = nn.Embedding(11, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 11))
    optimizer = build([{"params": a, "lr": 0.1}, {"params": b}])
    assert rule_of(optimizer, a.weight) == REST
    assert rule_of(optimizer, b[0].weight) == MATRIX
    assert rule_of(optimizer, b[1].weight) == REST  # its rows are those of the other group's embedding
    assert option(optimizer, a.weight, "lr") == 0.1


def test_a_rule_for_a_whole_group() -> None:
    a, b = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))
    optimizer = build([{"params": [a], "rule": "rest"}, {"params": [b], "split": 2}])
    assert rule_of(optimizer, a) == REST
    assert "its group says so" in optimizer.plan["parameter 0"].reason
    assert option(optimizer, b, "layouts") == ["matrix rows 2+2"]


def test_an_empty_group_beside_named_parameters() -> None:
    model = nn.Linear(3, 3)
    optimizer = build([{"params": list(model.named_parameters())}, {"params": []}])
    assert len(optimizer.plan) == 2
    optimizer.load_state_dict(optimizer.state_dict())


def test_a_parameter_given_twice() -> None:
    p, q = nn.Parameter(torch.randn(3, 3)), nn.Parameter(torch.randn(3))
    with pytest.raises(ValueError, match=r"\(3, 3\) is given twice"):
        build([p, q, p])
    with pytest.raises(ValueError, match="more than one parameter group"):
        build([{"params": [p]}, {"params": [q, p]}])
    tied = build([("a", p), ("b", p)])
    assert tied.plan["b"] is tied.plan["a"]
    assert len(tied.plan) == 1


@pytest.mark.parametrize(
    ("params", "error", "match"),
    [
        (lambda: torch.zeros(3, 3), TypeError, "not a single tensor"),
        (lambda: [], ValueError, "empty parameter list"),
        (lambda: iter(()), ValueError, "generator can be read only once"),
        (lambda: nn.ReLU(), ValueError, "ReLU has no parameters"),
        (lambda: [1.0], TypeError, "not float"),
        (lambda: ["weight"], TypeError, "not str"),
        (lambda: [nn.Linear(2, 2)], TypeError, "several modules go into groups"),
        (lambda: {"params": [torch.zeros(3)]}, TypeError, "a group goes into a list"),
        (lambda: dict(nn.Linear(2, 2).named_parameters()), TypeError, "pass its .items"),
        (lambda: nn.Linear(2, 2).parameters, TypeError, "a module or an iterable"),
        (lambda: [{"lr": 0.1}], ValueError, "needs the key 'params'.*'lr'"),
        (lambda: [{"params": []}, torch.zeros(3)], TypeError, "mixes groups"),
        (lambda: [("a", torch.zeros(3)), torch.zeros(3)], ValueError, "all parameters have names or none"),
        (lambda: {nn.Parameter(torch.zeros(3))}, TypeError, "set"),
        (lambda: [{"params": {nn.Parameter(torch.zeros(3))}}], TypeError, "set"),
        (lambda: [nn.Parameter(torch.zeros(3)) * 2], ValueError, "non-leaf"),
        (lambda: [torch.zeros(3, dtype=torch.complex64, requires_grad=True)], TypeError, "complex64"),
    ],
)
def test_what_is_no_parameter_list(params: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        build(params())


def test_a_group_without_names_cannot_join_named_ones() -> None:
    optimizer = build(nn.Linear(3, 3))
    groups, size = len(optimizer.param_groups), len(optimizer.plan)
    more = nn.Linear(3, 3)
    with pytest.raises(ValueError, match="names"):
        optimizer.add_param_group({"params": list(more.parameters())})
    assert (len(optimizer.param_groups), len(optimizer.plan)) == (groups, size)
    assert all(p not in optimizer.state for p in more.parameters())


def test_a_group_is_added_whole_or_not_at_all() -> None:
    optimizer = build(nn.Linear(3, 3))
    groups, size = len(optimizer.param_groups), len(optimizer.plan)
    matrix, vector = nn.Parameter(torch.zeros(3, 3)), nn.Parameter(torch.zeros(3)) * 2
    with pytest.raises(ValueError, match="non-leaf"):
        optimizer.add_param_group({"params": [("matrix", matrix), ("vector", vector)]})
    assert (len(optimizer.param_groups), len(optimizer.plan)) == (groups, size)
    assert matrix not in optimizer.state
    optimizer.add_param_group({"params": [("matrix", matrix)]})


def test_a_generator_used_up() -> None:
    params = nn.Linear(2, 2).parameters()
    list(params)
    with pytest.raises(ValueError, match="only once"):
        build(params)


# --------------------------------------------------------------------- patterns


def test_the_first_match_wins() -> None:
    optimizer = build(
        rules={"attention.out.*": {"lr": 0.1}, "attention.*": {"lr": 0.2, "adam_lr": 0.4}, "*.weight": {"lr": 0.3}}
    )
    plan = {n: p for g in optimizer.param_groups for n, p in zip(g["param_names"], g["params"], strict=True)}
    assert option(optimizer, plan["attention.out.weight"], "lr") == 0.1
    assert option(optimizer, plan["attention.qkv.weight"], "lr") == 0.2
    assert option(optimizer, plan["attention.qkv.bias"], "lr") == 0.4
    assert option(optimizer, plan["conv1.weight"], "lr") == 0.3
    assert option(optimizer, plan["conv1.bias"], "lr") == 0.008


def test_matrix_and_rest_by_force() -> None:
    model = Zoo()
    optimizer = build(
        model, rules={"attention.out.weight": "rest", "row.weight": "matrix", "embed.*": {"rule": "matrix"}}
    )
    assert rule_of(optimizer, model.attention["out"].weight) == REST
    assert rule_of(optimizer, model.row.weight) == MATRIX
    assert rule_of(optimizer, model.embed.weight) == MATRIX
    assert "pattern 'row.weight' says so" in optimizer.plan["row.weight"].reason
    assert finite_after_steps(optimizer)


def test_a_tied_weight_is_matched_under_any_of_its_names() -> None:
    optimizer = build(rules={"lm_head.*": {"adam_lr": 0.5}})
    (entry,) = [e for e in optimizer.plan.entries if e.name == "embed.weight"]
    assert entry.rule == REST
    (group,) = [g for g in optimizer.param_groups if "embed.weight" in g["param_names"]]
    assert group["lr"] == 0.5


@pytest.mark.parametrize("name", ["norm.weight", "temperature", "empty"])
def test_what_has_no_two_dimensions_cannot_be_a_matrix(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} of shape .* cannot follow the matrix rule"):
        build(rules={name: "matrix"})


@pytest.mark.parametrize(
    ("rules", "match"),
    [
        ({"attention.*": "matrx"}, "'matrx'; it must be 'matrix' or 'rest'"),
        ({"nothing.*": "rest"}, "'nothing[.][*]'.*matches no parameter.*'embed.weight'"),
        ({"*.weight": {}, "row.weight": "rest"}, "'row.weight'.*earlier patterns take all"),
        ({"row.weight": {"lrr": 0.1}}, "no option 'lrr'; did you mean 'lr'"),
        ({"row.weight": {"lr": -1.0}}, r"lr is -1.0; it must be a number in \[0"),
        ({"norm.*": {"momentum": 0.5}}, "no option 'momentum'"),
        ({"attention.out.weight": {"bias_correction": None}}, "no option 'bias_correction'"),
        ({"attention.out.weight": 0.1}, "attention.out.weight"),
        ({"attention.out.weight": None}, "attention.out.weight"),
    ],
)
def test_patterns_that_are_wrong(rules: dict[str, Any], match: str) -> None:
    with pytest.raises((ValueError, TypeError), match=match):
        build(rules=rules)


def test_patterns_need_names() -> None:
    with pytest.raises(ValueError, match="named_parameters"):
        build(Zoo().parameters(), rules={"*": "rest"})


def test_nothing_may_be_left_over_where_asked() -> None:
    rules = {"*.weight": {}, "experts.*": {}, "temperature": {}, "empty": {}}
    with pytest.raises(ValueError, match=r"'norm.bias' is left over"):
        build(rules=rules, unmatched="raise")
    optimizer = build(
        rules={**rules, "norm.bias": {}, "attention.*": {}, "row.bias": {}, "conv?.bias": {}}, unmatched="raise"
    )
    assert optimizer.plan["frozen.bias"].frozen  # matched by no pattern, and never trained
    with pytest.raises(ValueError, match="left over"):
        build(nn.Linear(2, 2), unmatched="raise")
    with pytest.raises(ValueError, match="'ignore'; it must be 'auto' or 'raise'"):
        build(unmatched="ignore")


def test_patterns_hold_for_groups_added_later() -> None:
    model = nn.Linear(4, 4)
    optimizer = build(model, rules={"*bias": {"adam_lr": 0.5}})
    more = nn.Linear(4, 4)
    optimizer.add_param_group({"params": [("more.weight", more.weight), ("more.bias", more.bias)], "rate": 0.25})
    assert option(optimizer, more.bias, "lr") == 0.5
    assert option(optimizer, more.weight, "lr") == 0.008
    assert optimizer.plan["more.weight"].rate == optimizer.plan["more.bias"].rate == 0.25
    assert sorted(i for g in optimizer.param_groups for i in g["order"]) == [0, 1, 2, 3]
    before = len(optimizer.param_groups), len(optimizer.plan)
    with pytest.raises(ValueError, match="did you mean 'rate'"):
        optimizer.add_param_group({"params": [("last", nn.Parameter(torch.zeros(2)))], "rat": 1.0})
    with pytest.raises(ValueError, match="needs the key 'params'"):
        optimizer.add_param_group({"rate": 1.0})
    assert before == (len(optimizer.param_groups), len(optimizer.plan))


# ------------------------------------------------------------------------ splits


@pytest.mark.parametrize(
    ("split", "layout"),
    [
        (3, Layout(False, 0, (6, 6, 6))),
        ([6, 6, 6], Layout(False, 0, (6, 6, 6))),
        ((10, 4, 4), Layout(False, 0, (10, 4, 4))),
        ({"sizes": 3}, Layout(False, 0, (6, 6, 6))),
        ({"sizes": [2, 4], "dim": 1}, Layout(False, 1, (2, 4))),
        ({"sizes": 2, "dim": 1}, Layout(False, 1, (3, 3))),
        (1, Layout(False, 0, (18,))),
    ],
)
def test_fused_matrices_are_split(split: Any, layout: Layout) -> None:
    model = Zoo()
    optimizer = build(model, rules={"attention.qkv.weight": {"split": split}}, warmup_steps=0, polar="svd", lr=0.1)
    assert optimizer.plan["attention.qkv.weight"].layout == layout
    weight = model.attention["qkv"].weight
    assert (
        Layout.parse(
            option(optimizer, weight, "layouts")[option(optimizer, weight, "param_names").index("attention.qkv.weight")]
        )
        == layout
    )
    apart = [nn.Parameter(piece.detach().clone()) for piece in torch.split(weight, list(layout.sizes), dim=layout.dim)]
    other = build(apart, warmup_steps=0, polar="svd", lr=0.1)
    for _ in range(3):
        weight.grad = torch.randn_like(weight)
        for p, grad in zip(apart, torch.split(weight.grad, list(layout.sizes), dim=layout.dim), strict=True):
            p.grad = grad.clone()
        optimizer.step()
        other.step()
    torch.testing.assert_close(
        weight.detach(), torch.cat([p.detach() for p in apart], layout.dim), rtol=1e-5, atol=1e-6
    )


def test_experts_and_kernels_are_split_too() -> None:
    optimizer = build(rules={"experts.up": {"split": {"sizes": 2, "dim": 1}}, "conv2.weight": {"split": 2}})
    assert str(optimizer.plan["experts.up"].layout) == "matrix columns 4+4"
    assert str(optimizer.plan["conv2.weight"].layout) == "flat rows 2+2"
    assert finite_after_steps(optimizer)
    optimizer.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize(
    ("split", "match"),
    [
        (4, "18 rows do not divide into 4"),
        (0, "18 rows do not divide into 0"),
        (-3, "do not divide into -3"),
        ([6, 6], r"\(6, 6\) must be positive and add up to 18"),
        ([18, 0], "must be positive"),
        ({"sizes": 4, "dim": 1}, "6 columns do not divide into 4"),
        ({"sizes": 2, "dim": 2}, "dim is 2 and must be 0 .*1"),
        ({"dim": 1}, "sizes"),
        (3.0, "3.0"),
        ("3", "split of attention.qkv.weight"),
    ],
)
def test_splits_that_do_not_fit(split: Any, match: str) -> None:
    with pytest.raises((ValueError, TypeError), match=match) as caught:
        build(rules={"attention.qkv.weight": {"split": split}})
    assert "attention.qkv.weight" in str(caught.value)


def test_what_is_no_matrix_cannot_be_split() -> None:
    with pytest.raises(ValueError, match=r"embed.weight cannot be split.*rule='matrix'"):
        build(rules={"embed.weight": {"split": 11}})
    optimizer = build(rules={"embed.weight": {"split": {"sizes": 2, "dim": 1}, "rule": "matrix"}})
    assert str(optimizer.plan["embed.weight"].layout) == "matrix columns 3+3"
    with pytest.raises(ValueError, match=r"attention.qkv.bias.*only matrices can"):
        build(rules={"attention.qkv.*": {"split": 3}})


# ----------------------------------------------------- options of groups and patterns


def options_of(group: dict[str, Any], **defaults: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The matrix's and the vector's options, both in one group."""
    layer = nn.Linear(4, 4)
    optimizer = build([{"params": [layer.weight, layer.bias], **group}], **defaults)
    matrix, rest = (next(g for g in optimizer.param_groups if g["rule"] == rule) for rule in (MATRIX, REST))
    return matrix, rest


@pytest.mark.parametrize(
    "key",
    [
        "lr",
        "rate",
        "weight_decay",
        "warmup_steps",
        "averaging_power",
        "averaging_warmup",
        "beta_growth",
        "beta_growth_start",
        "decay_fading",
        "rate_fall",
        "rate_fall_start",
    ],
)
def test_shared_options_reach_both_rules(key: str) -> None:
    matrix, rest = options_of({key: 2})
    assert matrix[key] == rest[key] == 2


@pytest.mark.parametrize(("key", "value"), [("betas", (0.1, 0.2)), ("eps", 0.5), ("decay_at", None)])
def test_other_options_reach_matrices_alone(key: str, value: Any) -> None:
    matrix, rest = options_of({key: value})
    plain, untouched = options_of({})
    assert matrix[key] == value != plain[key]
    assert rest[key] == untouched[key] != value


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("lr", 0.7),
        ("betas", (0.1, 0.2)),
        ("eps", 0.5),
        ("weight_decay", 0.7),
        ("decay_at", None),
        ("bias_correction", "moment"),
        ("rate", 3.0),
        ("warmup_steps", 9),
    ],
)
def test_prefixed_options_reach_the_rest_alone(key: str, value: Any) -> None:
    matrix, rest = options_of({f"adam_{key}": value})
    plain, _ = options_of({})
    assert rest[key] == value
    assert matrix.get(key) == plain.get(key) != value


def test_the_prefixed_option_wins_over_the_shared_one() -> None:
    matrix, rest = options_of({"lr": 0.1, "adam_lr": 0.2})
    assert (matrix["lr"], rest["lr"]) == (0.1, 0.2)


def test_a_group_without_matrices_takes_plain_names() -> None:
    bias = nn.Parameter(torch.zeros(3))
    optimizer = build([{"params": [bias], "betas": (0.1, 0.2), "eps": 0.5, "bias_correction": "moment"}])
    assert (option(optimizer, bias, "betas"), option(optimizer, bias, "eps")) == ((0.1, 0.2), 0.5)
    with pytest.raises(ValueError, match="no option 'momentum'"):
        build([{"params": [bias], "momentum": 0.5}])


def test_options_of_a_pattern_win_over_those_of_its_group() -> None:
    p, q = nn.Parameter(torch.randn(3, 3)), nn.Parameter(torch.randn(3, 3))
    optimizer = build([{"params": [("p", p), ("q", q)], "lr": 0.1, "rate": 2.0}], rules={"p": {"lr": 0.2}})
    assert (option(optimizer, p, "lr"), option(optimizer, q, "lr")) == (0.2, 0.1)
    assert option(optimizer, p, "rate") == option(optimizer, q, "rate") == 2.0


def test_constructor_options_of_the_rest() -> None:
    matrix, rest = options_of({}, lr=0.3, weight_decay=0.2, warmup_steps=5)
    assert (rest["lr"], rest["weight_decay"], rest["warmup_steps"], rest["betas"]) == (0.3, 0.2, 5, (0.95, 0.99))
    matrix, rest = options_of({}, lr=0.3, adam_lr=0.4, adam_weight_decay=0.0, adam_betas=(0.5, 0.6), adam_eps=1e-3)
    assert (matrix["lr"], rest["lr"], rest["weight_decay"], rest["betas"], rest["eps"]) == (
        0.3,
        0.4,
        0.0,
        (0.5, 0.6),
        1e-3,
    )
    _, rest = options_of({}, betas=(0.4, 0.95), beta_growth=0.4)
    assert rest["betas"] == (0.4, 0.99)


@pytest.mark.parametrize(
    "name", ["SFNorMuon", "SFMuon", "SFSpectralSGD", "NorMuon", "Muon", "SpectralDescent", "Shampoo"]
)
def test_a_group_holds_the_options_of_its_own_rule_alone(name: str) -> None:
    """A group that also held the matrices' options could be steered by them."""
    optimizer = getattr(anytime, name)(nn.Linear(3, 3))
    alone = (anytime.SFAdamW if optimizer.averages else anytime.AdamW)([nn.Parameter(torch.zeros(3))])
    (rest,) = [group for group in optimizer.param_groups if group["rule"] in (REST, "adamw")]
    assert rest.keys() - {"param_names"} == alone.param_groups[0].keys() - {"param_names"}


# -------------------------------------------------------------------- bad options


@pytest.mark.parametrize(
    ("name", "typo", "meant"),
    [
        ("SFNorMuon", "weigth_decay", "weight_decay"),
        ("SFNorMuon", "momentun", "momentum"),
        ("SFNorMuon", "adam_beta", "adam_betas"),
        ("SFMuon", "scalling", "scaling"),
        ("SFMuon", "weigth_decay", "weight_decay"),
        ("SFSpectralSGD", "projektion", "projection"),
        ("SFAdamW", "averaging_pwer", "averaging_power"),
        ("SFAdamW", "bias_corection", "bias_correction"),
        ("SFSGD", "warmup_step", "warmup_steps"),
        ("SFLion", "on_nonfinit", "on_nonfinite"),
        ("NorMuon", "neserov", "nesterov"),
        ("Muon", "momentm", "momentum"),
        ("AdamW", "weigth_decay", "weight_decay"),
        ("SignSGD", "rule", "rules"),
        ("Lion", "beta", "betas"),
        ("SpectralDescent", "momentum_dtyp", "momentum_dtype"),
        ("Shampoo", "beta", "betas"),
    ],
)
def test_a_typo_in_the_constructor_names_the_nearest_option(name: str, typo: str, meant: str) -> None:
    with pytest.raises(TypeError, match=f"'{typo}'.*'{meant}'"):
        getattr(anytime, name)(nn.Linear(2, 2), **{typo: 0.1})


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        ("weigth_decay", "weight_decay"),
        ("adam_lrr", "adam_lr"),
        ("momentun", "momentum"),
        ("ratte", "rate"),
        ("pollar", "polar"),
    ],
)
def test_a_typo_in_a_group_or_a_pattern_names_the_nearest_option(typo: str, meant: str) -> None:
    layer = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=f"'{typo}'; did you mean '{meant}'"):
        build([{"params": list(layer.parameters()), typo: 0.1}])
    with pytest.raises(ValueError, match=f"'{typo}'; did you mean '{meant}'"):
        build(layer, rules={"weight": {typo: 0.1}})


def label(value: object) -> str:
    """A test's name, the same in every process."""
    return getattr(value, "__name__", str(value))


def some_callable(M: Tensor) -> Tensor:
    return M


NUMBERS: list[Any] = [-1, -1e-9, float("nan"), float("inf"), "0.1", None, True, [0.1]]
UNIT: list[Any] = [*NUMBERS, 1, 1.0, 1.5]
COUNTS: list[Any] = [-1, 1.0, 1.5, "3", None, True]
FLAGS: list[Any] = ["True", None, 1, 0]
#: Option to legal and illegal values.
EXAMPLES: dict[str, tuple[list[Any], list[Any]]] = {
    "lr": ([0, 0.0, 1, 0.5, 1e9, torch.tensor(0.1), torch.tensor([0.1])], [*NUMBERS, torch.ones(2), torch.tensor(1)]),
    "rate": ([0, 0.0, 1, 2.5], [*NUMBERS, torch.tensor(0.1)]),
    "beta": ([0, 0.0, 0.9, 1, 1.0], [*NUMBERS, 1.5]),
    "betas": (
        [(0.0, 0.0), (0, 0), [0.9, 0.99]],
        [0.9, (0.9,), (0.9, 1.0), (-0.1, 0.9), (0.9, 0.9, 0.9), ("a", "b"), None],
    ),
    "vector_betas": ([(0.0, 0.0), [0.9, 0.99], None], [0.9, (0.9,), (0.9, 1.0), (-0.1, 0.9), ("a", "b")]),
    "beta2": ([0, 0.0, 0.999], UNIT),
    "momentum": ([0, 0.0, 0.999], UNIT),
    "momentum_growth": ([0, 0.0, 0.4, 2], NUMBERS),
    "momentum_growth_start": ([2, 200], [*COUNTS, 0, 1]),
    "nesterov": ([True, False], FLAGS),
    "eps": ([0, 0.0, 1e-8, 1], NUMBERS),
    "weight_decay": ([0, 0.0, 0.1, 3], NUMBERS),
    "decay_at": (["z", "y", None], ["x", "Z", 0, False]),
    "cautious": ([True, False], FLAGS),
    "warmup_steps": ([0, 1, 2000], COUNTS),
    "row_norm": ([True, False], FLAGS),
    "polar": ([*METHODS, some_callable], ["newton", None, 5, ""]),
    "polar_dtype": ([None, torch.float32, torch.bfloat16], ["float32", torch.int32, torch.complex64, float]),
    "momentum_dtype": ([None, torch.float32, torch.bfloat16], ["float32", torch.int32, torch.complex64, float]),
    "scaling": (["rms", "max-side", "aspect", None], ["RMS", 1, False]),
    "update_rms": ([0.2, 1, 1e-9], [*NUMBERS, 0, 0.0]),
    "averaging_power": ([0, 0.0, 9.5], NUMBERS),
    "averaging_warmup": ([0, 1, 200], COUNTS),
    "beta_growth": ([0, 0.0, 0.4, 2], NUMBERS),
    "beta_growth_start": ([2, 200], [*COUNTS, 0, 1]),
    "decay_fading": ([0, 1, 600], COUNTS),
    "rate_fall": ([0, 0.0, 0.4, 2], NUMBERS),
    "rate_fall_start": ([2, 200], [*COUNTS, 0, 1]),
    "beta_max": ([0, 0.965, 1], [*NUMBERS, 1.5]),
    "beta_anneal_steps": ([0, 1, 200], COUNTS),
    "polyak_beta": ([0, 0.0, 0.9], [*NUMBERS, 1, 1.0]),
    "bias_correction": (["rate", "moment", None], ["Rate", True, 0]),
    "projection": (["frobenius", "spectral", None], ["nuclear", True, 0]),
    "radius": ([None, 1, 0.5], [0, -1, float("inf"), "1"]),
}
#: An optimizer that has the option in its constructor, and what else it needs there.
OWNERS: dict[str, tuple[str, dict[str, Any]]] = {
    "beta": ("SFMuon", {}),
    "beta2": ("NorMuon", {}),
    "betas": ("SFAdamW", {}),
    "vector_betas": ("SFAdamW", {}),
    **dict.fromkeys(("lr", "warmup_steps"), ("SFMuon", {})),  # SFNorMuon has None for its recipe's
    **dict.fromkeys(("momentum", "weight_decay", "averaging_power"), ("SFMuon", {})),
    **dict.fromkeys(("momentum_growth", "momentum_growth_start", "nesterov", "cautious"), ("SFMuon", {})),
    "scaling": ("SFMuon", {}),
    "bias_correction": ("SFAdamW", {}),
    "beta_max": ("SFPlus", {}),
    "beta_anneal_steps": ("SFPlus", {}),
    "polyak_beta": ("SFPlus", {}),
    "projection": ("SFSpectralSGD", {"radius": 1.0}),
    "radius": ("SFSpectralSGD", {}),
}


def owner(key: str, value: Any, where: str) -> anytime.AnytimeOptimizer:
    name, more = OWNERS.get(key, ("SFNorMuon", {}))
    params: list[Any] = [nn.Parameter(torch.zeros(3, 3))]
    if where == "constructor" and key != "rate":
        return getattr(anytime, name)(params, **{**more, key: value})
    if where == "pattern":
        return getattr(anytime, name)([("p", params[0])], **more, rules={"p": {key: value}})
    return getattr(anytime, name)([{"params": params, key: value}], **more)


@pytest.mark.parametrize(
    ("key", "value"),
    [("graph", 1), ("graph", "yes"), ("chunk_bytes", 0), ("chunk_bytes", 1.5), ("on_nonfinite", "ignore")],
    ids=label,
)
def test_illegal_values_of_the_whole(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"SFNorMuon: {key} is {value!r}; it must be"):
        anytime.SFNorMuon(nn.Linear(3, 3), **{key: value})


@pytest.mark.parametrize("key", ["graph", "chunk_bytes", "on_nonfinite", "owners", "rules", "recipe"])
def test_an_argument_of_the_constructor_is_no_groups(key: str) -> None:
    with pytest.raises(ValueError, match=f"'{key}' is for the whole optimizer: an argument of SFNorMuon, no option of"):
        anytime.SFNorMuon([{"params": nn.Linear(3, 3), key: None}])


def test_every_option_has_examples() -> None:
    assert EXAMPLES.keys() == CHECKS.keys()


@pytest.mark.parametrize("where", ["constructor", "group", "pattern"])
@pytest.mark.parametrize(("key", "value"), [(key, v) for key, (legal, _) in EXAMPLES.items() for v in legal], ids=label)
def test_legal_values(key: str, value: Any, where: str) -> None:
    optimizer = owner(key, value, where)
    assert optimizer.param_groups[0][key] == value


@pytest.mark.parametrize("where", ["constructor", "group", "pattern"])
@pytest.mark.parametrize(("key", "value"), [(key, v) for key, (_, bad) in EXAMPLES.items() for v in bad], ids=label)
def test_illegal_values_are_named_with_the_legal_range(key: str, value: Any, where: str) -> None:
    with pytest.raises(ValueError, match=f"{key} is ") as caught:
        owner(key, value, where)
    assert repr(value) in str(caught.value)
    assert CHECKS[key][1] in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("adam_lr", -1.0),
        ("adam_betas", (0.9, 1.0)),
        ("adam_eps", -1.0),
        ("adam_weight_decay", -0.5),
        ("adam_bias_correction", "both"),
    ],
)
def test_illegal_values_of_the_rest_are_named_as_they_were_given(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{key} is ") as caught:
        build(nn.Linear(2, 2), **{key: value})
    assert repr(value) in str(caught.value)
    with pytest.raises(ValueError, match=f"{key.removeprefix('adam_')} is ") as caught:
        build([{"params": list(nn.Linear(2, 2).parameters()), key: value}])
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize("value", ["ignore", None, True])
def test_illegal_handling_of_bad_gradients(value: Any) -> None:
    with pytest.raises(ValueError, match=f"on_nonfinite is {value!r}; it must be 'skip' or 'raise'"):
        build(on_nonfinite=value)


def test_a_projection_needs_a_radius() -> None:
    params = [nn.Parameter(torch.eye(3))]
    with pytest.raises(ValueError, match="needs a radius"):
        anytime.SFSpectralSGD(params, projection="spectral")
    with pytest.raises(ValueError, match="needs a radius"):
        anytime.SFSpectralSGD([{"params": params, "projection": "spectral"}])
    with pytest.raises(ValueError, match="needs a radius"):
        anytime.SFSpectralSGD([{"params": params, "radius": None}], projection="spectral", radius=1.0)


def test_a_groups_projection_may_use_the_constructors_radius() -> None:
    p = nn.Parameter(2 * torch.eye(3))
    optimizer = anytime.SFSpectralSGD([{"params": [p], "projection": "spectral"}], radius=0.5)
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert torch.linalg.matrix_norm(optimizer.iterates(p).z, 2) <= 0.5 + 1e-5


def test_a_rate_that_is_a_tensor_belongs_to_each_group() -> None:
    rate = torch.tensor(0.5)
    layer = nn.Linear(3, 3)
    optimizer = build(layer, lr=rate)
    first, second = (group["lr"] for group in optimizer.param_groups)
    assert first is not second
    assert first is not rate
    first.mul_(2)
    assert (float(rate), float(second)) == (0.5, 0.5)


# ---------------------------------------------------------------- heads and tables by name


@pytest.mark.parametrize(
    ("names", "rest"),
    [
        (["classifier.0.weight", "classifier.3.weight", "classifier.6.weight"], {"classifier.6.weight"}),
        (["body.head.0.weight", "body.head.1.weight"], {"body.head.1.weight"}),
        (["multi_head.q.weight", "headroom.weight"], set()),
        (["score.weight", "a.weight"], {"score.weight"}),
        (
            ["emb.weight", "pos_embed", "wpe", "x.embedding.weight", "member.weight"],
            {"emb.weight", "pos_embed", "wpe", "x.embedding.weight"},
        ),
        (
            ["positions", "enc.pos", "W_pos", "rel_pos_h", "x.relative_position_bias_table", "register_tokens"],
            {"positions", "enc.pos", "W_pos", "rel_pos_h", "x.relative_position_bias_table", "register_tokens"},
        ),
        (
            ["pos_ffn.w_1.weight", "position_wise.weight", "token_mixing.0.weight", "compose", "post", "tokenwise"],
            set(),
        ),
    ],
)
def test_names_of_heads_and_tables(names: list[str], rest: set[str]) -> None:
    plan = build([(name, nn.Parameter(torch.randn(6, 5))) for name in names]).plan
    assert {name for name in names if plan[name].rule == REST} == rest


def test_a_bare_table_in_a_module_is_known_by_its_name() -> None:
    model = nn.Module()
    model.pos_embed = nn.Parameter(torch.randn(1, 9, 4))
    model.grid = nn.Module()
    model.grid.pos_embed = nn.Parameter(torch.randn(1, 4, 3, 3))
    model.patch_embed = nn.Conv2d(3, 8, 2)
    model.embed_proj = nn.Linear(4, 4)
    plan = build(model).plan
    assert plan["pos_embed"].rule == plan["grid.pos_embed"].rule == REST
    assert plan["patch_embed.weight"].rule == MATRIX
    assert plan["embed_proj.weight"].rule == MATRIX


def test_a_weight_under_two_names_is_tied() -> None:
    p = nn.Parameter(torch.randn(6, 5))
    assert build([("in.weight", p), ("out.weight", p)]).plan["out.weight"].rule == REST


def test_numbers_of_numpy_become_plain() -> None:
    optimizer = anytime.SFNorMuon([nn.Parameter(torch.randn(3, 4))], lr=np.float32(0.5), warmup_steps=np.int64(3))
    group = optimizer.param_groups[0]
    assert type(group["lr"]) is float
    assert type(group["warmup_steps"]) is int


def test_an_elementwise_optimizer_has_no_rule_for_matrices() -> None:
    with pytest.raises(ValueError, match="one rule for all"):
        anytime.SFAdamW([("w", nn.Parameter(torch.randn(3, 4)))], rules={"w": "matrix"})
