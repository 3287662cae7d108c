"""Example inputs: resized, copied, renewed, refused."""

from __future__ import annotations

import re

import pytest
import torch

from pytest_cudagraph import inputs, pytree
from pytest_cudagraph.errors import InputError
from pytest_cudagraph.inputs import Example


def sized(args, kwargs=None, sizes=(1, 2, 5), batch_dim=0):
    return inputs.batch_examples(Example(args=args, kwargs=kwargs or {}), sizes, batch_dim)


def drawn(args, draw, kwargs=None):
    return inputs.with_draw(sized(args, kwargs, [2]), draw, 0)


def example_of(*args, **kwargs):
    return Example(args=args, kwargs=kwargs)


def shapes(example):
    return [tuple(t.shape) for t in pytree.tensors_in((example.args, example.kwargs))]


def renewed(tensor, seed=0, **options):
    return inputs.fresh(Example(args=(tensor,), kwargs={}), seed, **options).args[0]


def test_rows_are_repeated_and_cut():
    example = sized((torch.tensor([[1.0], [2.0]]),), sizes=[1, 2, 5])
    assert [example[size].args[0].flatten().tolist() for size in (1, 2, 5)] == [[1], [1, 2], [1, 2, 1, 2, 1]]


def test_every_tensor_of_the_example_batch_size_is_resized_and_no_other():
    kwargs = {"nest": [torch.ones(4, 2), "plain", None], "table": torch.ones(7, 4), "scalar": torch.tensor(1.0)}
    example = sized((torch.ones(4, 3),), kwargs, sizes=[2])[2]
    assert shapes(example) == [(2, 3), (2, 2), (), (7, 4)]
    assert example.kwargs["nest"][1:] == ["plain", None]
    assert list(example.kwargs) == ["nest", "table", "scalar"]
    assert example.kwargs["table"] is kwargs["table"]


def test_the_first_tensor_as_written_gives_the_batch_size():
    assert inputs.example_batch_size(example_of(x=torch.ones(4, 2), a=torch.ones(9, 2))) == 4
    assert inputs.example_batch_size(example_of(torch.ones(3, 2), torch.ones(4)), (None, 0)) == 4


@pytest.mark.parametrize(
    ("batch_dim", "expected"),
    [
        (0, [(8, 4), (8, 4), (8, 3)]),
        (-2, [(8, 4), (8, 4), (8, 3)]),
        ((0, None), [(8, 4), (2, 4), (8, 3)]),
        (([0, None], {"m": 0}), [(8, 4), (2, 4), (8, 3)]),
        ({"m": None}, [(8, 4), (8, 4), (2, 3)]),
        ((0, {"m": None}), [(8, 4), (8, 4), (2, 3)]),
        ((0, {}), [(8, 4), (8, 4), (8, 3)]),
        ((None, {"m": 0}), [(2, 4), (2, 4), (8, 3)]),
    ],
)
def test_the_batch_dimension_is_a_number_or_a_tree(batch_dim, expected):
    args, kwargs = (torch.ones(2, 4), torch.ones(2, 4)), {"m": torch.ones(2, 3)}
    assert shapes(sized(args, kwargs, [8], batch_dim)[8]) == expected


def test_trees_reach_into_nested_arguments():
    args = ({"ids": torch.ones(2, 4), "table": torch.ones(2, 4)}, [torch.ones(3, 2)])
    example = sized(args, sizes=[8], batch_dim=({"table": None}, [1]))[8]
    assert shapes(example) == [(8, 4), (2, 4), (3, 8)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.int64, torch.bool, torch.complex64])
def test_a_resized_tensor_keeps_dtype_and_carries_no_gradient(dtype):
    tensor = torch.ones(2, 3).to(dtype)
    if dtype.is_floating_point:
        tensor.requires_grad_()
    made = sized((tensor,), sizes=[3])[3].args[0]
    assert (made.dtype, made.device, made.requires_grad, made.is_contiguous()) == (dtype, tensor.device, False, True)


def test_a_resized_tensor_keeps_its_memory_format_and_is_dense():
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    made = sized((image,), sizes=[4])[4].args[0]
    assert made.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(made, torch.cat([image, image]))
    assert sized((torch.zeros(1, 3).expand(4, 3),), sizes=[2])[2].args[0].is_contiguous()


def test_examples_share_no_memory_with_the_users_tensor_or_each_other():
    tensor = torch.ones(2, 3)
    made = sized((tensor,), sizes=[2, 4])
    made[2].args[0].zero_()
    made[4].args[0].fill_(7)
    assert (tensor.sum().item(), made[2].args[0].sum().item()) == (6.0, 0.0)


def test_a_tensor_passed_twice_stays_one_tensor():
    tensor = torch.ones(2, 3)
    example = sized((tensor,), {"again": tensor}, [4])[4]
    assert example.args[0] is example.kwargs["again"]
    for copied in (inputs.clone(example), inputs.fresh(example, 1)):
        assert copied.args[0] is copied.kwargs["again"]


@pytest.mark.parametrize(("args", "batch_dim"), [((torch.ones(5, 2), torch.ones(2, 9)), None), ((), 0)])
def test_an_example_without_a_batch_dimension_stays_as_it_is_at_one_batch_size(args, batch_dim):
    example = sized(args, sizes=[3], batch_dim=batch_dim)[3]
    assert all(made is given for made, given in zip(example.args, args, strict=True))
    assert inputs.example_batch_size(example, batch_dim) is None


def test_examples_come_in_the_order_asked():
    assert list(sized((torch.ones(1),), sizes=[8, 1, 4])) == [8, 1, 4]


X = torch.ones(2, 3)
REFUSED = {
    "no arguments": lambda: sized(()),
    "no tensor": lambda: sized((1, "a"), {"k": None}),
    "no dimensions": lambda: sized((torch.tensor(1.0), X)),
    "dimension out of range": lambda: sized((X,), batch_dim=2),
    "dimension out of range below": lambda: sized((), {"m": X}, batch_dim=-3),
    "no batch dimension at all": lambda: sized((X,), batch_dim=None),
    "empty batch": lambda: sized((torch.ones(0, 3),)),
    "batch size 0": lambda: sized((X,), sizes=[1, 0]),
    "batch size negative": lambda: sized((X,), sizes=[-2]),
    "batch size bool": lambda: sized((X,), sizes=[True]),
    "batch size float": lambda: sized((X,), sizes=[2.0]),
    "batch sizes twice": lambda: sized((X,), sizes=[1, 2, 1]),
    "batch sizes none": lambda: sized((X,), sizes=[]),
    "batch sizes no list": lambda: sized((X,), sizes=8),
    "batch sizes text": lambda: sized((X,), sizes="12"),
    "batch_dim text": lambda: sized((X,), batch_dim="0"),
    "batch_dim bool": lambda: sized((X,), batch_dim=True),
    "batch_dim bool in a tree": lambda: sized((X,), batch_dim=(True,)),
    "tree too long": lambda: sized((X,), batch_dim=(0, 0)),
    "tree too deep": lambda: sized((X,), batch_dim=([0],)),
    "tree inside a tensor": lambda: sized((X,), batch_dim=({},)),
    "tree of another kind": lambda: sized(({"a": X},), batch_dim=([0],)),
    "tree with an unknown keyword": lambda: sized((X,), {"mask": X}, batch_dim={"musk": None}),
    "tree with an unknown name inside": lambda: sized((X,), {"m": {"a": X}}, batch_dim=(0, {"m": {"b": 0}})),
    "batch size beyond all memory": lambda: sized((X,), sizes=[2**60]),
    "generator": lambda: sized((X, (x for x in ()))),
    "sparse": lambda: sized((X,), {"s": torch.eye(2).to_sparse()}),
    "two devices": lambda: sized((X,), {"m": [X.to("meta")]}),
    "draw of another kind": lambda: drawn((X,), 3),
    "draw without an example": lambda: drawn((X,), []),
    "draw that raises": lambda: drawn((X,), lambda: X),
    "draw of fewer arguments": lambda: drawn((X, X), lambda generator: X),
    "draw without the keywords": lambda: drawn((X,), [X], {"mask": X}),
    "draw of another shape": lambda: drawn((X, X), [(X, X[:, :1])]),
    "draw of another plain value": lambda: drawn((X, 2), [(X, 3)]),
    "another device": lambda: inputs.check_device(Example(args=(1, [X]), kwargs={}), "cuda:0"),
}


def test_every_refusal_says_what_is_allowed_what_was_found_and_what_to_do(golden):
    lines = []
    for name, call in REFUSED.items():
        with pytest.raises(InputError) as caught:
            call()
        lines.append(f"{name}\n    {caught.value}")
    golden("input_errors.txt", "\n".join(lines))


def test_the_device_asked_for_may_leave_the_index_open():
    example = Example(args=(X.to("meta"),), kwargs={})
    inputs.check_device(example, "meta")
    with pytest.raises(InputError, match=re.escape("args[0] is on meta, but this run uses cpu: pass it as .to('cpu')")):
        inputs.check_device(example, torch.device("cpu"))


def test_a_clone_has_the_same_values_and_strides_in_other_memory():
    tensors = (torch.randn(3, 4).t(), torch.zeros(1, 3).expand(4, 3), torch.arange(6.0).unfold(0, 3, 1), X.bool())
    copied = inputs.clone(Example(args=tensors, kwargs={"n": 3})).args
    for old, new in zip(tensors, copied, strict=True):
        assert torch.equal(old, new)
        assert old.data_ptr() != new.data_ptr()
    assert [t.stride() for t in copied[:2]] == [t.stride() for t in tensors[:2]]


def test_opaque_objects_are_shared_by_clones():
    cache = object()
    assert inputs.clone(Example(args=(X, cache), kwargs={})).args[1] is cache


@pytest.mark.parametrize(
    "tensor",
    [torch.randn(4, 3).t(), torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last), torch.randn(3, 8)[:, ::2]],
)
def test_fresh_values_keep_shape_strides_and_dtype(tensor):
    made = renewed(tensor)
    assert (made.shape, made.stride(), made.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
    assert not torch.equal(made, tensor)


def test_a_seed_decides_the_values():
    tensor = torch.randn(50)
    assert torch.equal(renewed(tensor, 3), renewed(tensor, 3))
    assert not torch.equal(renewed(tensor, 3), renewed(tensor, 4))


def test_fresh_values_leave_torchs_random_state_alone():
    before = torch.random.get_rng_state()
    renewed(torch.randn(50), 3)
    renewed(torch.randint(0, 9, (50,)), 3)
    after = torch.random.get_rng_state()
    torch.random.set_rng_state(before)
    torch.randn(50)
    torch.randint(0, 9, (50,))
    assert torch.equal(after, torch.random.get_rng_state())


def test_floats_keep_the_scale_and_the_range_of_the_example():
    wide = 5 + 3 * torch.randn(20_000, generator=torch.Generator().manual_seed(1))
    made = renewed(wide)
    assert made.mean().item() == pytest.approx(5, abs=0.1)
    assert made.std().item() == pytest.approx(3, abs=0.1)
    pixels = renewed(torch.rand(1000))
    assert 0 <= pixels.min() < 0.1 < 0.9 < pixels.max() <= 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.complex64])
@pytest.mark.parametrize("like", ["random", "large", "zeros"])
def test_no_dtype_gives_nan_or_infinity(dtype, like):
    made = renewed(torch.randn(200).to(dtype), like=like)
    assert made.dtype == dtype
    assert made.to(torch.complex64).isfinite().all()


def test_zeros_and_large_values_for_floats():
    tensor = torch.randn(1000)
    assert renewed(tensor, like="zeros").abs().max() == 0
    assert 50 < renewed(tensor, like="large").std() < 150


def test_a_lone_or_constant_float_varies_and_keeps_its_sign():
    for value in (0.7, -500.0):
        made = renewed(torch.full((40,), value))
        assert (made != value).any()
        assert (made / value).min() >= 0.5
        assert (made / value).max() <= 2
    assert renewed(torch.zeros(40)).std() > 0.5


def test_nan_is_replaced_and_infinity_stays_where_it_was():
    inf = torch.inf
    made = renewed(torch.tensor([torch.nan, 1.0, 2.0, -inf, inf]))
    assert made[:3].isfinite().all()
    assert made[3:].tolist() == [-inf, inf]
    assert renewed(torch.tensor([torch.nan, torch.nan])).tolist() == [0.0, 0.0]


LOWEST = torch.finfo(torch.float32).min
KEPT = {
    "bool": torch.tensor([True, False, True]),
    "additive mask": torch.tensor([[0.0, -torch.inf], [0.0, 0.0]]),
    "additive mask, lowest": torch.tensor([[0.0, LOWEST], [0.0, 0.0]]),
    "additive mask, half": torch.tensor([0.0, -1e4, 0.0]).half(),
    "0/1 mask": torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0]]),
    "positions": torch.arange(8),
    "positions of every row": torch.arange(4).expand(3, 4),
    "offsets": torch.tensor([0, 3, 3, 9], dtype=torch.int32),
    "constant": torch.tensor([5]),
    "position": torch.tensor(7),
    "empty": torch.zeros(0, 3),
    "only infinities": torch.tensor([-torch.inf, torch.inf]),
}


@pytest.mark.parametrize("like", ["random", "zeros", "large"])
@pytest.mark.parametrize("tensor", KEPT.values(), ids=KEPT.keys())
def test_masks_positions_and_constants_stay_as_they_are(tensor, like):
    assert torch.equal(renewed(tensor, like=like), tensor)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.int8])
def test_integers_stay_within_the_range_of_the_example(dtype):
    tokens = torch.tensor([[90, 3, 17], [50, 60, 4]], dtype=dtype)
    made = torch.stack([renewed(tokens, seed) for seed in range(40)])
    assert (made.dtype, made.min().item() >= 3, made.max().item() <= 90) == (dtype, True, True)
    assert len(made.unique()) > 20
    assert renewed(tokens, like="zeros").unique().tolist() == [3]


def test_the_largest_integers_are_within_reach():
    limits = torch.iinfo(torch.int64)
    assert renewed(torch.tensor([limits.max, 0, 5])).shape == (3,)


def test_inputs_made_in_inference_mode_serve_too():
    with torch.inference_mode():
        tensor = torch.randn(2, 3)
    example = sized((tensor,), sizes=[4])[4]
    assert inputs.fresh(example, 1).args[0].shape == (4, 3)
    assert torch.equal(inputs.clone(example).args[0], example.args[0])


# --- inputs that an example seldom holds ---


def adversaries_of(example, dims, seed=1):
    return dict(inputs.adversaries(example, dims, seed))


def test_the_four_kinds_of_adversarial_inputs():
    example = example_of(torch.randn(3, 4), mask=torch.tensor([True, False, False]))
    fresh, found = inputs.fresh(example, 1), adversaries_of(example, (0, 0))
    assert list(found) == ["zeros", "large values", "rows in another order", "a row of NaN"]
    assert not found["zeros"].args[0].any()
    assert found["large values"].args[0].abs().max() > 20
    assert torch.equal(found["rows in another order"].args[0], fresh.args[0].roll(1, 0))
    assert found["rows in another order"].kwargs["mask"].tolist() == [False, True, False]
    rows = found["a row of NaN"].args[0]
    assert rows[2].isnan().all()
    assert torch.equal(rows[:2], fresh.args[0][:2])
    assert torch.equal(found["a row of NaN"].kwargs["mask"], example.kwargs["mask"])


def test_rows_are_moved_and_spoiled_in_their_own_dimension():
    found = adversaries_of(example_of(torch.randn(4, 2), torch.randn(2, 4)), (1, None))
    assert found["a row of NaN"].args[0].isnan().tolist() == [[False, True]] * 4
    assert not found["a row of NaN"].args[1].isnan().any()


KEPT_BY_ALL = {
    "offsets": torch.tensor([0, 3, 5]),
    "positions": torch.arange(4).expand(3, 4),
    "constant": torch.tensor([5, 5, 5]),
}


@pytest.mark.parametrize("tensor", KEPT_BY_ALL.values(), ids=KEPT_BY_ALL.keys())
def test_what_must_stay_stays_in_adversarial_inputs_too(tensor):
    assert all(torch.equal(found.args[0], tensor) for found in adversaries_of(example_of(tensor), (0,)).values())


def test_no_row_of_an_additive_mask_becomes_nan():
    mask = torch.tensor([[0.0, -torch.inf], [0.0, 0.0]])
    assert not adversaries_of(example_of(mask), (0,))["a row of NaN"].args[0].isnan().any()


def test_a_tensor_passed_twice_stays_one_in_adversarial_inputs():
    tensor = torch.randn(2, 3)
    for found in adversaries_of(example_of(tensor, again=tensor), (0, 0)).values():
        assert found.args[0] is found.kwargs["again"]


def test_rows_are_where_another_batch_size_differs():
    four, two = example_of(torch.ones(4, 4), torch.ones(3, 4)), example_of(torch.ones(4, 2), torch.ones(3, 2))
    assert inputs.row_dims(four, 4, two) == (1, 1)
    assert inputs.row_dims(two, 2, four) == (1, 1)
    assert inputs.row_dims(four, 4) == (0, None)
    assert inputs.row_dims(four, 4, example_of([torch.ones(2, 4)])) == (0, None)
    assert inputs.row_dims(example_of(torch.tensor(1.0), 3), 1) == (None, None)


def test_only_whole_numbers_that_tell_no_range_are_lowered():
    given = (torch.tensor([5, 5]), torch.tensor([3, 4]), torch.tensor(0), torch.ones(2), torch.tensor([True]))
    found = inputs.lowered(example_of(*given, n=7))
    assert [tensor.tolist() for tensor in found.args] == [[4, 4], [3, 4], 0, [1.0, 1.0], [True]]
    assert found.kwargs == {"n": 7}
    assert inputs.lowered(example_of(torch.tensor([2, 2], dtype=torch.uint8))).args[0].dtype == torch.uint8


def test_rows_beside_those_of_a_wider_example():
    one = example_of(torch.zeros(2, 2), torch.zeros(3), n=1)
    wider = example_of(torch.ones(2, 4), torch.ones(3), n=1)
    found = inputs.beside(one, wider, (1, None, None))
    assert found.args[0].tolist() == [[0.0, 0.0, 1.0, 1.0]] * 2
    assert found.args[1].tolist() == [0.0] * 3
    assert wider.args[0].tolist() == [[1.0] * 4] * 2


def test_negative_inputs_change_the_sign_of_floats_and_keep_whole_numbers_in_range():
    floats, whole = torch.tensor([1.0, -2.0, -torch.inf]), torch.tensor([5, 2, 9])
    assert renewed(floats, like="negative").tolist() == [-1.0, 2.0, -torch.inf]
    assert set(renewed(whole, like="negative").tolist()) <= set(range(2, 10))


@pytest.mark.parametrize("tensor", [torch.arange(12.0).view(3, 4), torch.tensor([[7, 1, 3], [9, 9, 2]])])
def test_permuted_inputs_hold_the_examples_numbers_in_another_order(tensor):
    found = renewed(tensor, like="permuted")
    assert found.shape == tensor.shape
    assert torch.equal(found.flatten().sort().values, tensor.flatten().sort().values)
    assert not torch.equal(found, tensor)
    assert torch.equal(found, renewed(tensor, like="permuted"))


def test_permuted_inputs_leave_infinities_and_masks_where_they_are():
    masked = torch.tensor([1.0, -torch.inf, 3.0, 4.0])
    found = renewed(masked, like="permuted")
    assert found[1] == -torch.inf
    assert set(found[[0, 2, 3]].tolist()) <= {1.0, 3.0, 4.0}
    assert renewed(torch.tensor([0.0, -1e9]), like="permuted").tolist() == [0.0, -1e9]
