"""Mistakes of one process are errors of all, in the same words, and the group of processes stays of use."""

from __future__ import annotations

import re

import pytest
import tasks

SOON = 30  # seconds: a hang, not patience
MODES = ("factor", "state", "gradient")

#: What is wrong with process 1, and the words for it.
DIFFERENT = {
    "count": r"process 0 has 3 of them, process 1 4",
    "shape": r"process 0 has a of shape \(4, 6\).*process 1 has a of shape \(4, 8\)",
    "dtype": r"process 0 has b of shape \(3, 4\), torch\.float64.*process 1 has b of shape \(3, 4\), torch\.float32",
    "order": r"process 0 has a of shape.*process 1 has plain of shape",
    "rule": r"process 0 has a of shape \(4, 6\).*rule normuon.*process 1 has a of shape.*rule sf-adamw",
    "placements": r"process 0 has b of shape.*Shard\(dim=0\).*process 1 has b of shape.*Shard\(dim=1\)",
    "missing gradient": r"process 0 has b of shape.*with a gradient; process 1 has b of shape.*without a gradient",
    "missing everywhere but here": r"process 0 has a of shape.*with a gradient; process 1 has a .* without a gradient",
    "sparse gradient": r"process 1: SFNorMuon takes dense gradients.*shape \(3, 4\).*sparse",
    "complex gradient": r"process 1: SFNorMuon takes real gradients.*complex",
}
EACH = [(kind, mode) for kind in DIFFERENT for mode in (None, *MODES) if mode is None or kind != "placements"]


@pytest.mark.parametrize(("kind", "mode"), EACH)
def test_one_process_is_different(pools, kind, mode):
    for fine, found in pools(2).try_(tasks.mistake, kind, mode, timeout=SOON):
        assert fine, found
        error, said, mended = found
        assert error == "RuntimeError"
        assert re.search(DIFFERENT[kind], said), said
        assert mended


@pytest.mark.parametrize("mode", [None, *MODES])
def test_the_same_mistake_everywhere(pools, mode):
    for fine, found in pools(2).try_(tasks.mistake, "sparse everywhere", mode, timeout=SOON):
        assert fine, found
        error, said, mended = found
        assert error == "RuntimeError"
        assert "dense gradients" in said
        assert mended


def test_the_one_of_four(pools):
    for fine, found in pools(4).try_(tasks.mistake_of, 2, timeout=SOON):
        assert fine, found
        assert re.search(r"process 0 has a .* with a gradient; process 2 has a .* without a gradient", found)


def test_a_plain_gradient_of_a_sharded_parameter(pools):
    for fine, found in pools(2).try_(tasks.mistake, "plain gradient", None, timeout=8):
        assert fine, found
        error, said, mended = found
        assert error == "RuntimeError"
        assert "plain tensor" in said
        assert mended


def test_a_sparse_gradient_of_a_matrix_that_another_owns(pools):
    for fine, found in pools(2).try_(tasks.mistake, "sparse gradient of another's", "gradient", timeout=8):
        assert fine, found
        error, said, mended = found
        assert error == "RuntimeError"
        assert re.search(r"process 1: SFNorMuon takes dense gradients.*shape \(4, 6\)", said)
        assert mended


def test_owners_of_shards(pools):
    for mode in MODES:
        for error, said in pools(2)(tasks.owners_of_shards, mode):
            assert error == "ValueError"
            assert "owners is for parameters that are whole on every process; these are sharded" in said


def test_owners_of_shards_that_come_later(pools):
    for error, said, fine in pools(2)(tasks.owners_of_late_shards):
        assert error == "ValueError"
        assert "sharded" in said
        assert fine


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_flattened_parameters(pools, use_orig_params):
    for fine, found in pools(2).try_(tasks.flattened, use_orig_params, timeout=SOON):
        assert fine, found
        error, said = found
        assert error == "ValueError"
        assert "FSDP1" in said
        assert "fully_shard" in said


def test_unnamed_parameters_are_numbered_as_they_were_given(pools):
    for said in pools(2)(tasks.unnamed):
        assert "process 0 has parameter 2 of shape (5, 4)" in said


def test_a_direction_that_does_not_ask_for_whole_matrices_gets_no_parts(pools):
    for fine, found in pools(2).try_(tasks.own_direction, False, timeout=SOON):
        assert not fine
        assert "'frobenius' does not say that it takes sharded matrices" in found


def test_a_direction_that_asks_for_whole_matrices_has_the_numbers_of_one_process(pools):
    for fine, found in pools(2).try_(tasks.own_direction, True, timeout=SOON):
        assert fine, found
        sharded, alone = found
        assert (sharded - alone).abs().max() < 1e-6


def test_stages_of_a_pipeline_have_parameters_of_their_own(pools):
    for fine, found in pools(4).try_(tasks.pipeline, "", timeout=SOON):
        assert fine, found
        for sharded, alone in zip(*found, strict=True):
            assert (sharded - alone).abs().max() < 1e-5


def test_a_mistake_in_one_stage_stops_the_other(pools):
    for fine, found in pools(4).try_(tasks.pipeline, "gradient", timeout=SOON):
        assert not fine
        assert "process 2 has 0.weight" in found
        assert "with a gradient; process 3 has" in found


def test_parameters_that_come_and_go_have_the_numbers_of_one_process(pools):
    alone = tasks.coming_and_going(None)
    for fine, found in pools(2).try_(tasks.coming_and_going, "factor", timeout=SOON):
        assert fine, found
        for shared, own in zip(found, alone, strict=True):
            assert (shared - own).abs().max() < 1e-12
