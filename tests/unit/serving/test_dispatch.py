"""Which graph serves a call, what is padded, what is cut, what runs eager; on the CPU twin."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from pytest_cudagraph import CudagraphError, DeviceUnavailable, GraphRunner, InputError


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2)).eval()


def runner(model, *example, **options):
    options.setdefault("device", "cpu")
    options.setdefault("batch_sizes", (2, 4))
    return GraphRunner(model, *example, **options)


def eager(model, *args, **kwargs):
    with torch.inference_mode():
        return model(*args, **kwargs)


def served(run):
    found = run.statistics
    return found.hits, found.padded, dict(found.eager)


@pytest.mark.parametrize("rows", [2, 4])
def test_a_captured_batch_size_is_replayed_without_the_model(model, rows):
    run, x, calls = runner(model, torch.randn(2, 3)), torch.randn(rows, 3), []
    model.register_forward_hook(lambda *_: calls.append(1))
    expected = eager(model, x)
    assert torch.equal(run(x), expected)
    assert len(calls) == 1
    assert served(run) == (1, 0, {})
    assert run.statistics.replays == {rows: 1}


@pytest.mark.parametrize(("rows", "padding", "size"), [(1, 1, 2), (3, 1, 4)])
def test_other_batch_sizes_are_padded_to_the_next_and_the_outputs_cut_back(model, rows, padding, size):
    run, x = runner(model, torch.randn(2, 3)), torch.randn(rows, 3)
    output = run(x)
    torch.testing.assert_close(output, eager(model, x))
    assert output.shape == (rows, 2)
    assert served(run) == (0, 1, {})
    assert run.statistics.padding_rows == padding
    assert run.statistics.replays == {size: 1}


class Decoder(nn.Module):
    """A whole decoding step: it reads the last token from a buffer, and writes the next one there."""

    def __init__(self):
        super().__init__()
        self.register_buffer("token", torch.tensor([3]))
        self.table = nn.Embedding(11, 11)

    def forward(self):
        logits = self.table(self.token)
        self.token.copy_(logits.argmax(-1))
        return logits


def test_a_call_without_arguments_is_served_by_one_graph_that_feeds_itself():
    decoder = Decoder().eval()
    with torch.inference_mode():
        expected = [decoder().clone() for _ in range(4)]
        decoder.token.fill_(3)
    run = GraphRunner(decoder, device="cpu")
    assert run.batch_sizes == (1,)
    assert torch.equal(torch.cat([run() for _ in range(4)]), torch.cat(expected))
    assert served(run) == (4, 0, {})


def test_without_a_batch_dimension_calls_of_the_examples_form_are_served_and_no_other():
    run = runner(torch.matmul, torch.randn(5, 2), torch.randn(2, 9), batch_dim=None, batch_sizes=None)
    left, right = torch.randn(5, 2), torch.randn(2, 9)
    torch.testing.assert_close(run(left, right), left @ right)
    assert run(left[:4], right).shape == (4, 9)
    assert served(run) == (1, 0, {"other shape or dtype": 1})


def test_padding_repeats_the_last_row():
    run = runner(lambda x: (x, x.sum(0)), torch.zeros(4, 1), batch_sizes=(4,), check_rows=False)
    rows, total = run(torch.tensor([[1.0], [10.0]]))
    assert rows.tolist() == [[1.0], [10.0]]
    assert total.tolist() == [31.0]


def test_padding_survives_indices_that_only_real_rows_may_have():
    table = nn.Embedding(3, 2)
    run = runner(table, torch.tensor([0, 1]))
    assert torch.equal(run(torch.tensor([2])), eager(table, torch.tensor([2])))


@pytest.mark.parametrize(
    ("argument", "reason"),
    [
        (torch.randn(5, 3), "beyond the largest batch size"),
        (torch.randn(0, 3), "no rows"),
        (torch.randn(2, 7, 3), "other shape or dtype"),
        (torch.randn(2, 3, dtype=torch.float64), "other shape or dtype"),
        (torch.tensor(1.0), "other shape or dtype"),
    ],
)
def test_what_no_graph_fits_runs_eager_and_the_reason_is_counted(argument, reason):
    run = runner(torch.sin, torch.randn(2, 3))
    assert torch.equal(run(argument), torch.sin(argument))
    assert served(run) == (0, 0, {reason: 1})


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", ["sparse", "nested"])
def test_a_tensor_without_strides_is_of_another_form_at_each_place(kind):
    dense = torch.ones(2, 3)
    argument = dense.to_sparse() if kind == "sparse" else torch.nested.nested_tensor(list(dense))
    run = runner(lambda x, y: "eager", torch.randn(2, 3), torch.randn(2, 3), capture="lazy")
    assert run(argument, torch.ones(2, 3)) == run(torch.ones(2, 3), argument) == "eager"
    assert served(run) == (0, 0, {"other shape or dtype": 2})


def test_sparse_outputs_are_not_padded():
    kept = torch.eye(3).to_sparse()
    assert runner(lambda x: kept, torch.randn(2, 3)).statistics.not_padded == "output is a sparse or nested tensor"


def scaled(x, factor, *, shift=None, mode="add"):
    y = x * factor
    return y if shift is None else y + shift if mode == "add" else y - shift


def test_keyword_arguments_are_replayed_in_any_order(model):
    x, shift = torch.randn(3, 2), torch.randn(3, 2)
    run = runner(scaled, torch.randn(2, 2), 2, kwargs={"shift": torch.randn(2, 2), "mode": "add"})
    assert torch.equal(run(x, 2, mode="add", shift=shift), scaled(x, 2, shift=shift))
    assert torch.equal(run(x[:2], 2, shift=shift[:2], mode="add"), scaled(x[:2], 2, shift=shift[:2]))
    assert served(run) == (1, 1, {})


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((3,), {"shift": 0}), ((2.0,), {"shift": 0}), ((2,), {}), ((2,), {"shift": 0, "mode": "sub"})],
    ids=["value", "type", "missing", "keyword"],
)
def test_another_plain_argument_runs_eager(args, kwargs):
    run = runner(scaled, torch.randn(2, 2), 2, kwargs={"shift": torch.zeros(2, 2)})
    x = torch.randn(2, 2)
    kwargs = {**kwargs, "shift": torch.ones(2, 2)} if kwargs else {}
    assert torch.equal(run(x, *args, **kwargs), scaled(x, *args, **kwargs))
    assert served(run) == (0, 0, {"other argument": 1})


def test_another_name_for_a_keyword_is_the_models_own_error():
    run = runner(scaled, torch.randn(2, 2), 2, kwargs={"shift": torch.zeros(2, 2)})
    with pytest.raises(TypeError, match="shfit"):
        run(torch.randn(2, 2), 2, shfit=torch.zeros(2, 2))
    assert run.statistics.calls == 0


@dataclass
class Answer:
    logits: torch.Tensor
    extra: dict


def nested(batch, pair):
    return Answer(logits=batch["ids"] * 2, extra={"sum": pair[0] + pair[1], "scale": torch.ones(4)})


def test_nested_arguments_and_outputs(model):
    def call(rows):
        return {"ids": torch.randn(rows, 2), "unused": None}, (torch.randn(rows, 1), torch.randn(rows, 1))

    run = runner(nested, *call(2))
    for rows in (3, 4, 5):
        args = call(rows)
        found, expected = run(*args), nested(*args)
        assert type(found) is Answer
        assert torch.equal(found.logits, expected.logits)
        assert torch.equal(found.extra["sum"], expected.extra["sum"])
        assert found.extra["scale"].tolist() == [1.0] * 4  # four by chance: no rows
    assert served(run) == (1, 1, {"beyond the largest batch size": 1})


def test_another_nesting_runs_eager():
    run = runner(lambda pair: pair[0] + pair[1], (torch.ones(2), torch.ones(2)))
    assert run([torch.ones(2), torch.ones(2)]).tolist() == [2.0, 2.0]
    assert served(run) == (0, 0, {"other argument": 1})


def test_the_rows_of_each_output_are_found_wherever_they_are():
    lstm = nn.LSTM(3, 5, num_layers=2, batch_first=True).eval()  # hidden: layers first, and as many as rows
    run, x = runner(lstm, torch.randn(2, 7, 3), batch_sizes=(2,)), torch.randn(1, 7, 3)
    output, (hidden, cell) = run(x)
    expected, (wanted, _) = eager(lstm, x)
    assert output.shape == expected.shape
    assert hidden.shape == cell.shape == wanted.shape == (2, 1, 5)
    torch.testing.assert_close(hidden, wanted)


def test_rows_in_another_dimension_and_arguments_without_rows():
    run = runner(lambda x, w: x * w, torch.randn(3, 2), torch.randn(3, 1), batch_dim=(1, None))
    x, w = torch.randn(3, 3), torch.randn(3, 1)
    assert torch.equal(run(x, w), x * w)
    assert served(run) == (0, 1, {})


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (lambda x: x.repeat(2, 1), "output has shape (8, 3) with 4 rows, (6, 3) with 3"),
        (lambda x: (x, len(x)), "output[1] is 4 with 4 rows, 3 with 3"),
        (lambda x: [x] * len(x), "the output is nested differently with 4 and with 3 rows"),
        (
            lambda x: x.view(4, 3),
            "with 3 rows the model raises RuntimeError: shape '[4, 3]' is invalid for input of size 9",
        ),
    ],
    ids=["interleaved", "plain", "structure", "fixed"],
)
def test_outputs_that_cannot_be_cut_are_not_padded(model, why):
    run = runner(model, torch.randn(4, 3), batch_sizes=(4,))
    run(torch.randn(4, 3))
    assert run.statistics.not_padded == why
    if "raises" not in why:
        run(torch.randn(3, 3))
        assert served(run) == (1, 0, {"outputs cannot be cut": 1})


def test_outputs_belong_to_the_caller(model):
    run = runner(model, torch.randn(2, 3))
    one, other = torch.randn(2, 3), torch.randn(2, 3)
    first = run(one)
    run(other)
    assert torch.equal(first, eager(model, one))


def test_without_clones_the_next_call_overwrites_the_outputs(model):
    run = runner(model, torch.randn(2, 3), clone_outputs=False)
    one, other = torch.randn(2, 3), torch.randn(2, 3)
    first = run(one)
    assert torch.equal(first, eager(model, one))
    run(other)
    assert torch.equal(first, eager(model, other))
    assert run(one[:1]).shape == (1, 2)


@pytest.mark.parametrize("rows", [2, 3, 5], ids=["exact", "padded", "eager"])
def test_outputs_are_inference_tensors_however_they_were_made(model, rows):
    assert runner(model, torch.randn(2, 3))(torch.randn(rows, 3, requires_grad=True)).is_inference()


def test_a_call_in_another_autocast_runs_eager(model):
    run, x = runner(model, torch.randn(2, 3)), torch.randn(2, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert run(x).dtype is torch.bfloat16
    assert run(x).dtype is torch.float32
    assert served(run) == (1, 0, {"other autocast": 1})


def test_a_runner_made_in_autocast_serves_calls_in_it(model):
    x = torch.randn(2, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        run = runner(model, x)
        assert run(x).dtype is torch.bfloat16
        assert torch.equal(run(x), eager(model, x))
    assert run(x).dtype is torch.float32
    assert served(run) == (2, 0, {"other autocast": 1})


def test_a_runner_captured_again_in_autocast_serves_calls_in_it_and_no_others(model):
    run, x = runner(model, torch.randn(2, 3)), torch.randn(2, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        run.recapture()
        assert run(x).dtype is torch.bfloat16
    assert run(x).dtype is torch.float32
    assert served(run) == (1, 0, {"other autocast": 1})


def test_a_cache_among_the_arguments_is_known_by_identity():
    class Cache:
        def __init__(self):
            self.seen = torch.zeros(3)

    def model(x, cache):
        cache.seen += 1
        return x + cache.seen

    cache = Cache()
    run = runner(model, torch.zeros(2, 3), cache)
    assert not cache.seen.any()
    assert run(torch.zeros(2, 3), cache)[0, 0] == 1
    assert run(torch.zeros(2, 3), cache)[0, 0] == 2
    run(torch.zeros(2, 3), Cache())
    assert served(run) == (2, 0, {"other argument": 1})


def test_a_closed_runner_raises_and_keeps_its_statistics(model):
    with runner(model, torch.randn(2, 3)) as run:
        run(torch.randn(2, 3))
    run.close()
    for call in (lambda: run(torch.randn(2, 3)), run.recapture):
        with pytest.raises(CudagraphError) as caught:
            call()
        assert str(caught.value) == "this GraphRunner is closed and has released its graphs; make another one"
    assert served(run) == (1, 0, {})
    assert run.statistics.memory_bytes == {}


def test_what_it_is(model):
    run = runner(model, torch.randn(2, 3), batch_sizes=[4, 1])
    assert (run.batch_sizes, run.device) == ((1, 4), "cpu")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"capture": "later"}, "capture is 'now' or 'lazy'; found 'later'"),
        ({"watch": "never"}, "watch is 'call', 'hooks' or 'manual'; found 'never'"),
        ({"max_graphs": 0}, "max_graphs is a positive int, or None for one graph per batch size; found 0"),
        ({"max_graphs": True}, "max_graphs is a positive int, or None for one graph per batch size; found True"),
        ({"batch_sizes": (0,)}, "batch sizes must be distinct positive ints, such as [1, 8], found 0"),
        ({"batch_dim": 5}, "batch_dim=5 is out of range for args[0] of shape (2, 3)"),
    ],
)
def test_options_that_cannot_be_are_refused(model, options, text):
    with pytest.raises(InputError) as caught:
        runner(model, torch.randn(2, 3), **options)
    assert str(caught.value).startswith(text)


def test_a_model_that_is_none_and_a_device_that_is_not_there(model):
    with pytest.raises(InputError, match="the model must be callable; found str"):
        runner("model", torch.randn(2, 3))
    with pytest.raises(DeviceUnavailable, match="there is no device 'tpu'"):
        runner(model, torch.randn(2, 3), device="tpu")
    with pytest.raises(InputError, match="hold no tensor"):
        runner(model, 3)


def test_inputs_on_another_device_are_refused(model):
    with pytest.raises(InputError, match=r"args\[0\] is on meta, but this run uses cpu"):
        runner(model, torch.randn(2, 3, device="meta"))


def test_an_error_of_the_model_comes_through(model):
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        runner(model, torch.randn(2, 4))
    run = runner(model, torch.randn(2, 3), capture="lazy")
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        run(torch.randn(2, 4))
    assert torch.equal(run(torch.ones(2, 3)), eager(model, torch.ones(2, 3)))
