"""Nested values: taken apart, put together, named."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from types import SimpleNamespace

import pytest
import torch

from pytest_cudagraph import pytree

Pair = namedtuple("Pair", "left right")


@dataclasses.dataclass
class Out:
    logits: object
    loss: object = None
    made: list = dataclasses.field(default_factory=list)
    posts = 0

    def __post_init__(self):
        type(self).posts += 1
        self.extra = "set later"


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    a: object
    b: object = 2


@dataclasses.dataclass
class Answer(OrderedDict):
    """As a ModelOutput: fields are attributes, and those that are set are items too."""

    loss: object = None
    logits: object = None

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is not None:
                super().__setitem__(field.name, getattr(self, field.name))

    def __setitem__(self, key, value):
        raise AssertionError("rebuilding must not go through the class")


class Cache:
    def __init__(self):
        self.keys = torch.zeros(2)


def rebuilt(value):
    flat, structure = pytree.flatten(value)
    return pytree.unflatten(structure, flat)


VALUES = {
    "tensor": torch.ones(2),
    "none": None,
    "tuple": (1, (2, [3])),
    "empty": ((), {}, []),
    "dict": {"b": 1, "a": {"c": 2}},
    "mixed keys": {1: "x", "a": "y"},
    "namedtuple": Pair(1, (2,)),
    "ordered": OrderedDict(b=1, a=2),
    "defaultdict": defaultdict(list, a=[1]),
    "dataclass": Out(logits=1),
    "slots": Slotted([1]),
    "namespace": SimpleNamespace(a=1, b=(2,)),
    "userdict": UserDict(a=1),
    "deque": deque([1, 2], maxlen=3),
    "model output": Answer(logits=3),
}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES.keys())
def test_a_value_survives_being_taken_apart(value):
    again = rebuilt(value)
    assert type(again) is type(value)
    assert again is value if isinstance(value, torch.Tensor | None) else again == value


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES.keys())
def test_structures_compare_by_what_they_are(value):
    _, structure = pytree.flatten(value)
    assert structure == pytree.flatten(rebuilt(value))[1]
    assert structure != pytree.flatten((value, value))[1]


READABLE = ("tensor", "none", "tuple", "empty", "dict", "mixed keys")


@pytest.mark.parametrize("name", VALUES)
def test_a_reader_gives_the_leaves_of_such_a_call_and_none_of_another(name):
    args, kwargs = (VALUES[name], 2.0), {"y": [VALUES[name]], "x": 1}
    leaves, structure = pytree.flatten((args, kwargs))
    reader = pytree.LeafReader(structure)
    found = reader.read(args, dict(reversed(kwargs.items())))
    assert found is None if name not in READABLE else list(map(id, found)) == list(map(id, leaves))
    others = [((2.0,), kwargs), (args, {}), (args, {**kwargs, "y": VALUES[name]}), (args, {"z": 1, "x": 1})]
    others += [((*args, 1), kwargs), (args, {**kwargs, "y": [VALUES[name]] * 2}), (args, {**kwargs, "y": (1,)})]
    assert [reader.read(*other) for other in others] == [None] * len(others)
    inner = {"a": {"d": 2}, "b": 1}
    assert name != "dict" or reader.read((inner, 2.0), kwargs) is None


def test_leaves_do_not_take_part_in_the_structure():
    assert pytree.flatten({"a": 1, "b": (2,)})[1] == pytree.flatten({"a": None, "b": ("x",)})[1]
    assert pytree.flatten({"a": 1})[1] != pytree.flatten({"b": 1})[1]
    assert pytree.flatten([1])[1] != pytree.flatten((1,))[1]
    assert pytree.flatten(Pair(1, 2))[1] != pytree.flatten((1, 2))[1]
    hash(pytree.flatten({"a": [1]})[1])


def test_keyword_arguments_mean_the_same_in_any_order():
    one, other = pytree.flatten({"a": 1, "b": 2}), pytree.flatten({"b": 2, "a": 1})
    assert one == other
    assert list(rebuilt({"b": 2, "a": 1})) == ["b", "a"]


def test_written_order_is_the_order_of_the_user():
    flat, structure = pytree.flatten(((0,), {"b": {"z": 1, "y": 2}, "a": 3}))
    assert [flat[at] for at in pytree.written_order(structure)] == [0, 1, 2, 3]


def test_leaves_are_named_as_one_would_write_them():
    value = {"b": (1, Pair(2, 3)), "a": [Out(logits=4, made=[5])]}
    assert pytree.named_leaves(value) == [
        ("['a'][0].logits", 4),
        ("['a'][0].loss", None),
        ("['a'][0].made[0]", 5),
        ("['a'][0].extra", "set later"),
        ("['b'][0]", 1),
        ("['b'][1].left", 2),
        ("['b'][1].right", 3),
    ]
    assert pytree.named_leaves(7) == [("", 7)]
    assert pytree.paths(pytree.flatten(torch.max(torch.ones(2, 2), 0))[1]) == [".values", ".indices"]


def test_rebuilding_a_dataclass_runs_none_of_its_code():
    value = Out(logits=torch.ones(1))
    before = Out.posts
    again = pytree.map_tensors(lambda tensor: tensor + 1, value)
    assert (Out.posts, again.extra, again.logits.item()) == (before, "set later", 2.0)


def test_a_model_output_keeps_items_and_attributes_together():
    again = pytree.map_tensors(lambda tensor: tensor + 1, Answer(logits=torch.ones(1)))
    assert list(again) == ["logits"]
    assert again["logits"] is again.logits
    assert (again.logits.item(), again.loss) == (2.0, None)
    assert [name for name, _ in pytree.named_leaves(again)] == ["['logits']", ".loss"]


def test_what_torch_returns_as_a_named_sequence_is_rebuilt_as_one():
    value = torch.max(torch.ones(2, 2), 0)
    again = pytree.map_tensors(torch.clone, value)
    assert type(again) is type(value)
    assert torch.equal(again.values, value.values)


def test_opaque_objects_are_one_leaf():
    opaque = [Cache(), torch.nn.Linear(1, 1), torch.Size([2]), {1, 2}, "ab", range(3), iter([1]), torch.float32]
    for value in opaque:
        flat, structure = pytree.flatten(value)
        assert flat == [value]
        assert structure is pytree.LEAF


def test_a_parameter_is_a_tensor_leaf():
    parameter = torch.nn.Parameter(torch.ones(1))
    assert pytree.tensors_in({"a": (parameter, 1, None)}) == [parameter]


def test_classes_registered_with_torch_are_nodes():
    class Box:
        def __init__(self, inner):
            self.inner = inner

    torch.utils._pytree.register_pytree_node(Box, lambda box: ([box.inner], None), lambda inner, _: Box(*inner))
    assert pytree.named_leaves(Box((1, 2))) == [("[0][0]", 1), ("[0][1]", 2)]
    assert rebuilt(Box(3)).inner == 3


def test_tuple_and_list_subclasses_keep_their_class_and_attributes():
    class Row(tuple):
        pass

    class Rows(list):
        pass

    rows = Rows([Row((1, 2))])
    rows.note = 3
    again = rebuilt(rows)
    assert (type(again), type(again[0]), again, again.note) == (Rows, Row, rows, 3)
    assert [name for name, _ in pytree.named_leaves(rows)] == ["[0][0]", "[0][1]", ".note"]


def test_too_few_and_too_many_leaves_are_refused():
    _, structure = pytree.flatten((1, [2]))
    with pytest.raises(ValueError, match=r"^too few leaves for this structure$"):
        pytree.unflatten(structure, [1])
    with pytest.raises(ValueError, match=r"^too many leaves for this structure$"):
        pytree.unflatten(structure, [1, 2, 3])


@pytest.mark.parametrize(
    ("value", "expected"),
    [((x for x in ()), True), (iter([1]), True), (map(str, []), True), ([1], False), (range(2), False)],
)
def test_what_reading_uses_up_is_recognised(value, expected):
    assert pytree.is_exhaustible(value) is expected


def test_a_structure_keeps_no_tensor_alive():
    class Probe:
        alive = 0

        def __init__(self):
            Probe.alive += 1

        def __del__(self):
            Probe.alive -= 1

    structure = pytree.flatten({"a": [Probe()], "b": Out(logits=Probe()), "c": Answer(logits=Probe())})[1]
    assert (Probe.alive, len(pytree.paths(structure))) == (0, 6)


@pytest.mark.slow
def test_outputs_of_transformers_are_rebuilt_without_importing_it():
    outputs = pytest.importorskip("transformers.modeling_outputs")
    value = outputs.CausalLMOutputWithPast(logits=torch.ones(1), hidden_states=(torch.ones(1),))
    again = pytree.map_tensors(lambda tensor: tensor + 1, value)
    assert type(again) is type(value)
    assert (again.logits.item(), again["logits"].item(), again[1][0].item(), again.loss) == (2.0, 2.0, 2.0, None)
