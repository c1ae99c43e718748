"""The decoder: its sizes, its first loss, what sees what, and the cache of keys and values."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import anytime
from anytime.train.config import Config, merged
from anytime.train.errors import UserError
from anytime.train.model import GPT, Cache, ModelConfig, rms_norm, rotate
from anytime.train.presets import PRESETS

TINY = ModelConfig(vocabulary=256, layers=2, width=32, head=16, context=32)
SEPARATOR = 7


def stirred(config: ModelConfig = TINY, seed: int = 0, **more) -> GPT:
    """A model none of whose weights is zero, in float64, where every way of computing agrees to many digits."""
    model = GPT(config, **more).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.empty(p.shape, dtype=torch.float64).normal_(std=0.3, generator=generator))
    return model


def some_tokens(batch: int = 2, time: int = 32, vocabulary: int = 256, seed: int = 1) -> torch.Tensor:
    return torch.randint(vocabulary, (batch, time), generator=torch.Generator().manual_seed(seed))


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


# ------------------------------------------------------------------- sizes


def preset_model(name: str) -> ModelConfig:
    return merged(Config(), PRESETS[name]).model


@pytest.mark.parametrize(
    ("name", "matrices", "embedding"), [("125M", 84_934_656, 38_633_472), ("772M", 707_788_800, 64_389_120)]
)
def test_the_papers_sizes_are_exact(name, matrices, embedding):
    config = preset_model(name)
    with torch.device("meta"):
        model = GPT(config)
    counted = {n: p.numel() for n, p in model.named_parameters()}
    assert counted.pop("embedding.weight") == embedding == config.parameters - config.matrix_parameters
    assert sum(counted.values()) == matrices == config.matrix_parameters


@pytest.mark.parametrize(("name", "size"), [("0.5M", 0.5), ("2M", 2), ("6M", 6), ("12M", 12), ("30M", 30)])
def test_small_presets_are_the_size_of_their_name(name, size):
    config = preset_model(name)
    with torch.device("meta"):
        model = GPT(config)
    assert sum(p.numel() for p in model.parameters()) == config.parameters
    assert config.parameters == pytest.approx(size * 1e6, rel=0.1)


@pytest.mark.parametrize("name", PRESETS)
def test_six_matrices_a_layer_and_the_embedding(name):
    """q, k and v apart; no biases, no weights of norms, and nothing more in the file than that."""
    config = preset_model(name)
    with torch.device("meta"):
        model = GPT(config)
    w, h = config.width, config.hidden
    layer = {"q": (w, w), "k": (w, w), "v": (w, w), "o": (w, w), "up": (h, w), "down": (w, h)}
    wanted = {f"blocks.{i}.{part}.weight": shape for i in range(config.layers) for part, shape in layer.items()}
    wanted["embedding.weight"] = (config.vocabulary, w)
    assert {n: tuple(p.shape) for n, p in model.named_parameters()} == wanted
    assert {n: tuple(t.shape) for n, t in model.state_dict().items()} == wanted


def test_the_mlp_may_have_another_width():
    config = replace(TINY, mlp=48)
    assert config.hidden == 48
    assert replace(TINY, mlp=0).hidden == 128
    assert sum(p.numel() for p in GPT(config).parameters()) == config.parameters == 256 * 32 + 2 * (4 * 32**2 + 96 * 32)


def test_flops_of_a_token():
    """6 N and 12 · layers · width · context."""
    assert preset_model("125M").flops_per_token == 6 * 123_568_128 + 12 * 12 * 768 * 1024


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"vocabulary": 0}, "model.vocabulary is 0"),
        ({"layers": 0}, "model.layers is 0"),
        ({"width": -32}, "model.width is -32"),
        ({"head": 0}, "model.head is 0"),
        ({"context": 0}, "model.context is 0"),
        ({"mlp": -1}, "model.mlp is -1"),
        ({"head": 12}, "model.head is 12, must be even and divide model.width, which is 32"),
        ({"width": 9, "head": 3}, "model.head is 3, must be even"),
        ({"head": 64}, "model.head is 64"),
        ({"rope_base": 1.0}, "model.rope_base is 1.0"),
    ],
)
def test_sizes_that_cannot_be(values, words):
    with pytest.raises(UserError, match=words):
        replace(TINY, **values)


def test_routing_sends_the_matrices_to_normuon_and_the_embedding_to_adam():
    optimizer = anytime.SFNorMuon(GPT(TINY))
    rules = {entry.name: entry.rule for entry in optimizer.plan.entries}
    assert len(rules) == 6 * TINY.layers + 1
    assert rules.pop("embedding.weight") == "sf-adamw"
    assert set(rules.values()) == {"normuon"}


# ---------------------------------------------------------- initialization


@pytest.mark.parametrize(
    ("config", "time"),
    [
        (TINY, 32),
        (replace(TINY, width=64, head=32, layers=1, vocabulary=4096), 32),
        (ModelConfig(vocabulary=256, layers=1, width=768, head=128, context=32), 32),
        (ModelConfig(vocabulary=50304, layers=1, width=768, head=128, context=16), 16),
    ],
    ids=["tiny", "64", "768", "50304"],
)
def test_the_first_loss_is_the_logarithm_of_the_vocabulary(config, time):
    model = GPT(config)
    model.initialize(0)
    wanted = math.log(config.vocabulary)
    random = some_tokens(4, time + 1, config.vocabulary)
    phrase = torch.tensor([[11, 5, 5, 42, 9]]).repeat(2, time)[:, : time + 1]
    same = torch.full((1, time + 1), 3)
    with torch.no_grad():
        assert float(model(random[:, :-1], random[:, 1:])) == pytest.approx(wanted, abs=0.1)
        assert float(model(phrase[:, :-1], phrase[:, 1:])) == pytest.approx(wanted, abs=0.1)
        # A token's logit for itself is 1/4: as far as it can go, where a text is one token again and again.
        assert float(model(same[:, :-1], same[:, 1:])) == pytest.approx(wanted - 0.25, abs=0.1)


def test_blocks_begin_as_the_identity():
    model = GPT(TINY)
    model.initialize(0)
    x = torch.randn(1, 8, 32)
    assert torch.equal(model.blocks[0](x, model.cos[:8], model.sin[:8]), x)


def test_initialization_depends_on_the_seed_alone():
    def weights(seed: int, noise: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(noise)
        model = GPT(TINY)
        torch.rand(noise)
        model.initialize(seed)
        return {n: p.detach().clone() for n, p in model.named_parameters()}

    a, b, other = weights(3, 1), weights(3, 2), weights(4, 1)
    for name in a:
        assert torch.equal(a[name], b[name])
        assert torch.equal(a[name], other[name]) == name.endswith(("o.weight", "down.weight"))
    assert not torch.equal(a["blocks.0.q.weight"], a["blocks.1.q.weight"])
    assert not torch.equal(a["blocks.0.q.weight"], a["blocks.0.k.weight"])


def test_initialization_does_not_draw_from_the_global_generator():
    model = GPT(TINY)
    torch.manual_seed(5)
    model.initialize(0)
    after = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(after, torch.rand(1))


def test_initial_scales():
    model = GPT(replace(TINY, width=64, vocabulary=4096))
    model.initialize(0)
    assert float(model.embedding.weight.detach().std()) == pytest.approx(0.25 / 64, rel=0.02)
    assert float(model.blocks[0].up.weight.detach().std()) == pytest.approx(64**-0.5, rel=0.05)
    assert float(model.blocks[1].q.weight.detach().std()) == pytest.approx(64**-0.5, rel=0.05)


# ------------------------------------------------------------- the forward


def test_forward_by_hand():
    """The whole decoder written out, one head after another."""
    config = replace(TINY, mlp=40, rope_base=100.0)
    model, tokens = stirred(config), some_tokens(1, 9)
    w = dict(model.named_parameters())
    x = w["embedding.weight"][tokens[0]]
    x = x / x.square().mean(-1, keepdim=True).sqrt()

    def norm(t):
        return t / t.square().mean(-1, keepdim=True).sqrt()

    def turned(t):
        out = t.clone()
        for position in range(len(t)):
            for j in range(8):
                angle = position * 100.0 ** (-j / 8)
                a, b = t[position, j], t[position, j + 8]
                out[position, j] = a * math.cos(angle) - b * math.sin(angle)
                out[position, j + 8] = a * math.sin(angle) + b * math.cos(angle)
        return out

    for i in range(config.layers):
        h = norm(x)
        q, k, v = (h @ w[f"blocks.{i}.{n}.weight"].T for n in "qkv")
        heads = []
        for cut in (slice(0, 16), slice(16, 32)):
            scores = turned(norm(q[:, cut])) @ turned(norm(k[:, cut])).T / math.sqrt(16)
            scores = scores.masked_fill(torch.ones(9, 9).triu(1).bool(), -math.inf)
            heads.append(scores.softmax(-1) @ v[:, cut])
        x = x + torch.cat(heads, -1) @ w[f"blocks.{i}.o.weight"].T
        x = x + (norm(x) @ w[f"blocks.{i}.up.weight"].T).relu().square() @ w[f"blocks.{i}.down.weight"].T
    logits = norm(x) @ w["embedding.weight"].T
    torch.testing.assert_close(model(tokens)[0], logits, rtol=1e-5, atol=1e-5)  # cos and sin are float32


def test_the_loss_is_the_mean_cross_entropy():
    model, tokens = stirred().requires_grad_(False), some_tokens(3, 17)
    logits = model(tokens[:, :-1])
    by_hand = [-logits[b, t].log_softmax(-1)[tokens[b, t + 1]] for b in range(3) for t in range(16)]
    assert float(model(tokens[:, :-1], tokens[:, 1:])) == pytest.approx(float(sum(by_hand) / len(by_hand)), rel=1e-6)


def test_a_later_token_changes_no_earlier_logit():
    model, tokens = stirred(), some_tokens(1, 20)
    before = model(tokens)
    tokens = tokens.clone()
    tokens[0, 12] = (tokens[0, 12] + 1) % 256
    after = model(tokens)
    close(after[:, :12], before[:, :12])
    assert bool((after[:, 12:] - before[:, 12:]).abs().amax(-1).gt(1e-6).all())


def test_more_than_the_context_is_refused():
    with pytest.raises(UserError, match="33 tokens are more than the model's context of 32"):
        GPT(TINY)(some_tokens(1, 33))
    model = GPT(TINY)
    cache = Cache(model, 1)
    model(some_tokens(1, 30), cache=cache)
    with pytest.raises(UserError, match="33 tokens"):
        model(some_tokens(1, 3), cache=cache)


def test_scores_depend_on_the_distance_alone():
    """q at i + s against k at j + s, for every shift s."""
    model = stirred()
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 16, dtype=torch.float64, generator=generator) for _ in range(2))
    cos, sin = model.cos.double(), model.sin.double()

    def score(i: int, j: int) -> float:
        return float((rotate(q, cos[[i]], sin[[i]]) * rotate(k, cos[[j]], sin[[j]])).sum())

    for distance in (0, 1, 5):
        scores = [score(s + distance, s) for s in range(32 - distance)]
        assert max(scores) - min(scores) < 1e-5
    assert abs(score(5, 0) - score(0, 0)) > 1e-2
    assert abs(score(5, 0) - score(0, 5)) > 1e-2  # and on its sign


def test_a_text_says_the_same_wherever_it_stands():
    """Behind a separator, so that only the place of the document differs."""
    model = stirred(separator=SEPARATOR)
    document = some_tokens(1, 10, seed=4).masked_fill_(some_tokens(1, 10, seed=4) == SEPARATOR, 8)
    alone = model(document)
    for shift in (1, 9, 21):
        front = torch.full((1, shift), 30)
        front[0, -1] = SEPARATOR
        torch.testing.assert_close(model(torch.cat((front, document), 1))[:, shift:], alone, rtol=1e-5, atol=1e-5)


def test_rms_norm_survives_the_smallest_embeddings():
    """Its epsilon is small beside an embedding at initialization, at every width there is."""
    x = torch.randn(4, 1280) * 0.25 / 1280
    torch.testing.assert_close(rms_norm(x), x / x.square().mean(-1, keepdim=True).sqrt(), rtol=1e-4, atol=0)


# --------------------------------------------------------------- documents


def pieces(rows: torch.Tensor) -> list[tuple[int, int, int]]:
    """(row, begin, end) of every document; a separator belongs to the one it ends."""
    found = []
    for b, row in enumerate(rows.tolist()):
        begin = 0
        for i, token in enumerate(row):
            if token == SEPARATOR or i == len(row) - 1:
                found.append((b, begin, i + 1))
                begin = i + 1
    return found


def with_documents() -> torch.Tensor:
    rows = some_tokens(3, 24, seed=8).masked_fill_(some_tokens(3, 24, seed=8) == SEPARATOR, 8)
    rows[0, [0, 5, 6, 23]] = SEPARATOR
    rows[1, 11] = SEPARATOR
    return rows


def test_attention_stays_within_documents():
    model, rows = stirred(separator=SEPARATOR), with_documents()
    logits = model(rows)
    assert len(pieces(rows)) == 7
    for b, begin, end in pieces(rows):
        alone = model(rows[b : b + 1, begin:end])
        torch.testing.assert_close(logits[b : b + 1, begin:end], alone, rtol=1e-5, atol=1e-5)
    plain = stirred()(rows)
    assert not torch.allclose(plain[1, 12:], logits[1, 12:])
    close(plain[2], logits[2])  # no separator in it


def test_a_mask_without_documents_is_the_causal_one():
    """The dense mask against SDPA's own causal path."""
    model, masked = stirred(), stirred(separator=999)
    tokens = some_tokens(2, 32)
    assert model.mask(tokens, None) is None
    assert torch.equal(masked.mask(tokens, None)[1, 0], torch.ones(32, 32).tril().bool())
    close(masked(tokens), model(tokens))


# ------------------------------------------------------------------- cache


@pytest.mark.parametrize("chunks", [[32], [1] * 32, [20, 12], [5, 1, 1, 20, 5], [31, 1]], ids=str)
@pytest.mark.parametrize("separator", [None, SEPARATOR])
def test_the_cache_changes_nothing(chunks, separator):
    model = stirred(separator=separator)
    tokens = some_tokens(3, 32, seed=5)
    tokens[0, [3, 19, 20]] = SEPARATOR
    tokens[2, 0] = SEPARATOR
    cache = Cache(model, 3)
    found = torch.cat([model(part, cache=cache) for part in tokens.split(chunks, dim=1)], dim=1)
    close(found, model(tokens))
    assert cache.length == 32
    assert torch.equal(cache.tokens, tokens)


def test_the_cache_in_bfloat16():
    model = stirred(seed=2).float()
    tokens = some_tokens(2, 24)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        cache = Cache(model, 2)
        found = torch.cat([model(part, cache=cache) for part in tokens.split([10, 1, 13], dim=1)], dim=1)
        assert {store.dtype for store in cache.store.values()} == {torch.bfloat16}
        whole = model(tokens)
    exact = model(tokens).detach()
    assert whole.dtype == torch.bfloat16
    scale = float(exact.std())
    assert float((found - whole).abs().max()) < 0.2 * scale
    assert float((whole - exact).abs().max()) < 0.2 * scale


def test_activations_are_in_bfloat16_where_asked():
    """What blocks hand on and keep for the backward pass, too: half the memory."""
    model = stirred().float()
    seen = []
    model.blocks[1].register_forward_hook(lambda _, inputs, out: seen.append((inputs[0].dtype, out.dtype)))
    model(some_tokens(1, 4))
    with torch.autocast("cpu", torch.bfloat16):
        model(some_tokens(1, 4))
    assert seen == [(torch.float32,) * 2, (torch.bfloat16,) * 2]


# --------------------------------------------------- other ways of computing


def test_recomputed_activations_give_the_same_gradients():
    tokens = some_tokens(2, 17)
    gradients = []
    for recompute in (False, True):
        model = stirred(recompute=recompute, separator=SEPARATOR)
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        gradients.append({n: p.grad for n, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert gradient.abs().max() > 0
        close(gradients[1][name], gradient)


def test_recomputation_keeps_less():
    def kept(recompute: bool) -> int:
        sizes: list[int] = []

        def pack(t):
            sizes.append(t.numel())
            return t

        model = stirred(recompute=recompute)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            model(some_tokens(2, 16), some_tokens(2, 16))
        return sum(sizes)

    assert kept(True) < kept(False)


def test_recomputation_and_the_cache():
    """Outside of no_grad too: the cache must be filled."""
    model = stirred(recompute=True)
    tokens = some_tokens(1, 12)
    cache = Cache(model, 1)
    found = torch.cat([model(part, cache=cache) for part in tokens.split([5, 7], dim=1)], dim=1)
    close(found, stirred()(tokens))


@pytest.mark.slow
def test_compiled_training_is_eager_training_but_for_rounding():
    losses = {}
    for compiled in (False, True):
        model = GPT(replace(TINY, layers=1))
        model.initialize(0)
        optimizer = anytime.SFNorMuon(model, lr=0.02, warmup_steps=2)
        call = torch.compile(model, dynamic=False) if compiled else model
        losses[compiled] = []
        for step in range(6):
            tokens = some_tokens(2, 33, seed=step % 2)
            loss = call(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[compiled].append(float(loss.detach()))
    assert losses[False][-1] < losses[False][0] - 0.1
    assert losses[True] == pytest.approx(losses[False], abs=2e-3)


# ---------------------------------------------------------------- generate


def greedy(model: GPT, tokens: torch.Tensor, count: int) -> torch.Tensor:
    for _ in range(count):
        tokens = torch.cat((tokens, model(tokens)[:, -1].argmax(-1, keepdim=True)), dim=1)
    return tokens


@pytest.mark.parametrize("separator", [None, SEPARATOR])
@pytest.mark.parametrize("prompt", [1, 9])
def test_temperature_0_takes_the_likeliest(prompt, separator):
    model = stirred(separator=separator)
    tokens = some_tokens(3, prompt)
    found = model.generate(tokens, 20, temperature=0)
    assert torch.equal(found[:, :prompt], tokens)
    assert torch.equal(found, greedy(model, tokens, 20))
    assert len(set(found[:, prompt:].flatten().tolist())) > 3  # they are not all the same


def test_top_1_is_the_likeliest_at_any_temperature():
    model, tokens = stirred(), some_tokens(2, 4)
    assert torch.equal(model.generate(tokens, 9, temperature=5.0, top_k=1), model.generate(tokens, 9, temperature=0))


@pytest.fixture(scope="module")
def small() -> GPT:
    return stirred(ModelConfig(vocabulary=11, layers=1, width=32, head=16, context=8), seed=3)


def next_logits(model: GPT) -> torch.Tensor:
    return model(some_tokens(1, 3) % 11)[0, -1]


def test_a_tiny_temperature_takes_the_likeliest_too(small):
    tokens = torch.zeros(3, 4, dtype=torch.long)
    drawn = small.generate(tokens, 5, temperature=1e-40)
    assert torch.equal(drawn, small.generate(tokens, 5, temperature=0))


@pytest.mark.parametrize("temperature", [-1.0, math.nan, math.inf])
def test_temperatures_that_are_none(small, temperature):
    with pytest.raises(UserError, match="temperature is"):
        small.generate(torch.zeros(1, 4, dtype=torch.long), 1, temperature=temperature)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_draws_follow_the_tempered_distribution(small, temperature):
    tokens = (some_tokens(1, 3) % 11).repeat(4000, 1)
    found = small.generate(tokens, 1, temperature=temperature, generator=torch.Generator().manual_seed(0))[:, -1]
    wanted = (next_logits(small) / temperature).softmax(-1)
    shares = torch.bincount(found, minlength=11) / 4000
    assert float((shares - wanted).abs().max()) < 0.03  # 4 standard deviations


def test_top_k_and_limit_bound_what_is_drawn(small):
    tokens = (some_tokens(1, 3) % 11).repeat(2000, 1)

    def drawn(**more) -> set[int]:
        generator = torch.Generator().manual_seed(0)
        return set(small.generate(tokens, 1, temperature=10.0, generator=generator, **more)[:, -1].tolist())

    logits = next_logits(small)
    assert drawn() == set(range(11))
    assert drawn(top_k=3) == set(logits.topk(3).indices.tolist())
    assert drawn(limit=5) == set(range(5))
    assert drawn(limit=5, top_k=2) == set(logits[:5].topk(2).indices.tolist())
    assert drawn(limit=5, top_k=9) == set(range(5))


def test_limit_bounds_the_likeliest_too(small):
    tokens = some_tokens(8, 3) % 11
    assert small.generate(tokens, 5, temperature=0, limit=2)[:, 3:].max() < 2


def test_a_seed_gives_the_same_draws():
    model, tokens = stirred(), some_tokens(2, 4)

    def drawn(seed: int, noise: int = 0) -> torch.Tensor:
        torch.manual_seed(noise)  # the global generator has no part in it
        return model.generate(tokens, 12, temperature=2.0, generator=torch.Generator().manual_seed(seed))

    assert torch.equal(drawn(1), drawn(1, noise=5))
    assert not torch.equal(drawn(1), drawn(2))


def test_generation_goes_on_beyond_the_context():
    """When the context of 8 is full its later half is read again."""
    model = stirred(replace(TINY, context=8))
    tokens = some_tokens(1, 3)
    found = model.generate(tokens, 20, temperature=0)
    assert found.shape == (1, 23)
    by_hand, held = tokens, tokens
    for _ in range(20):
        if held.shape[1] > 8:
            held = by_hand[:, -4:]
        new = model(held)[:, -1].argmax(-1, keepdim=True)
        by_hand, held = torch.cat((by_hand, new), 1), torch.cat((held, new), 1)
    assert torch.equal(found, by_hand)


def test_a_prompt_longer_than_the_context_keeps_its_end():
    model = stirred(replace(TINY, context=8))
    tokens = some_tokens(2, 30)
    found = model.generate(tokens, 1, temperature=0)
    assert torch.equal(found[:, :30], tokens)
    assert torch.equal(found[:, 30:], model(tokens[:, -8:])[:, -1].argmax(-1, keepdim=True))


def test_a_context_of_one_token_generates():
    model = stirred(replace(TINY, context=1))
    tokens = some_tokens(1, 1)
    found = model.generate(tokens, 4, temperature=0)
    for i in range(4):
        assert int(found[0, i + 1]) == int(model(torch.tensor([[int(found[0, i])]]))[0, -1].argmax())


@pytest.mark.parametrize("recompute", [False, True])
def test_generation_in_bfloat16_with_recomputation(recompute):
    model = stirred(recompute=recompute).float()
    with torch.autocast("cpu", torch.bfloat16):
        found = model.generate(some_tokens(2, 4), 6, temperature=0)
    assert found.shape == (2, 10)
    assert found.max() < 256


@pytest.mark.parametrize(
    ("more", "words"),
    [({"temperature": -0.1}, "temperature is -0.1"), ({"top_k": 0}, "top_k is 0"), ({"top_k": -3}, "top_k is -3")],
)
def test_settings_of_generation_that_cannot_be(more, words):
    with pytest.raises(UserError, match=words):
        GPT(TINY).generate(some_tokens(1, 2), 1, **more)


def test_an_empty_prompt_is_refused():
    with pytest.raises(UserError, match="prompt is empty"):
        GPT(TINY).generate(torch.empty((1, 0), dtype=torch.int64), 1)


def test_gradients_reach_every_weight():
    model = stirred()
    F.mse_loss(model(some_tokens(2, 8)), torch.zeros(2, 8, 256, dtype=torch.float64)).backward()
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        assert p.grad.abs().max() > 0, name
