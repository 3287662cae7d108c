"""Snapshots: what a model holds, what changed, and that everything is put back."""

from __future__ import annotations

import functools
from collections import OrderedDict, deque
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from pytest_cudagraph.state import Changes, Snapshot, live, modules_of

NONE = Changes()


class Layer:
    """As a layer of a static cache: an object that is no module."""

    def __init__(self):
        self.keys = torch.zeros(2, 3)
        self.seen = 0


class Cache:
    def __init__(self, layers=2):
        self.layers = [Layer() for _ in range(layers)]


class Slotted:
    __slots__ = ("__hidden", "other", "value")

    def __init__(self):
        self.value = torch.zeros(2)
        self.__hidden = 1

    def bump(self):
        self.__hidden += 1
        self.other = "new"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
        self.head = nn.Linear(3, 3, bias=False)
        self.head.weight = self.inner[0].weight
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("unset", None)
        self.cache = Cache()
        self.hidden = torch.zeros(3)
        self.lazy = None
        self.calls = 0
        self.table = {"a": torch.ones(2), "b": 1}
        self.history = [torch.ones(1)]

    def forward(self, x):
        return self.head(self.inner(x))


@pytest.fixture(params=[nullcontext, torch.no_grad, torch.inference_mode], ids=["grad", "no_grad", "inference_mode"])
def mode(request):
    """Everything here must work in every mode."""
    with request.param():
        yield


def write(net):
    with torch.inference_mode():
        net.inner[0].weight.add_(1)
        net.steps.add_(1)
        net.cache.layers[1].keys.fill_(5)


def rebind(net):
    net.hidden = net.hidden + 0
    net.inner[0].bias.data = net.inner[0].bias.data.clone()
    net.table["a"] = torch.ones(2)
    net.head.weight = nn.Parameter(torch.ones(3, 3))
    net.steps = torch.ones((), dtype=torch.int64)


def grow_and_shrink(net):
    net.lazy = torch.ones(2)
    net.history.append(torch.ones(2))
    net.register_buffer("late", torch.ones(1))
    net.table["c"] = 3
    net.extra = "x"
    del net.hidden
    del net.table["a"]


def count(net):
    net.calls += 3
    net.cache.layers[0].seen = True
    net.table["b"] = "one"


def replace_a_container(net):
    net.cache = Cache(layers=1)
    net.history = []


def switch(net):
    net.inner.eval()
    net.inner[0].bias.requires_grad_(False)


CASES = {
    "write": (
        write,
        Changes(written=("inner.0.weight", "steps", "cache.layers[1].keys")),
    ),
    "rebind": (rebind, Changes(rebound=("steps", "inner.0.bias", "head.weight", "hidden", "table['a']"))),
    "grow and shrink": (
        grow_and_shrink,
        Changes(
            added=("late", "lazy", "history[1]"),
            removed=("hidden", "table['a']"),
            python=("extra: not there -> 'x'", "len(history): 1 -> 2"),
        ),
    ),
    "count": (
        count,
        Changes(python=("cache.layers[0].seen: 0 -> True", "calls: 0 -> 3", "table['b']: 1 -> 'one'")),
    ),
    "replace a container": (
        replace_a_container,
        Changes(
            rebound=("cache.layers[0].keys",),
            removed=("cache.layers[1].keys", "history[0]"),
            python=("cache.layers[1].seen: 0 -> gone", "len(cache.layers): 2 -> 1", "len(history): 1 -> 0"),
        ),
    ),
    "switch": (
        switch,
        Changes(
            training=("inner: True -> False", "inner.0: True -> False", "inner.1: True -> False"),
            python=("inner.0.bias.requires_grad: True -> False",),
        ),
    ),
}


@pytest.mark.parametrize(("act", "expected"), CASES.values(), ids=CASES.keys())
def test_a_change_is_named_and_undone(act, expected, mode):
    net = Net()
    before = {name: tensor.clone() for name, tensor in live(net).items()}
    addresses = {name: tensor.data_ptr() for name, tensor in live(net).items()}
    snapshot = Snapshot.take(net)
    assert snapshot.changes() == NONE
    act(net)
    found = snapshot.changes()
    assert {field: set(getattr(found, field)) for field in Changes.__dataclass_fields__} == {
        field: set(getattr(expected, field)) for field in Changes.__dataclass_fields__
    }
    assert found
    snapshot.restore()
    assert snapshot.changes() == NONE
    assert not snapshot.changes()
    assert {name: tensor.data_ptr() for name, tensor in live(net).items()} == addresses
    assert all(torch.equal(before[name], tensor) for name, tensor in live(net).items())
    assert net.head.weight is net.inner[0].weight


def test_several_changes_are_undone_together(mode):
    net = Net()
    snapshot = Snapshot.take(net)
    for act, _ in CASES.values():
        if act is not replace_a_container:
            act(net)
    replace_a_container(net)
    snapshot.restore()
    assert snapshot.changes() == NONE


def test_a_hook_is_undone_with_the_attribute_that_tells_of_it():
    """Models of transformers register their hooks in the first call, and note in an attribute that they have."""
    net, seen = Net(), []
    snapshot = Snapshot.take(net)
    for _ in range(2):
        net.lazy = "registered"
        net.inner.register_forward_hook(lambda *args, **kwargs: seen.append("hook"), with_kwargs=True, always_call=True)
        net.head.register_forward_pre_hook(lambda *args, **kwargs: seen.append("pre"), with_kwargs=True)
        snapshot.restore()
    net(torch.ones(1, 3))
    assert seen == []
    assert snapshot.changes() == NONE


def test_names_are_those_of_the_module_and_tied_tensors_are_saved_once():
    net = Net()
    names = Snapshot.take(net).names
    own = [name for name, _ in (*net.named_parameters(), *net.named_buffers())]
    assert set(own) <= set(names)
    assert "head.weight" not in names
    assert set(names) - set(own) == {
        "cache.layers[0].keys", "cache.layers[1].keys", "hidden", "table['a']", "history[0]",
    }  # fmt: skip


def test_saved_tensors_are_copies_and_live_tensors_are_not():
    net = Net()
    snapshot = Snapshot.take(net)
    net.hidden.add_(1)
    assert snapshot.tensors()["hidden"].tolist() == [0, 0, 0]
    assert snapshot.live()["hidden"] is net.hidden
    assert snapshot.tensors().keys() == snapshot.live().keys()


def test_nan_is_equal_to_itself_and_minus_zero_is_not_zero():
    net = nn.Module()
    net.x = torch.tensor([torch.nan, 0.0])
    snapshot = Snapshot.take(net)
    net.x.copy_(torch.tensor([torch.nan, 0.0]))
    assert snapshot.changes() == NONE
    net.x[1] = -0.0
    assert snapshot.changes().written == ("x",)


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.int8, torch.bfloat16, torch.float64, torch.complex64, torch.complex128, torch.float8_e5m2],
)
def test_every_dtype_is_compared_and_restored(dtype):
    net = nn.Module()
    net.x = torch.zeros(3).to(dtype)
    snapshot = Snapshot.take(net)
    net.x.copy_(torch.tensor([0.0, 0.0, 1.0]))
    assert snapshot.changes() == Changes(written=("x",))
    snapshot.restore()
    assert not net.x.to(torch.complex128).any()


def test_only_the_view_that_was_written_is_named():
    net = nn.Module()
    whole = torch.zeros(4, 4)
    net.left, net.right = whole[:, :2], whole[:, 2:]
    snapshot = Snapshot.take(net)
    net.right.add_(1)
    assert snapshot.changes() == Changes(written=("right",))
    snapshot.restore()
    assert not whole.any()


def test_expanded_and_overlapping_tensors_are_restored():
    net = nn.Module()
    base = torch.zeros(3)
    net.mask, net.windows = base.expand(4, 3), torch.zeros(5).unfold(0, 3, 1)
    snapshot = Snapshot.take(net)
    base.add_(1)
    net.windows[0, 0] = 2
    assert set(snapshot.changes().written) == {"mask", "windows"}
    snapshot.restore()
    assert not net.mask.any()
    assert not net.windows.any()


def test_a_resized_tensor_gets_its_shape_and_values_back():
    net = nn.Module()
    net.x = torch.arange(3.0)
    snapshot = Snapshot.take(net)
    net.x.resize_(50)
    assert snapshot.changes().rebound == ("x",)
    snapshot.restore()
    assert net.x.tolist() == [0, 1, 2]


def test_meta_and_empty_tensors_are_seen_but_hold_no_bits():
    net = nn.Module()
    net.meta, net.empty = torch.empty(3, device="meta"), torch.empty(0)
    snapshot = Snapshot.take(net)
    assert snapshot.changes() == NONE
    assert snapshot.names == ("meta", "empty")
    assert [tuple(tensor.shape) for tensor in snapshot.tensors().values()] == [(3,), (0,)]
    net.empty = torch.empty(2)
    assert snapshot.changes() == Changes(rebound=("empty",))


def test_what_cannot_be_saved_is_named():
    net = nn.Module()
    net.sparse = torch.eye(2).to_sparse()
    net.vocabulary = list(range(5000))
    net.deep = functools.reduce(lambda inner, _: [inner], range(9), 1)
    snapshot = Snapshot.take(net)
    assert snapshot.not_seen == ("sparse", "vocabulary", "deep" + "[0]" * 8)
    assert snapshot.changes() == NONE
    snapshot.restore()


@pytest.mark.slow
def test_simulated_tensors_are_named_without_a_warning():
    from torch._subclasses.fake_tensor import FakeTensorMode

    net = nn.Module()
    with FakeTensorMode():
        net.simulated = torch.empty(2)
    assert Snapshot.take(net).not_seen == ("simulated",)


def test_wrappers_are_seen_by_their_inner_tensors():
    net = nn.Module()
    net.ragged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    snapshot = Snapshot.take(net)
    net.ragged.values().add_(1)
    assert snapshot.changes() == Changes(written=("ragged._values",))
    snapshot.restore()
    assert net.ragged.values().tolist() == [1, 1, 1, 1, 1]


def test_inference_tensors_are_restored_outside_inference_mode():
    net = nn.Module()
    with torch.inference_mode():
        net.x = torch.zeros(3)
    snapshot = Snapshot.take(net)
    with torch.inference_mode():
        net.x.add_(1)
    assert snapshot.changes() == Changes(written=("x",))
    snapshot.restore()
    assert net.x.tolist() == [0, 0, 0]
    assert not snapshot.tensors()["x"].is_inference()


def test_cycles_end():
    net = Net()
    net.loop = {"net": net}
    net.loop["self"] = net.loop
    snapshot = Snapshot.take(net)
    net.hidden.add_(1)
    assert snapshot.changes() == Changes(written=("hidden",))


@pytest.mark.parametrize("named", [True, False])
def test_opaque_inputs_are_part_of_the_state(named):
    cache, net = Cache(), nn.Linear(1, 1)
    snapshot = Snapshot.take(net, extras={"cache": cache} if named else [cache])
    cache.layers[0].keys.add_(1)
    cache.layers[1].keys = torch.ones(1)
    prefix = "cache" if named else "extras[0]"
    assert snapshot.changes() == Changes(written=(f"{prefix}.layers[0].keys",), rebound=(f"{prefix}.layers[1].keys",))
    snapshot.restore()
    assert not cache.layers[0].keys.any()
    assert cache.layers[1].keys.shape == (2, 3)
    assert set(live(net, extras=[cache])) == {"weight", "bias", "extras[0].layers[0].keys", "extras[0].layers[1].keys"}


class Fraction:
    __slots__ = ("numerator",)


class One(Fraction):
    __slots__ = ()
    numerator = 1


class Uncounted(tuple):
    __slots__ = ()

    def __len__(self):
        raise NotImplementedError


def test_attributes_that_hide_a_slot_and_containers_that_cannot_be_counted_are_walked():
    one, half = One(), Fraction()
    half.numerator = 2
    model = nn.Linear(2, 2)
    model.held = Uncounted((one, half, [1]))
    snapshot = Snapshot.take(model)
    half.numerator = 3
    model.held[2].append(2)
    assert snapshot.changes().python == ("held[1].numerator: 2 -> 3", "len(held[2]): 1 -> 2")
    snapshot.restore()
    assert (half.numerator, model.held[2], one.numerator) == (2, [1], 1)
    assert not snapshot.changes()


def test_slots_deques_and_ordered_dicts_are_put_back():
    net = nn.Module()
    net.slotted, net.recent, net.ordered = Slotted(), deque([torch.zeros(1)], maxlen=2), OrderedDict(a=1, b=2)
    snapshot = Snapshot.take(net)
    net.slotted.bump()
    net.slotted.value.add_(1)
    net.recent.append(torch.ones(1))
    net.ordered.move_to_end("a")
    del net.ordered["b"]
    found = snapshot.changes()
    assert found.written == ("slotted.value",)
    assert found.added == ("recent[1]",)
    assert set(found.python) == {
        "slotted._Slotted__hidden: 1 -> 2", "slotted.other: not there -> 'new'",
        "len(recent): 1 -> 2", "len(ordered): 2 -> 1",
    }  # fmt: skip
    snapshot.restore()
    assert snapshot.changes() == NONE
    assert list(net.ordered) == ["a", "b"]
    assert not hasattr(net.slotted, "other")


def test_long_values_are_cut_in_the_message():
    net = nn.Module()
    net.text = ""
    snapshot = Snapshot.take(net)
    net.text = "x" * 100
    assert snapshot.changes().python == (f"text: '' -> '{'x' * 59}...",)


def test_a_plain_value_that_is_nan_is_unchanged():
    net = nn.Module()
    net.scale = float("nan")
    snapshot = Snapshot.take(net)
    net.scale = float("nan")
    assert snapshot.changes() == NONE


def test_what_a_function_closes_over_is_state():
    net, calls = Net(), 0

    def call(x):
        nonlocal calls
        calls += 1
        return net(x)

    snapshot = Snapshot.take(call)
    assert "net.inner.0.weight" in snapshot.names
    call(torch.ones(1, 3))
    assert snapshot.changes() == Changes(python=("calls: 0 -> 1",))
    snapshot.restore()
    assert calls == 0


def test_objects_of_the_test_framework_and_of_torch_are_left_alone(request):
    generator = torch.Generator()
    net = nn.Module()
    net.request, net.generator, net.optimiser = request, generator, torch.optim.SGD([torch.zeros(1)], lr=0.1)
    assert Snapshot.take(net).names == ()


class Holder:
    def __init__(self):
        self.net = Net()
        self.more = [nn.Linear(1, 1)]

    def run(self, x):
        return self.net(x)

    def __call__(self, x):
        return self.net(x)


def test_modules_are_found_behind_any_callable():
    net, holder = Net(), Holder()
    assert modules_of(net) == [net]
    assert modules_of(net.forward) == [net]
    assert modules_of(functools.partial(net, 1)) == [net]
    assert modules_of(functools.partial(lambda model, x: model(x), net)) == [net]
    assert modules_of(lambda x: net(x)) == [net]
    assert modules_of(torch.no_grad()(lambda x: net(x))) == [net]
    assert modules_of(holder.run) == [holder.net, holder.more[0]]
    assert modules_of(holder) == [holder.net, holder.more[0]]
    assert modules_of(torch.relu) == []
    assert modules_of(lambda x: GLOBAL(x)) == []


GLOBAL = nn.Linear(1, 1)


def test_the_state_behind_a_method_has_the_names_of_the_module():
    net = Net()
    assert Snapshot.take(net.forward).names == Snapshot.take(net).names


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_scripted_modules_are_seen_too():
    net = torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2))
    snapshot = Snapshot.take(net)
    with torch.no_grad():
        net.weight.add_(1)
    assert snapshot.changes() == Changes(written=("weight",))
    snapshot.restore()
    assert snapshot.changes() == NONE


@pytest.mark.slow
def test_a_compiled_module_is_seen_through():
    net = torch.compile(nn.Linear(2, 2), backend="eager")
    assert Snapshot.take(net).names == ("_orig_mod.weight", "_orig_mod.bias")


def test_two_snapshots_compare_eager_with_replay():
    net = Net()
    before = Snapshot.take(net)
    net.steps.add_(1)
    net.calls += 1
    after_eager = Snapshot.take(net)
    before.restore()
    net.steps.add_(1)  # a replay writes, and runs no Python
    assert after_eager.changes() == Changes(python=("calls: 1 -> 0",))


@pytest.mark.slow
def test_the_static_cache_of_transformers_is_state():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=11, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2
    )
    net = transformers.LlamaForCausalLM(config).eval()
    cache = transformers.StaticCache(config=config, max_cache_len=8)
    tokens = torch.tensor([[1, 2]])
    with torch.inference_mode():
        net(tokens, past_key_values=cache)
        snapshot = Snapshot.take(net, extras={"cache": cache})
        net(tokens, past_key_values=cache)
        written = snapshot.changes().written
        assert {"cache.layers[0].keys", "cache.layers[1].values"} <= set(written)
        assert snapshot.changes() == Changes(written=written)
        snapshot.restore()
        assert snapshot.changes() == NONE


class Unreadable:
    """As a lazy proxy whose target is gone."""

    @property
    def __class__(self):
        raise LookupError("gone")


class NamelessKey:
    def __repr__(self):
        raise ValueError("no name")


def test_an_exception_of_a_library_is_told_as_one_of_this_walk():
    model = nn.Linear(2, 2)
    vars(model)["proxy"] = Unreadable()  # torch asks for the class of what is assigned
    model.table = {NamelessKey(): 1}
    snapshot = Snapshot.take(model)
    assert snapshot.not_seen == (
        "proxy (LookupError in Unreadable, as this plugin looked at it)",
        "table (ValueError in dict, as this plugin looked at it)",
    )
    model.table[1] = 2
    snapshot.restore()
    assert list(model.table.values()) == [1]
