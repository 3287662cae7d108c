"""Correct runners, each in a style that serving code has. A fault in ``faults.py`` is a small change of one of them."""

from __future__ import annotations

import threading
from collections import OrderedDict

import torch
from torch import nn

WIDTH = 16
SIZES = (1, 2, 4, 8)


class Mlp(nn.Module):
    """Two layers, and a scale for each row."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, rows, scale=None):
        result = self.last(torch.relu(self.first(rows)))
        return result if scale is None else result * scale[:, None]


class Centred(nn.Module):
    """Rows see each other: the mean of the valid rows is taken off, so padding must be marked as invalid."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, rows, valid):
        result = self.layer(rows) * valid[:, None]
        return (result - result.sum(0) / valid.sum().clamp(min=1)) * valid[:, None]


class Attention(nn.Module):
    """One decode step over a cache of slots: each row has a slot to write, a table of slots and a length."""

    def __init__(self, sequences=8, length=8):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.embed = nn.Embedding(50, WIDTH)
        self.length, self.spare = length, sequences * length
        self.register_buffer("keys", torch.zeros(sequences * length + 1, WIDTH))
        self.register_buffer("values", torch.zeros(sequences * length + 1, WIDTH))

    def forward(self, tokens, slots, tables, lengths):
        hidden = self.embed(tokens)
        self.keys.index_copy_(0, slots, self.k(hidden))
        self.values.index_copy_(0, slots, self.v(hidden))
        keys, values = self.keys[tables], self.values[tables]
        scores = (self.q(hidden)[:, None] * keys).sum(-1)
        places = torch.arange(self.length, device=scores.device)
        scores = scores.masked_fill(places >= lengths[:, None], float("-inf"))
        return (scores.softmax(-1)[..., None] * values).sum(1) + hidden


def decode_inputs(generator, rows=8, sequences=8, length=8):
    """Tokens, slots, tables and lengths of ``rows`` sequences, each with slots of its own."""
    chosen = torch.randperm(sequences, generator=generator)[:rows]
    lengths = torch.randint(1, length + 1, (rows,), generator=generator)
    tables = chosen[:, None] * length + torch.arange(length)
    tokens = torch.randint(0, 50, (rows,), generator=generator)
    return tuple(each.cuda() for each in (tokens, tables[torch.arange(rows), lengths - 1], tables, lengths))


class Recurrent(nn.Module):
    """A state for each row that every call moves on."""

    def __init__(self, rows=8):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("state", torch.zeros(rows + 1, WIDTH))

    def forward(self, rows, places):
        state = torch.tanh(self.state[places] * 0.5 + self.layer(rows))
        self.state.index_copy_(0, places, state)
        return state


class Adapter(nn.Module):
    """A low-rank addition to a layer, switched in place."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("down", torch.randn(WIDTH, 2) / 4)
        self.register_buffer("up", torch.randn(2, WIDTH) / 4)
        self.register_buffer("strength", torch.tensor(1.0))

    def switch(self, seed):
        generator = torch.Generator().manual_seed(seed)
        for name in ("down", "up"):
            value = getattr(self, name)
            value.copy_(torch.randn(value.shape, generator=generator) / 4)
        self.strength.fill_(0.5 + seed)

    def forward(self, rows):
        return self.base(rows) + (rows @ self.down @ self.up) * self.strength


def warmed(call):
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(side)


class Buckets:
    """Static buffers for each size; a batch takes the next size up, and gets its own rows as copies."""

    sizes = SIZES

    def __init__(self, model, *example):
        self.model, self.pool, self.graphs = model, None, {}
        with torch.no_grad():
            for size in sorted(self.sizes, reverse=True):
                self.graphs[size] = self.capture(size, example)

    def buffers(self, size, example):
        return [torch.zeros(size, *each.shape[1:], dtype=each.dtype, device=each.device) for each in example]

    def run_model(self, buffers):
        return self.model(*buffers)

    def capture(self, size, example):
        buffers = self.buffers(size, example)
        warmed(lambda: self.run_model(buffers))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            output = self.run_model(buffers)
        self.pool = self.pool or graph.pool()
        return graph, buffers, output

    def size_for(self, rows):
        return next((size for size in self.sizes if size >= rows), None)

    def fill(self, buffers, args, rows):
        for buffer, value in zip(buffers, args, strict=True):
            buffer[:rows].copy_(value)
            buffer[rows:].zero_()

    def result(self, output, rows):
        return output[:rows].clone()

    def __call__(self, *args):
        rows = len(args[0])
        size = self.size_for(rows)
        if size is None:
            return self.model(*args)
        graph, buffers, output = self.graphs[size]
        with torch.no_grad():
            self.fill(buffers, args, rows)
            graph.replay()
            return self.result(output, rows)


class Engine(Buckets):
    """A decoder's engine: padding rows write a spare slot, and outputs are lent until the next call."""

    def fill(self, buffers, args, rows):
        tokens, slots, tables, lengths = buffers
        for buffer, value in zip(buffers, args, strict=True):
            buffer[:rows].copy_(value)
        tokens[rows:].zero_()
        slots[rows:].fill_(self.model.spare)
        tables[rows:].fill_(self.model.spare)
        lengths[rows:].fill_(1)

    def buffers(self, size, example):
        buffers = super().buffers(size, example)
        buffers[1].fill_(self.model.spare)
        buffers[2].fill_(self.model.spare)
        buffers[3].fill_(1)
        return buffers

    def result(self, output, rows):
        return output[:rows]


class StatefulBuckets(Buckets):
    """Padding rows move a spare row of the state."""

    def buffers(self, size, example):
        buffers = super().buffers(size, example)
        buffers[1].fill_(8)
        return buffers

    def fill(self, buffers, args, rows):
        super().fill(buffers, args, rows)
        buffers[1][rows:].fill_(8)


class ShapeCache:
    """A graph for each shape, made at its first call; the oldest goes when there are too many."""

    limit = 8

    def __init__(self, model):
        self.model, self.graphs = model, OrderedDict()

    def key(self, args):
        return tuple((each.shape, each.dtype) for each in args)

    def __call__(self, *args):
        with torch.no_grad():
            key = self.key(args)
            if key not in self.graphs:
                self.make_room()
                self.graphs[key] = self.capture(args)
            self.graphs.move_to_end(key)
            graph, buffers, output = self.graphs[key]
            for buffer, value in zip(buffers, args, strict=True):
                buffer.copy_(value)
            graph.replay()
            return output.clone()

    def make_room(self):
        while len(self.graphs) >= self.limit:
            torch.cuda.synchronize()
            _, (graph, _, _) = self.graphs.popitem(last=False)
            graph.reset()

    def capture(self, args):
        buffers = [each.clone() for each in args]
        warmed(lambda: self.model(*buffers))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = self.model(*buffers)
        return graph, buffers, output


class Pieces:
    """Two graphs with an eager part between them, all over buffers that stay."""

    def __init__(self, model, example):
        self.model = model
        with torch.no_grad():
            self.rows = torch.zeros_like(example)
            warmed(lambda: model(self.rows))
            self.first, self.last = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.first):
                self.hidden = model.first(self.rows)
            self.between = torch.relu(self.hidden)
            with torch.cuda.graph(self.last, pool=self.first.pool()):
                self.output = model.last(self.between)

    def middle(self):
        self.between.copy_(torch.relu(self.hidden))

    def __call__(self, rows):
        with torch.no_grad():
            self.rows.copy_(rows)
            self.first.replay()
            self.middle()
            self.last.replay()
            return self.output.clone()


class Server(Buckets):
    """Threads share the graphs under a lock. Each waits for its result before it lets go of the buffers."""

    def __init__(self, model, *example):
        super().__init__(model, *example)
        self.lock = threading.Lock()

    def __call__(self, *args):
        with self.lock:
            result = super().__call__(*args)
            torch.cuda.current_stream().synchronize()
            return result
