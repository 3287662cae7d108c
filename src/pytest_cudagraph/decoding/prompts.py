"""What the scenarios of a decoder share: their settings, random prompts, and a generation without graphs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from pytest_cudagraph.check.compare import Tolerance
from pytest_cudagraph.decoding.decoder import Decoder, check_length, check_members
from pytest_cudagraph.decoding.engine import DecodeEngine
from pytest_cudagraph.settings.case import Case
from pytest_cudagraph.units import to_ns

_PROMPT_LENGTHS = (16,)
_OUTPUT_LENGTHS = (32,)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationSettings:
    """The settings of generations, from the marker ``decode`` or from the call."""

    prompt_lengths: tuple[int, ...] = _PROMPT_LENGTHS
    """In tokens."""
    output_lengths: tuple[int, ...] = _OUTPUT_LENGTHS
    """In tokens."""
    exact: bool = False
    """Whether every token must be eager's, also where two tokens are as likely."""
    tolerance: Tolerance = field(default_factory=Tolerance)
    """Of logits."""
    budget_ns: float = 0.0
    """To measure one batch size."""
    seed: int = 0
    """Of the order of samples."""

    @classmethod
    def of(cls, case: Case) -> GenerationSettings:
        """Those of a resolved call."""
        tolerance = Tolerance(rtol=case.rtol, atol=case.atol)
        return cls(**case.options, tolerance=tolerance, budget_ns=to_ns(case.time_budget), seed=case.seed)

    @property
    def output_length(self) -> int:
        """The first, where there is one."""
        return self.output_lengths[0]


def check_lengths(decoder: Decoder, settings: GenerationSettings) -> None:
    """Refuse lengths that the decoder cannot hold, before any of them is measured. Raises InputError."""
    check_members(decoder)
    for prompt_length in settings.prompt_lengths:
        for output_length in settings.output_lengths:
            check_length(decoder, prompt_length, output_length)


def generate_once(decoder: Decoder, case: Case, prompts: torch.Tensor | None) -> None:
    """Generate once per batch size, eagerly, and judge nothing: a run without ``--cudagraph``."""
    settings = GenerationSettings.of(case)
    with DecodeEngine(decoder, case.batch_sizes, capture=False, tolerance=settings.tolerance) as engine:
        for size in case.batch_sizes:
            shown = prompts_of(engine, size, settings.prompt_lengths[0]) if prompts is None else prompts
            engine.generate(shown, settings.output_length, graphs=False)


def prompts_of(engine: DecodeEngine, rows: int, length: int) -> torch.Tensor:
    """Random token ids (rows, length), the same in each run. Every row differs."""
    generator = torch.Generator().manual_seed(rows * 1_000_003 + length)
    return torch.randint(0, engine.vocabulary, (rows, length), generator=generator).to(engine.device)


def rows_of(prompts: Any) -> list[int]:
    """The batch size of prompts. What is no batch of prompts is refused later, by the engine."""
    shape = tuple(getattr(prompts, "shape", ()))
    return [max(*shape[:1], 1)] if len(shape) == 2 else [1]


def checked_prompts(engine: DecodeEngine, prompts: Any, case: Case) -> Any:
    """The prompts, or random ones, if the decoder holds them and what is generated."""
    settings = GenerationSettings.of(case)
    shown = prompts_of(engine, case.batch_sizes[0], settings.prompt_lengths[0]) if prompts is None else prompts
    engine.check_prompts(shown, settings.output_length)
    return shown
