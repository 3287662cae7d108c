"""Wraps a function, a coroutine function or a generator function, so that each of its calls is timed."""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncGenerator, Callable, Generator
from typing import Any

from pytest_cudagraph.serving.calls.timed_call import CallSink, TimedCall

StartCall = Callable[[tuple[Any, ...], dict[str, Any]], TimedCall]
"""Makes the timed call for the arguments of one call."""
CountTokens = Callable[[Any], int]
"""Counts the tokens of a result, or of one item of a generator."""


def watched(function: Callable[..., Any], sink: CallSink, start: StartCall, count: CountTokens | None) -> Any:
    """``function`` with timed calls. While ``sink`` is off, nothing is timed.

    A coroutine's time is that from its start to its end. A generator's time is that of its own code, without the
    consumer's time between two items. Its call ends when the generator ends, raises or is closed.
    """
    wrap = _wrap_plain
    # A partial and an object with an async __call__ are asked too.
    for each in (function, getattr(function, "__call__", None)):  # noqa: B004
        if inspect.iscoroutinefunction(each):
            wrap = _wrap_coroutine
        elif inspect.isgeneratorfunction(each):
            wrap = _wrap_generator
        elif inspect.isasyncgenfunction(each):
            wrap = _wrap_async_generator
    return functools.wraps(function, updated=())(wrap(function, sink, start, count))


def _wrap_plain(function: Any, sink: CallSink, start: StartCall, count: CountTokens | None) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        if not sink.is_enabled:
            return function(*args, **kwargs)
        with start(args, kwargs) as timed:
            result = function(*args, **kwargs)
            if count is not None:
                timed.tokens = count(result)
        return result

    return call


def _wrap_coroutine(function: Any, sink: CallSink, start: StartCall, count: CountTokens | None) -> Any:
    async def call(*args: Any, **kwargs: Any) -> Any:
        if not sink.is_enabled:
            return await function(*args, **kwargs)
        with start(args, kwargs) as timed:
            result = await function(*args, **kwargs)
            if count is not None:
                timed.tokens = count(result)
        return result

    return call


def _wrap_generator(function: Any, sink: CallSink, start: StartCall, count: CountTokens | None) -> Any:
    def call(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        generator = function(*args, **kwargs)
        if not sink.is_enabled:
            return (yield from generator)
        timed, step = start(args, kwargs), functools.partial(next, generator)
        with _Ending(timed):
            while True:
                try:
                    with _Step(timed):
                        item = step()
                except StopIteration as end:
                    return end.value
                if count is not None:
                    timed.tokens += count(item)
                try:
                    sent = yield item
                except GeneratorExit:
                    with _Step(timed):
                        generator.close()
                    raise
                except BaseException as error:
                    step = functools.partial(generator.throw, error)
                else:
                    step = functools.partial(generator.send, sent)

    return call


def _wrap_async_generator(function: Any, sink: CallSink, start: StartCall, count: CountTokens | None) -> Any:
    async def call(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        generator = function(*args, **kwargs)
        timed = start(args, kwargs) if sink.is_enabled else None
        step = functools.partial(generator.asend, None)
        with _Ending(timed):
            while True:
                try:
                    with _Step(timed):
                        item = await step()
                except StopAsyncIteration:
                    return
                if timed is not None and count is not None:
                    timed.tokens += count(item)
                try:
                    sent = yield item
                except GeneratorExit:
                    with _Step(timed):
                        await generator.aclose()
                    raise
                except BaseException as error:
                    step = functools.partial(generator.athrow, error)
                else:
                    step = functools.partial(generator.asend, sent)

    return call


class _Step:
    """One piece of a generator's own time."""

    __slots__ = ("_timed",)

    def __init__(self, timed: TimedCall | None) -> None:
        self._timed = timed

    def __enter__(self) -> None:
        if self._timed is not None:
            self._timed.resume()

    def __exit__(self, *exc_info: object) -> None:
        if self._timed is not None:
            self._timed.pause()


class _Ending:
    """Hands the record of a generator over at its end. One that is closed early has not failed."""

    __slots__ = ("_timed",)

    def __init__(self, timed: TimedCall | None) -> None:
        self._timed = timed

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        if self._timed is not None:
            self._timed.finish("" if kind in (None, GeneratorExit) else kind.__name__)
