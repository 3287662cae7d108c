"""With a seed, a missing wait shows as a wrong number. A program that waits is right in every order."""

from __future__ import annotations

import cuda_emulator
import pytest
import torch

SEEDS = range(20)


def wrong_results(program):
    """For how many seeds a program says that its result was wrong."""
    count = 0
    for seed in SEEDS:
        with cuda_emulator.asynchronous(seed):
            count += not program()
            torch.cuda.synchronize()
    return count


def doubled_on_a_side_stream(*, waits_before, waits_after):
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    rows = torch.zeros(100, device="cuda")
    doubled = torch.zeros(100, device="cuda")
    torch.cuda.synchronize()
    rows.fill_(1)
    if waits_before:
        side.wait_stream(main)
    with torch.cuda.stream(side):
        torch.mul(rows, 2, out=doubled)
    if waits_after:
        main.wait_stream(side)
    return doubled.sum().item() == 200


def test_a_program_that_waits_is_right_in_every_order():
    assert wrong_results(lambda: doubled_on_a_side_stream(waits_before=True, waits_after=True)) == 0


@pytest.mark.parametrize(("before", "after"), [(False, True), (True, False)])
def test_a_missing_wait_stream_shows(before, after):
    assert wrong_results(lambda: doubled_on_a_side_stream(waits_before=before, waits_after=after)) > 0


def freed_before_its_reader(*, records):
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    rows = torch.ones(1 << 20, device="cuda")
    side.wait_stream(main)
    with torch.cuda.stream(side):
        doubled = rows * 2
    if records:
        rows.record_stream(side)
    del rows
    torch.full((1 << 20,), 7.0, device="cuda")
    main.wait_stream(side)
    return bool((doubled == 2).all().item())


def test_a_missing_record_stream_shows():
    assert wrong_results(lambda: freed_before_its_reader(records=True)) == 0
    assert wrong_results(lambda: freed_before_its_reader(records=False)) > 0


def read_from_pinned_memory(*, waits):
    pinned = torch.zeros(100).pin_memory()
    pinned.copy_(torch.ones(100, device="cuda"), non_blocking=True)
    if waits:
        torch.cuda.current_stream().synchronize()
    return pinned.sum().item() == 100


def test_a_missing_synchronise_before_the_host_reads_shows():
    assert wrong_results(lambda: read_from_pinned_memory(waits=True)) == 0
    assert wrong_results(lambda: read_from_pinned_memory(waits=False)) > 0


def written_before_it_is_copied(*, waits):
    pinned = torch.ones(100).pin_memory()
    rows = pinned.to("cuda", non_blocking=True)
    if waits:
        torch.cuda.current_stream().synchronize()
    pinned.fill_(5)
    return rows.sum().item() == 100


def test_pinned_memory_is_read_when_the_stream_comes_to_it():
    assert wrong_results(lambda: written_before_it_is_copied(waits=True)) == 0
    assert wrong_results(lambda: written_before_it_is_copied(waits=False)) > 0


def test_pageable_memory_is_read_before_the_call_returns():
    def program():
        pageable = torch.ones(100)
        rows = pageable.to("cuda", non_blocking=True)
        pageable.fill_(5)
        return rows.sum().item() == 100

    assert wrong_results(program) == 0


def joined_inside_a_graph(*, waits):
    rows, doubled = torch.ones(100, device="cuda"), torch.zeros(100, device="cuda")
    torch.cuda.synchronize()
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            torch.mul(rows, 2, out=doubled)
        if waits:
            main.wait_stream(side)
        total = doubled.sum()
        main.wait_stream(side)
    graph.replay()
    return total.item() == 200


def test_the_nodes_of_a_graph_keep_only_their_dependencies():
    assert wrong_results(lambda: joined_inside_a_graph(waits=True)) == 0
    assert wrong_results(lambda: joined_inside_a_graph(waits=False)) > 0


def test_an_event_that_is_not_reached_is_not_ready():
    with cuda_emulator.asynchronous(0):
        event = torch.cuda.Event()
        torch.ones(10, device="cuda").mul_(2)
        event.record()
        answers = [event.query() for _ in range(50)]
        assert answers[-1]
        assert answers == sorted(answers)


def test_the_same_seed_gives_the_same_order():
    def outcomes():
        found = []
        for seed in SEEDS:
            with cuda_emulator.asynchronous(seed):
                found.append(doubled_on_a_side_stream(waits_before=False, waits_after=True))
                torch.cuda.synchronize()
        return found

    assert outcomes() == outcomes()
    assert not cuda_emulator.is_asynchronous()
