"""Calls of several forms behind one runner: decode steps, verify steps and chunks of one model; on the CPU twin."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pytest_cudagraph import CaptureRefusal, CudagraphError, GraphRunner, InputError


class Decoder(nn.Module):
    """Writes each token to the next place of a cache, and answers with what the cache holds."""

    def __init__(self):
        super().__init__()
        self.register_buffer("cache", torch.zeros(2, 64))
        self.register_buffer("at", torch.zeros(1, dtype=torch.long))

    def forward(self, tokens):
        places = self.at + torch.arange(tokens.shape[1], device=tokens.device)
        self.cache[: len(tokens)].index_copy_(1, places, tokens.float())
        self.at += tokens.shape[1]
        return self.cache[: len(tokens)].cumsum(1)[:, places]


def tokens(rows, length):
    return torch.randint(1, 9, (rows, length))


def decoder(*lengths, **options):
    """A runner with a form for each length, and the same decoder without one."""
    model, same = Decoder(), Decoder()
    options = {"batch_sizes": (2,), "device": "cpu", "check_rows": False, **options}
    run = GraphRunner(model, tokens(2, lengths[0]), **options)
    for length in lengths[1:]:
        run.also(tokens(2, length), batch_sizes=(1, 2))
    return run, model, same


@pytest.mark.parametrize("capture", ["now", "lazy"])
def test_a_call_is_served_by_the_form_that_fits_it(capture):
    run, _, same = decoder(1, 3, 5, capture=capture)
    for length in (5, 1, 3, 1, 1, 3):
        given = tokens(2, length)
        assert torch.equal(run(given), same(given))
    told = run.statistics
    assert (told.hits, dict(told.eager), told.state_changes) == (6, {}, 0)
    assert [form.replays for form in told.forms] == [{2: 3}, {2: 2}, {2: 1}]
    assert told.replays == {2: 6}
    assert [sorted(form.memory_bytes) for form in told.forms] == (
        [[2], [1, 2], [1, 2]] if capture == "now" else [[2]] * 3
    )


def test_a_form_has_its_own_batch_sizes_padding_and_outputs():
    def model(x, *, scale=None):
        return x.sum(1) if scale is None else {"scaled": x * scale}

    run = GraphRunner(model, torch.ones(2, 3), batch_sizes=(2,), device="cpu")
    run.also(torch.ones(3, 2, 1), kwargs={"scale": torch.ones(2, 1)}, batch_sizes=(4,), batch_dim=(1,))
    x, scale = torch.randn(3, 3, 1), torch.randn(3, 1)
    assert torch.equal(run(torch.ones(1, 3)), torch.full((1,), 3.0))
    assert run(x, scale=scale)["scaled"].shape == (3, 3, 1)
    assert (run.statistics.hits, run.statistics.padded) == (0, 2)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (tokens(2, 4), "other shape or dtype"),
        (tokens(2, 3).int(), "other shape or dtype"),
        (tokens(3, 3), "beyond the largest batch size"),
        (tokens(0, 3), "no rows"),
    ],
)
def test_the_reason_of_a_call_that_fits_no_form_is_that_of_the_nearest(given, reason):
    run = GraphRunner(torch.sin, tokens(2, 1), batch_sizes=(2, 4), device="cpu")
    run.also(tokens(2, 3), batch_sizes=(2,))
    run(given)
    assert run.statistics.eager == {reason: 1}


def test_forms_that_a_call_could_confuse_are_refused(golden):
    run, _, _ = decoder(1, 3)
    texts = []
    for example, options in [
        ((tokens(2, 3),), {"batch_sizes": (4,)}),
        ((tokens(2, 1),), {"batch_sizes": (9,), "batch_dim": 1}),
    ]:
        with pytest.raises(InputError) as caught:
            run.also(*example, **options)
        texts.append(str(caught.value))
    golden("serving/same-form.txt", "\n\n".join(texts))
    assert len(run.statistics.forms) == 2


def test_a_form_that_cannot_be_captured_is_not_added_and_the_others_serve_on():
    run, _, same = decoder(1, strict=True)
    with pytest.raises(IndexError):
        run.also(torch.ones(2, 99), batch_sizes=(2,))
    with pytest.raises(InputError):
        run.also("no tensor", batch_sizes=(1, 2))
    given = tokens(2, 1)
    assert torch.equal(run(given), same(given))
    assert (len(run.statistics.forms), run.statistics.hits) == (1, 1)


def test_forms_share_the_limit_of_graphs():
    run, _, same = decoder(1, 3, max_graphs=2)
    assert [sorted(form.memory_bytes) for form in run.statistics.forms] == [[2], [2]]
    for rows, length in [(1, 3), (2, 1), (2, 3), (2, 1)]:
        given = tokens(rows, length)
        assert torch.equal(run(given), same(given))
    assert (run.statistics.evictions, run.statistics.recaptures) == (3, 2)


def test_all_forms_are_captured_again_when_the_model_has_changed():
    run, model, same = decoder(1, 3)
    for length in (1, 3):
        for each in (model, same):
            each.cache = torch.zeros(2, 64)
        given = tokens(2, length)
        assert torch.equal(run(given), same(given))
    assert (run.statistics.state_changes, run.statistics.recaptures) == (2, 2)
    run.recapture()
    assert [sorted(form.memory_bytes) for form in run.statistics.forms] == [[], [2]]


def test_the_words_of_several_forms(golden):
    run = GraphRunner(torch.mul, tokens(2, 1), 3, batch_sizes=(1, 2), device="cpu", capture="lazy")
    run.also(tokens(2, 4), torch.ones(4), batch_sizes=(2,))
    run(tokens(2, 1), 3), run(tokens(1, 4), torch.ones(4))
    golden("serving/forms.txt", "\n".join(run.statistics.lines()[:-1]))


# A strict runner


def replace_cache(model):
    model.cache = torch.zeros(2, 64)


def train(model):
    model.train(not model.training)


def lose_cache(model):
    model.cache = None


def retype(model):
    model.cache.data = model.cache.data.double()


def add(model):
    model.register_buffer("more", torch.zeros(1))


def replace_many(model):
    model.cache, model.at = torch.zeros(2, 64), torch.zeros(1, dtype=torch.long)


def test_a_strict_runner_refuses_a_changed_model_and_says_what_changed(golden):
    texts = []
    for change in (replace_cache, retype, lose_cache, add, train, replace_many):
        run, model, _ = decoder(1, strict=True)
        change(model)
        for _ in range(2):
            with pytest.raises(CaptureRefusal) as caught:
                run(tokens(2, 1))
        texts.append(str(caught.value))
        assert (run.statistics.captures, run.statistics.state_changes, run.statistics.calls) == (1, 0, 0)
    golden("serving/changed-model.txt", "\n\n".join(texts))


def test_a_strict_runner_serves_a_changed_model_after_recapture():
    run, model, same = decoder(1, 3, strict=True)
    for each in (model, same):
        replace_cache(each)
    with pytest.raises(CudagraphError):
        run(tokens(2, 3))
    run.recapture()
    given = tokens(2, 3)
    assert torch.equal(run(given), same(given))
    assert run.statistics.recaptures == 3


def test_a_strict_runner_serves_on_after_the_old_tensor_is_put_back():
    run, model, same = decoder(1, strict=True)
    held, model.cache = model.cache, torch.zeros(2, 64)
    with pytest.raises(CudagraphError):
        run(tokens(2, 1))
    model.cache = held
    given = tokens(2, 1)
    assert torch.equal(run(given), same(given))
