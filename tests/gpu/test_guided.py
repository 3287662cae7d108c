"""Guided generation with CUDA graphs: the mask is filled on the host while the decode step runs."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("xgrammar", reason="guided generation needs the extra guided")
pytest.importorskip("jsonschema", reason="guided generation needs the extra guided")

from tests.guided_faults import FAULTS, STOP, VOCABULARY, WORDS

from pytest_cudagraph import regex
from pytest_cudagraph.decoding.token_masks import GrammarCache, RowMasks, choose_allowed


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_by_its_own_gate_and_no_other(name):
    expected, found = FAULTS[name].missed, FAULTS[name].found("cuda")
    assert found.keys() == expected.keys(), found
    assert all(text in found[gate] for gate, text in expected.items()), found


def test_the_mask_is_pinned_and_unpacked_as_on_the_host():
    grammar = GrammarCache().compiled(regex("[a-f]{3}"), WORDS, VOCABULARY, STOP)
    masks = RowMasks(grammar, 2, pinned=True)
    masks.fill()
    assert masks.packed.is_pinned()
    logits = torch.randn(2, VOCABULARY, generator=torch.Generator().manual_seed(0))
    expected = choose_allowed(logits, masks.packed)
    found = choose_allowed(logits.cuda(), masks.packed.to("cuda", non_blocking=True))
    assert torch.equal(found.cpu(), expected)
