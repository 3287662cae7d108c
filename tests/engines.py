"""A small engine of one's own, and the faults that one can have. It needs neither torch nor a device."""

from __future__ import annotations

import os
import signal
import sys
import threading
from dataclasses import dataclass
from typing import Any

from pytest_cudagraph import EngineFacts, InputError
from pytest_cudagraph.decoding.results import GenerationReceipt


@dataclass(frozen=True)
class CountingEngine:
    """Each row counts on from the sum of its prompt. ``fault`` is what goes wrong, in the mode with graphs only."""

    fault: str = ""

    @property
    def name(self) -> str:
        return "counting"

    def load(self, request, **arguments) -> Any:
        fault = self.fault if request.graphs else ""
        print("loading", arguments, flush=True)
        if fault == "raises in load":
            raise RuntimeError("capture failed:\nno \x1b[31mgraph\x1b[0m today")
        if fault == "exits":
            sys.exit(3)
        if fault == "mistake":
            raise InputError("prompts of one length, please")
        if fault == "eager steps":
            print("WARNING: CUDA graph capture failed, running eagerly", flush=True)
        if fault == "hangs":
            threading.Thread(target=threading.Event().wait, daemon=True).start()
            signal.pause()
        if fault == "leaves a thread":
            threading.Thread(target=threading.Event().wait).start()
        return Counting(request, fault)


class Counting:
    def __init__(self, request, fault):
        self.request, self.fault = request, fault
        self.steps = 0

    def generate(self, prompts, count):
        if self.fault == "garbage":
            os.write(1, b"\xff\x00{]" * 100_000)
        if self.fault == "raises in generate":
            raise ValueError("no such token")
        if self.fault == "dies":
            os.kill(os.getpid(), signal.SIGSEGV)
        if self.fault == "leaves":
            os._exit(7)
        if len(prompts) > 2 and self.fault == "no room":
            yield {4: RuntimeError("no room")}
            prompts = prompts[:4]
        if len(prompts) > 2 and self.fault == "dies of many":
            yield {row: [1] for row in range(len(prompts))}
            raise MemoryError("too many")
        self.steps += count - 1
        count -= self.fault == "a token less"
        shift = self.fault == "other tokens"
        for step in range(count):
            rows = list(enumerate(prompts))[self.fault == "a row less" :]
            half = 0.5 if self.fault == "half tokens" else 0
            yield {row: [sum(prompt) + step + (shift and row == 1 and step > 2) + half] for row, prompt in rows}

    def facts(self):
        if self.fault == "tells nothing":
            return EngineFacts()
        if self.fault == "counts prefills":
            return EngineFacts(receipt=GenerationReceipt(steps=self.steps, replays=self.steps + 3))
        if self.fault == "tells a part":
            return EngineFacts(receipt=GenerationReceipt(steps=2, replays=2))
        missing = self.steps // 4 if self.fault == "eager steps" else 0
        if not self.request.graphs:
            return EngineFacts(receipt=GenerationReceipt(steps=self.steps, replays=0))
        receipt = GenerationReceipt(
            steps=self.steps, replays=self.steps - missing, eager={"no graph": missing} if missing else {}
        )
        return EngineFacts(capture_ns=5_000_000, receipt=receipt)

    def close(self):
        if self.fault == "raises in close":
            raise OSError("still busy")
