"""What a step does to lists of tensors: how they are cut into chunks, and what of a skipped step is taken."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from anytime.optim.moves import all_finite, chunks, where_ok


@given(sizes=st.lists(st.integers(0, 9), min_size=1, max_size=12), size=st.integers(1, 20))
def test_chunks_are_all_in_order_and_no_larger_than_they_must_be(sizes, size):
    params = [torch.empty(n) for n in sizes]
    cut = [params[some] for some in chunks(params, size)]
    assert [id(p) for chunk in cut for p in chunk] == [id(p) for p in params]
    for chunk in cut:
        assert sum(p.numel() for p in chunk) <= size or sum(p.numel() > 0 for p in chunk) == 1
    for chunk, following in itertools.pairwise(cut):
        assert sum(p.numel() for p in chunk) + following[0].numel() > size


@given(dtype=st.sampled_from([torch.float32, torch.float64]), ok=st.sampled_from([0.0, 1.0]))
def test_nothing_is_taken_of_a_step_that_does_not_count(dtype, ok):
    grads = [torch.tensor(values, dtype=dtype) for values in ([1.5, -0.0, 1e30], [float("nan"), float("inf")], 2.0)]
    taken = where_ok(grads, torch.tensor(ok, dtype=torch.float64))
    wanted = grads if ok else [torch.zeros_like(grad) for grad in grads]
    for new, old in zip(taken, wanted, strict=True):
        assert new.dtype == dtype
        assert torch.equal(new.view(torch.uint8) if new.ndim else new, old.view(torch.uint8) if new.ndim else old)


@given(
    dtypes=st.lists(st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]), min_size=1),
    bad=st.sampled_from([0.0, float("inf"), float("-inf"), float("nan")]),
    data=st.data(),
)
def test_one_that_is_not_finite_is_found_among_gradients_of_any_precision(dtypes, bad, data):
    grads = [torch.full((3,), 6e4, dtype=dtype) for dtype in dtypes] + [torch.empty(0)]
    grads[data.draw(st.integers(0, len(dtypes) - 1))][data.draw(st.integers(0, 2))] = bad
    assert bool(all_finite(grads)) == (bad == 0)
