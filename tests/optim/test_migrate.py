"""Checkpoints of AdamW, Muon and schedulefree as a start."""

import pytest
import schedulefree
import torch
from torch import Tensor, nn

import anytime


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def backward(model: nn.Module, step: int) -> None:
    x = torch.randn(16, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    model.zero_grad()
    (model(x) - x[:, :4].sin()).square().mean().backward()


def run(model: nn.Module, optimizer: torch.optim.Optimizer, start: int, stop: int) -> None:
    for step in range(start, stop):
        backward(model, step)
        optimizer.step()


def near(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).norm() <= 1e-10 * b.norm())


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("named", [True, False])
def test_schedulefree_adamw_goes_on_where_it_was(mode, named):
    settings = {"lr": 0.01, "betas": (0.9, 0.98), "weight_decay": 0.1, "warmup_steps": 10}
    theirs, ours = network(), network()
    sf = schedulefree.AdamWScheduleFree(theirs.named_parameters() if named else theirs.parameters(), **settings)
    sf.train()
    run(theirs, sf, 0, 25)
    if mode == "eval":
        sf.eval()
    ours.load_state_dict(theirs.state_dict())
    optimizer = anytime.SFAdamW(ours, bias_correction="moment", **settings)
    anytime.start_from(optimizer, sf.state_dict())
    sf.train()
    run(theirs, sf, 25, 50)
    run(ours, optimizer, 25, 50)
    assert all(near(p, q) for p, q in zip(ours.parameters(), theirs.parameters(), strict=True))
    sf.eval()
    with optimizer.averaged():
        assert all(near(p, q) for p, q in zip(ours.parameters(), theirs.parameters(), strict=True))


def test_schedulefree_sgd_goes_on_where_it_was():
    theirs, ours = network(), network()
    sf = schedulefree.SGDScheduleFree(theirs.parameters(), lr=0.1, momentum=0.8)
    sf.train()
    run(theirs, sf, 0, 12)
    ours.load_state_dict(theirs.state_dict())
    optimizer = anytime.SFSGD(ours, lr=0.1, beta=0.8)
    anytime.start_from(optimizer, sf.state_dict())
    run(theirs, sf, 12, 30)
    run(ours, optimizer, 12, 30)
    assert all(near(p, q) for p, q in zip(ours.parameters(), theirs.parameters(), strict=True))


def test_adamw_goes_on_as_adamw():
    theirs, ours = network(), network()
    torch_adamw = torch.optim.AdamW(theirs.parameters(), lr=0.01, betas=(0.8, 0.9))
    run(theirs, torch_adamw, 0, 10)
    ours.load_state_dict(theirs.state_dict())
    optimizer = anytime.AdamW(ours, lr=0.01, betas=(0.8, 0.9), weight_decay=0.01)
    anytime.start_from(optimizer, torch_adamw.state_dict())
    run(theirs, torch_adamw, 10, 20)
    run(ours, optimizer, 10, 20)
    assert all(near(p, q) for p, q in zip(ours.parameters(), theirs.parameters(), strict=True))


def test_adamw_to_sf_normuon_keeps_moments_and_time_and_starts_the_average_at_the_weights():
    model = network()
    adamw = torch.optim.AdamW(model.parameters(), lr=0.01)
    run(model, adamw, 0, 10)
    optimizer = anytime.SFNorMuon(model, lr=0.01, warmup_steps=5)
    anytime.start_from(optimizer, adamw.state_dict())
    weight, bias = model[0].weight, model[0].bias
    assert torch.equal(optimizer.state[weight]["momentum"], adamw.state[weight]["exp_avg"])
    assert torch.equal(optimizer.state[bias]["second_moment"], adamw.state[bias]["exp_avg_sq"])
    assert optimizer.state[weight]["step"] == 10
    before = optimizer.iterates(weight)
    assert torch.equal(before.x, before.z)
    run(model, optimizer, 10, 11)
    after = optimizer.iterates(weight)
    assert near(
        (after.z - before.z * (1 - 0.01 * 0.05)).square().mean().sqrt(), torch.tensor(0.2 * 0.01, dtype=torch.float64)
    )


def test_muon_and_adamw_side_by_side():
    model = network()
    matrices = [model[0].weight, model[2].weight]
    rest = [model[0].bias, model[2].bias]
    muon, adamw = torch.optim.Muon(matrices), torch.optim.AdamW(rest)
    for step in range(6):
        backward(model, step)
        muon.step()
        adamw.step()
    calls = [
        lambda optimizer: anytime.start_from(optimizer, muon.state_dict(), params=matrices, step=6),
        lambda optimizer: anytime.start_from(optimizer, adamw.state_dict(), params=rest),
    ]
    for order in (calls, calls[::-1]):
        optimizer = anytime.SFNorMuon(model, warmup_steps=3)
        for call in order:
            call(optimizer)
        assert torch.equal(optimizer.state[matrices[1]]["momentum"], muon.state[matrices[1]]["momentum_buffer"])
        assert torch.equal(optimizer.state[rest[0]]["second_moment"], adamw.state[rest[0]]["exp_avg_sq"])
        assert all(state["step"] == 6 for state in optimizer.state.values())
    with pytest.raises(ValueError, match="taken steps already"):
        calls[0](optimizer)


def test_schedulefree_to_an_optimizer_without_an_average_starts_at_x():
    theirs, ours = network(), network()
    sf = schedulefree.AdamWScheduleFree(theirs.parameters(), lr=0.01, warmup_steps=3)
    sf.train()
    run(theirs, sf, 0, 12)
    for mode in ("train", "eval"):
        getattr(sf, mode)()
        ours.load_state_dict(theirs.state_dict())
        anytime.start_from(anytime.NorMuon(ours), sf.state_dict())
        sf.eval()
        assert all(near(p, q) for p, q in zip(ours.parameters(), theirs.parameters(), strict=True))
        sf.train()


def test_what_cannot_be_told_apart_is_refused():
    model = network()
    grouped = torch.optim.AdamW([{"params": [model[2].weight]}, {"params": [model[0].weight]}])
    backward(model, 0)
    grouped.step()
    matrices = [("weight", model[0].weight), ("weight2", model[2].weight)]
    with pytest.raises(ValueError, match="2 groups and no names"):
        anytime.start_from(anytime.SFNorMuon(matrices), grouped.state_dict())
    twins = nn.Linear(3, 3).double(), nn.Linear(3, 3).double()
    groups = [{"params": list(twin.named_parameters())} for twin in twins]  # both have a "weight"
    adamw = torch.optim.AdamW(groups)
    (twins[0](torch.ones(1, 3).double()) + twins[1](torch.ones(1, 3).double())).sum().backward()
    adamw.step()
    with pytest.raises(ValueError, match="no names"):
        anytime.start_from(anytime.SFNorMuon([{"params": twin.parameters()} for twin in twins]), adamw.state_dict())


def test_wrong_calls_are_refused():
    model = network()
    adamw, muon = torch.optim.AdamW(model.parameters()), torch.optim.Muon([model[0].weight])
    backward(model, 0)
    adamw.step()
    muon.step()
    optimizer = anytime.SFNorMuon(model)
    with pytest.raises(ValueError, match="this state is one of ours"):
        anytime.start_from(optimizer, optimizer.state_dict())
    with pytest.raises(ValueError, match="no parameter of this optimizer"):
        anytime.start_from(optimizer, adamw.state_dict(), params=list(network().parameters()))
    with pytest.raises(ValueError, match="step is -5"):
        anytime.start_from(optimizer, adamw.state_dict(), step=-5)
    with pytest.raises(ValueError, match="no momentum here"):
        anytime.start_from(anytime.SFAdamW(model), muon.state_dict(), params=[model[0].weight])


def test_a_compiled_models_names_are_plain():
    model = network()
    adamw = torch.optim.AdamW([(f"_orig_mod.{name}", p) for name, p in model.named_parameters()])
    backward(model, 0)
    adamw.step()
    optimizer = anytime.SFNorMuon(model)
    anytime.start_from(optimizer, adamw.state_dict())
    assert all(state["step"] == 1 for state in optimizer.state.values())


def test_a_state_that_does_not_fit_is_refused_and_nothing_changes():
    model = network()
    other = nn.Linear(3, 3).double()
    adamw = torch.optim.AdamW(other.parameters())
    other(torch.randn(2, 3).double()).sum().backward()
    adamw.step()
    optimizer = anytime.SFNorMuon(model)
    with pytest.raises(ValueError, match="2 parameters, here are 4"):
        anytime.start_from(optimizer, adamw.state_dict())
    with pytest.raises(ValueError, match=r"is \(8, 6\) here"):
        anytime.start_from(optimizer, adamw.state_dict(), params=[model[0].weight, model[0].bias])
    sgd = torch.optim.RMSprop(model.parameters())
    backward(model, 0)
    sgd.step()
    with pytest.raises(ValueError, match="no kind known here"):
        anytime.start_from(optimizer, sgd.state_dict())
    with pytest.raises(ValueError, match="before the first step"):
        anytime.start_from(optimizer, torch.optim.AdamW(model.parameters()).state_dict())
    with pytest.raises(ValueError, match="no state of a torch optimizer"):
        anytime.start_from(optimizer, model.state_dict())
    assert all(not value.any() for state in optimizer.state.values() for value in state.values())


@pytest.mark.parametrize("polyak_beta", [0.0, 0.9, 0.99])
def test_the_running_norm_of_schedulefree_plus_begins_where_it_would_stand(polyak_beta):
    """Gradients of one size throughout: the first rate is F / ‖g‖ as it was for AdamW's gradients."""
    torch.manual_seed(0)
    p = nn.Parameter(torch.zeros(40, 50))
    theirs = torch.optim.AdamW([p], lr=1e-9, betas=(0.9, 0.9))
    for _ in range(60):
        p.grad = torch.randn(40, 50)
        theirs.step()
    ours = anytime.SFPlus([p], polyak_beta=polyak_beta)
    anytime.start_from(ours, theirs.state_dict())
    p.grad = torch.randn(40, 50)
    ours.step(lambda: 3.0)
    assert float(ours.state[p]["polyak"]) == pytest.approx(3 / 2000, rel=0.05)
