"""Planted faults: each a small change of a correct runner, of a kind that users of CUDA graphs report in public.

Each fault says what is to be found: the hazard's id. ``allclose`` on the example finds few of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from tests.gpu.own_graphs.runners import (
    WIDTH,
    Adapter,
    Attention,
    Buckets,
    Centred,
    Engine,
    Mlp,
    Pieces,
    Recurrent,
    Server,
    ShapeCache,
    StatefulBuckets,
    decode_inputs,
    warmed,
)
from torch import nn


@dataclass
class Case:
    """A runner to prove: how it is made, its eager twin, its example, further options of the proof, what is found."""

    make: Any
    eager: Any
    args: tuple[Any, ...]
    options: dict[str, Any] = field(default_factory=dict)
    hazards: tuple[str, ...] = ()


CORRECT: dict[str, Any] = {}
FAULTS: dict[str, Any] = {}


def correct(function):
    CORRECT[function.__name__] = function
    return function


def fault(*hazards):
    """The ids that may be told first. One of them must be."""

    def plant(function):
        def made():
            case = function()
            case.hazards = hazards
            return case

        FAULTS[function.__name__] = made
        return function

    return plant


def model_of(kind):
    torch.manual_seed(0)
    return kind().cuda().eval()


def rows(count=8, width=WIDTH):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(1)).cuda()


def mlp(kind, *more, **options):
    model = model_of(Mlp)
    return Case(lambda: kind(model, rows(), *more), model, (rows(), *more), options)


def decoder(kind, **options):
    model, example = model_of(Attention), decode_inputs(torch.Generator().manual_seed(0))
    options = {"draw": decode_inputs, "outputs": "borrowed", **options}
    return Case(lambda: kind(model, *example), model, example, options)


def recurrent_inputs(generator):
    return torch.randn(8, WIDTH, generator=generator).cuda(), torch.randperm(8, generator=generator).cuda()


def recurrent(kind, **options):
    model, example = model_of(Recurrent), recurrent_inputs(torch.Generator().manual_seed(0))
    return Case(lambda: kind(model, *example), model, example, {"draw": recurrent_inputs, **options})


def centred(kind):
    model, valid = model_of(Centred), torch.ones(8).cuda()

    def draw(generator):
        return torch.randn(8, WIDTH, generator=generator).cuda(), torch.ones(8).cuda()

    return Case(lambda: kind(model, rows(), valid), model, (rows(), valid), {"draw": draw})


def cache(kind, **options):
    model = model_of(Mlp)
    return Case(lambda: kind(model), model, (rows(),), options)


# ---- correct
@correct
def buckets():
    return mlp(Buckets)


@correct
def buckets_with_a_second_argument():
    return mlp(Buckets, torch.ones(8).cuda())


@correct
def buckets_that_mark_padding():
    return centred(Buckets)


@correct
def engine_with_a_cache():
    return decoder(Engine)


@correct
def state_for_each_row():
    return recurrent(StatefulBuckets)


@correct
def cache_of_shapes():
    return cache(ShapeCache)


@correct
def two_pieces():
    model = model_of(Mlp)
    return Case(lambda: Pieces(model, rows()), model, (rows(),), {"batch_sizes": (8,)})


@correct
def server_with_a_lock():
    return mlp(Server, threads=3)


@correct
def adapter_switched_in_place():
    model = model_of(Adapter)
    return Case(lambda: Buckets(model, rows()), model, (rows(),), {"between": lambda: model.switch(3)})


@correct
def weights_loaded_in_place():
    model = model_of(Mlp)
    other = {name: value * 1.5 for name, value in model.state_dict().items()}
    return Case(lambda: Buckets(model, rows()), model, (rows(),), {"between": lambda: model.load_state_dict(other)})


@correct
def graphed_callable():
    model = model_of(Mlp)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return Case(
        lambda: torch.cuda.make_graphed_callables(model.forward, (rows(),)),
        model,
        (rows(),),
        {"batch_sizes": (8,), "outputs": "borrowed"},
    )


@correct
def inputs_on_another_stream_that_waits():
    return mlp(Buckets, streams=True)


# ---- what the host prepares is stale
@fault("wrong")
def padding_keeps_the_rows_of_an_earlier_request():
    class Faulty(Buckets):
        def fill(self, buffers, args, count):
            for buffer, value in zip(buffers, args, strict=True):
                buffer[:count].copy_(value)

    return centred(Faulty)


@fault("wrong")
def only_one_of_the_padded_fields_is_cleared():
    class Faulty(Engine):
        def fill(self, buffers, args, count):
            slots = buffers[1]
            for buffer, value in zip(buffers, args, strict=True):
                buffer[:count].copy_(value)
            buffers[3][count:].fill_(1)
            slots[count:] = slots[count:]  # padding rows still write the slots of earlier sequences

    return decoder(Faulty)


@fault("wrong", "baked-scalar")
def longest_length_is_a_number_of_the_capture():
    class Limited(Attention):
        limit = 8

        def forward(self, tokens, slots, tables, lengths):
            return super().forward(tokens, slots, tables, lengths.clamp(max=self.limit))

    class Faulty(Engine):
        def __init__(self, model, *example):
            model.limit = 3
            super().__init__(model, *example)
            model.limit = 8

    model, example = model_of(Limited), decode_inputs(torch.Generator().manual_seed(0))
    return Case(lambda: Faulty(model, *example), model, example, {"draw": decode_inputs, "outputs": "borrowed"})


@fault("dead-memory", "unused-argument")
def buffer_is_replaced_in_place_of_written():
    class Faulty(Buckets):
        def fill(self, buffers, args, count):
            super().fill(buffers[:1], args[:1], count)
            padded = torch.zeros_like(buffers[1])
            padded[:count] = args[1]
            buffers[1] = padded

    return mlp(Faulty, torch.ones(8).cuda())


@fault("unused-argument", "wrong")
def argument_is_forgotten():
    class Faulty(Buckets):
        def buffers(self, size, example):
            return [torch.ones(size, *each.shape[1:], device="cuda") for each in example]

        def fill(self, buffers, args, count):
            super().fill(buffers[:1], args[:1], count)

    return mlp(Faulty, torch.ones(8).cuda())


@fault("wrong")
def padding_moves_the_state_of_a_live_row():
    class Faulty(StatefulBuckets):
        def fill(self, buffers, args, count):
            Buckets.fill(self, buffers, args, count)  # padding rows point at row 0

    return recurrent(Faulty)


@fault("unused-argument", "wrong")
def copied_after_the_replay():
    class Faulty(Buckets):
        def __call__(self, *args):
            graph, buffers, output = self.graphs[self.size_for(len(args[0]))]
            with torch.no_grad():
                graph.replay()
                self.fill(buffers, args, len(args[0]))
                return self.result(output, len(args[0]))

    return mlp(Faulty)


@fault("wrong")
def one_row_is_broadcast_into_the_buffer():
    class Faulty(Buckets):
        def fill(self, buffers, args, count):
            buffers[0].copy_(args[0]) if count == 1 else super().fill(buffers, args, count)

        def size_for(self, count):
            return 8

        def result(self, output, count):
            return output.clone() if count == 1 else output[:count].clone()

    return mlp(Faulty)


@fault("wrong")
def the_graph_of_the_first_size_serves_all():
    class Faulty(Buckets):
        def size_for(self, count):
            return max(size for size in self.sizes if size <= count)

        def fill(self, buffers, args, count):
            buffers[0].copy_(args[0][: len(buffers[0])])

        def result(self, output, count):
            return nn.functional.pad(output, (0, 0, 0, count - len(output)))

    return mlp(Faulty)


@fault("wrong")
def padded_rows_are_returned():
    class Faulty(Buckets):
        def result(self, output, count):
            return output.clone()

    return mlp(Faulty)


@fault("baked-scalar")
def a_number_of_the_host_is_read_at_capture():
    class Faulty(Buckets):
        def run_model(self, buffers):
            return self.model(buffers[0]) * float(self.strength)

        def __init__(self, model, *example):
            self.strength = 1.0
            super().__init__(model, *example)

    model = model_of(Mlp)
    state = {"strength": 1.0}

    class Reference(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x):
            return self.model(x) * state["strength"]

    made = []

    def make():
        made.append(Faulty(model, rows()))
        return made[-1]

    def between():
        state["strength"] = made[-1].strength = 0.5

    return Case(make, Reference(), (rows(),), {"between": between})


# ---- addresses move
@fault("stale-weights", "dead-memory", "wrong")
def weights_come_back_at_another_address():
    model = model_of(Mlp)

    def between():
        for parameter in model.parameters():
            parameter.data = parameter.data * 1.5

    return Case(lambda: Buckets(model, rows()), model, (rows(),), {"between": between})


@fault("stale-weights", "dead-memory", "wrong")
def a_scale_is_a_new_tensor_at_each_sync():
    model = model_of(Adapter)

    def between():
        model.strength = torch.tensor(2.0, device="cuda")

    return Case(lambda: Buckets(model, rows()), model, (rows(),), {"between": between})


@fault("stale-weights", "wrong")
def weights_are_merged_before_the_capture():
    class Merged(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.weight = (model.base.weight + (model.down @ model.up).T * model.strength).detach().clone()
            self.bias = model.base.bias

        def forward(self, x):
            return nn.functional.linear(x, self.weight, self.bias)

    model = model_of(Adapter)
    return Case(lambda: Buckets(Merged(model), rows()), model, (rows(),), {"between": lambda: model.switch(2)})


@fault("dead-memory", "wrong")
def static_buffer_is_freed():
    class Faulty(Buckets):
        def run_model(self, buffers):
            return super().run_model(buffers) * self.scale

        def capture(self, size, example):
            self.scale = torch.ones(WIDTH, device="cuda")
            captured = super().capture(size, example)
            self.scale = None
            return captured

    return mlp(Faulty)


@fault("dead-memory", "wrong")
def input_is_kept_by_nobody():
    class Faulty(ShapeCache):
        def capture(self, args):
            graph, _, output = super().capture(args)
            return graph, [torch.empty_like(each) for each in args], output

    return cache(Faulty, batch_sizes=(2, 4, 8))


@fault("wrong", "dead-memory")
def the_middle_returns_a_fresh_tensor():
    class Faulty(Pieces):
        def middle(self):
            self.between = torch.relu(self.hidden)

    model = model_of(Mlp)
    return Case(lambda: Faulty(model, rows()), model, (rows(),), {"batch_sizes": (8,)})


# ---- the graph is not used
@fault("eager-fallback")
def sizes_between_the_captured_ones_run_eagerly():
    class Faulty(Buckets):
        def size_for(self, count):
            return count if count in self.sizes else None

    return mlp(Faulty, batch_sizes=(1, 2, 3, 4, 8))


@fault("eager-fallback")
def eager_for_ever_once_the_cache_was_full():
    class Faulty(ShapeCache):
        limit = 2

        def __call__(self, *args):
            if self.key(args) not in self.graphs and len(self.graphs) >= self.limit:
                return self.model(*args)
            return super().__call__(*args)

    return cache(Faulty, batch_sizes=(1, 2, 4, 8))


@fault("recaptures")
def the_key_never_hits():
    class Faulty(ShapeCache):
        def key(self, args):
            self.count = getattr(self, "count", 0) + 1
            return self.count, *super().key(args)

    return cache(Faulty, batch_sizes=(2, 8))


@fault("recaptures")
def the_cache_is_too_small_for_the_sizes():
    class Faulty(ShapeCache):
        limit = 2

    return cache(Faulty, batch_sizes=(1, 2, 3, 4))


@fault("not-captured")
def a_refused_capture_is_swallowed():
    class Reads(Mlp):
        def forward(self, x):
            return x if x.abs().sum() > 1e9 else super().forward(x)

    class Faulty(ShapeCache):
        def __call__(self, *args):
            try:
                return super().__call__(*args)
            except RuntimeError:
                torch.cuda.synchronize()
                return self.model(*args)

    model = model_of(Reads)
    return Case(lambda: Faulty(model), model, (rows(),), {"batch_sizes": (8,)})


@fault("no-graph", "eager-fallback")
def nothing_was_captured():
    model = model_of(Mlp)
    return Case(lambda: model.forward, model, (rows(),), {})


# ---- memory
@fault("memory-growth", "recaptures")
def graphs_are_evicted_and_never_released():
    class Faulty(ShapeCache):
        limit = 1

        def __init__(self, model):
            super().__init__(model)
            self.kept = []

        def make_room(self):
            while len(self.graphs) >= self.limit:
                self.kept.append(self.graphs.popitem(last=False))

    return cache(Faulty, batch_sizes=(2, 8))


@fault("memory-growth")
def every_call_keeps_its_result():
    class Faulty(Buckets):
        def result(self, output, count):
            self.kept = [*getattr(self, "kept", []), torch.empty(1 << 20, device="cuda")]
            return super().result(output, count)

    return mlp(Faulty)


# ---- outputs
@fault("overwritten-output")
def the_static_output_is_handed_out():
    class Faulty(Buckets):
        def result(self, output, count):
            return output[:count]

    return mlp(Faulty)


@fault("overwritten-output")
def a_cached_output_is_handed_out():
    class Faulty(ShapeCache):
        def __call__(self, *args):
            super().__call__(*args)
            return self.graphs[self.key(args)][2]

    return cache(Faulty)


# ---- streams, threads, random numbers
@fault("wrong")
def part_of_the_work_runs_outside_of_the_capture():
    class Faulty(Buckets):
        def capture(self, size, example):
            buffers = self.buffers(size, example)
            bias = torch.zeros(size, WIDTH, device="cuda")
            warmed(lambda: self.run_model(buffers))
            bias.copy_(buffers[0] * 0.5)  # once, before the capture; eager adds it at every call
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self.pool):
                output = self.run_model(buffers) + bias
            self.pool = self.pool or graph.pool()
            self.keep = [*getattr(self, "keep", []), bias]
            return graph, buffers, output

    model = model_of(Mlp)

    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x):
            return self.model(x) + x * 0.5

    return Case(lambda: Faulty(model, rows()), Residual(), (rows(),), {})


@fault("unused-argument", "wrong")
def a_sample_is_drawn_once():
    class Sampled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x, noise):
            return self.layer(x) + noise

    class Faulty(Buckets):
        def fill(self, buffers, args, count):
            super().fill(buffers[:1], args[:1], count)  # the noise of the capture stays

    model = model_of(Sampled)
    return Case(lambda: Faulty(model, rows(), rows()), model, (rows(), rows()), {})


@fault("wrong")
def the_dtype_is_not_in_the_key():
    class Faulty(ShapeCache):
        def key(self, args):
            return tuple(each.shape for each in args)

        def capture(self, args):
            return super().capture([each.round() for each in args])

        def __call__(self, *args):
            return super().__call__(*(each.round() for each in args))

    return cache(Faulty)


@fault("wrong")
def dropout_was_captured_in_training():
    class Drops(Mlp):
        def forward(self, x):
            return super().forward(nn.functional.dropout(x, 0.5, self.training))

    class Faulty(Buckets):
        def __init__(self, model, *example):
            model.train()
            super().__init__(model, *example)
            model.eval()

    model = model_of(Drops)
    return Case(lambda: Faulty(model, rows()), model, (rows(),), {})


@fault("stale-weights", "wrong")
def cast_weights_of_the_warm_up_are_read():
    class Faulty(Buckets):
        def __init__(self, model, *example):
            self.cast = {name: value.detach().bfloat16() for name, value in model.named_parameters()}
            super().__init__(model, *example)

        def run_model(self, buffers):
            halves = [each.bfloat16() for each in buffers]
            return torch.func.functional_call(self.model, self.cast, tuple(halves)).float()

    model = model_of(Mlp)
    other = {name: value * 1.5 for name, value in model.state_dict().items()}
    return Case(
        lambda: Faulty(model, rows()),
        model,
        (rows(),),
        {"between": lambda: model.load_state_dict(other), "rtol": 5e-2, "atol": 5e-2},
    )
