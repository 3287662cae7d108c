"""What the compile stage hands on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pytest_cudagraph.errors import InputError
from pytest_cudagraph.protocols import CompiledRegion, Model
from pytest_cudagraph.values import CompileMode


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledBatch:
    """The model compiled for one batch size. ``regions`` is None where nothing was compiled."""

    call: Model
    regions: Sequence[CompiledRegion] | None
    compile_ns: int
    notes: tuple[str, ...] = ()

    @property
    def executions(self) -> int | None:
        """How often compiled code ran, summed over the regions."""
        return None if self.regions is None else sum(region.executions for region in self.regions)


class Compiled:
    """One model, compiled for each of its batch sizes. A context manager: leaving it releases the compiled code."""

    def __init__(self, mode: CompileMode, batches: Mapping[int, CompiledBatch]) -> None:
        self.mode = mode
        self._batches = dict(batches)
        self.compile_ns: Mapping[int, int] = {size: batch.compile_ns for size, batch in batches.items()}
        self.notes = _notes(batches)

    def call_for(self, batch_size: int) -> Model:
        """What to run, and to capture, at this batch size."""
        return self._batch(batch_size).call

    def executions(self, batch_size: int) -> int | None:
        """Real runs of this batch size's compiled regions so far; None where nothing is compiled."""
        return self._batch(batch_size).executions

    def regions(self, batch_size: int) -> int | None:
        """Compiled pieces: one per graph and kind of input (made in inference mode or not); None in mode none."""
        regions = self._batch(batch_size).regions
        return None if regions is None else len(regions)

    def close(self) -> None:
        """Release the compiled code; a second call does nothing."""
        self._batches.clear()

    def __enter__(self) -> Compiled:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _batch(self, batch_size: int) -> CompiledBatch:
        if batch_size in self._batches:
            return self._batches[batch_size]
        sizes = ", ".join(map(str, self._batches)) or "none (closed)"
        raise InputError(f"the model is not compiled for batch {batch_size}; compiled batch sizes: {sizes}")


def _notes(batches: Mapping[int, CompiledBatch]) -> tuple[str, ...]:
    """Each note once, with the batch sizes it holds for."""
    sizes: dict[str, list[str]] = {}
    for size, batch in batches.items():
        for note in batch.notes:
            sizes.setdefault(note, []).append(str(size))
    return tuple(f"batch {', '.join(of)}: {note}" for note, of in sizes.items())
