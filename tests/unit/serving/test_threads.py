"""Calls from several threads at once: every caller gets the answer to his own question."""

from __future__ import annotations

import os
import signal
import threading

import pytest
import torch
from torch import nn

from pytest_cudagraph import CudagraphError, GraphRunner, create_integrated_compiler

THREADS = 4
CALLS = 50


def in_threads(work):
    """Run ``work(number)`` in all threads, which start at the same moment; raise what the first of them raised."""
    barrier, errors = threading.Barrier(THREADS), []

    def run(number):
        barrier.wait()
        try:
            work(number)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("options", [{}, {"capture": "lazy"}, {"max_graphs": 2}], ids=["now", "lazy", "evicting"])
def test_concurrent_calls_get_their_own_answers(options):
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    calls = CALLS if not options.get("max_graphs") else 5
    with GraphRunner(model, torch.randn(2, 4), device="cpu", batch_sizes=(1, 2, 4), **options) as run:

        def work(number):
            source = torch.Generator().manual_seed(number)
            for call in range(calls):
                x = torch.randn(1 + (number + call) % 5, 4, generator=source)
                with torch.inference_mode():
                    expected = model(x)
                torch.testing.assert_close(run(x), expected)

        in_threads(work)
        assert run.statistics.calls == THREADS * calls


def test_an_answer_is_copied_while_the_lock_is_held():
    """Else a second caller's replay could overwrite it first."""
    run, gone_through = GraphRunner(lambda x: x * 1, torch.zeros(1, 1), device="cpu", batch_sizes=(1,)), []
    own = run._own

    def own_and_look(output):
        other = threading.Thread(target=lambda: gone_through.append(run._lock.acquire(blocking=False)))
        other.start()
        other.join()
        return own(output)

    run._own = own_and_look
    assert run(torch.ones(1, 1)).item() == 1
    assert gone_through == [False]


def test_a_call_gets_its_answer_or_hears_that_the_runner_is_closed():
    run, heard = GraphRunner(lambda x: x + 1, torch.zeros(2, 1), device="cpu", batch_sizes=(2,)), []

    def work(number):
        if number == 0:
            run.close()
            return
        while True:
            try:
                assert run(torch.zeros(2, 1)).tolist() == [[1.0], [1.0]]
            except CudagraphError as error:
                heard.append(str(error))
                return

    in_threads(work)
    assert heard == ["this GraphRunner is closed and has released its graphs; make another one"] * (THREADS - 1)


def answers_in_a_child(call):
    """Whether a forked child ends with ``call`` before ten seconds have passed."""
    child = os.fork()
    if not child:
        try:
            signal.alarm(10)
            call()
        finally:
            os._exit(0)
    return os.waitpid(child, 0)[1] == 0


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("serve", ["runner", "drop-in"])
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_that_is_forked_while_another_thread_is_in_a_call_answers(serve):
    inside, go_on, blocks = threading.Event(), threading.Event(), [False]

    def model(x):
        if blocks[0] and threading.current_thread() is not threading.main_thread():
            inside.set()
            go_on.wait()
        return x * 2

    x = torch.ones(3, 1)  # beyond the captured size, so that a call runs the model
    if serve == "runner":
        run = GraphRunner(model, torch.zeros(1, 1), device="cpu", batch_sizes=(1,))
    else:
        compiler = create_integrated_compiler(batch_sizes=(1,), device="cpu")
        run = compiler.compile_model_aot(model, (torch.zeros(1, 1),), {"model_name": "doubles"}, "none")
    blocks[0] = True
    other = threading.Thread(target=run, args=(x,))
    other.start()
    try:
        assert inside.wait(10)
        assert answers_in_a_child(lambda: run(x))
    finally:
        go_on.set()
        other.join()
