"""The output of a command, its exit code, and the files that commands read and write."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pytest_cudagraph import baseline, files, record, report
from pytest_cudagraph.baseline import AnyPath
from pytest_cudagraph.errors import BaselineError, CudagraphError
from pytest_cudagraph.values import SavedBatch

FINE, REGRESSION, INCONCLUSIVE, USAGE = 0, 1, 2, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandOutput:
    """The lines of a command, and the exit code of the process."""

    lines: Sequence[str]
    exit_code: int = FINE


def write_page(path: Path, text: str) -> None:
    """Write an HTML page whole or not at all. Raises :class:`~pytest_cudagraph.errors.CudagraphError`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_text(path, text)
    except (OSError, ValueError) as exc:
        # ValueError: a path with a null character.
        reason = getattr(exc, "strerror", None) or exc
        raise CudagraphError(f"{path}: the page could not be written ({reason}); nothing was changed") from exc


def read_run(path: Path) -> report.Run:
    """The run of a document of ``--cudagraph-json``. Raises :class:`~pytest_cudagraph.errors.CudagraphError`."""
    try:
        return report.run_of_document(files.read_json(path))
    except OSError as exc:
        raise CudagraphError(f"{path}: cannot be read ({exc.strerror})") from exc
    except ValueError as exc:
        raise CudagraphError(f"{path}: {exc}") from exc


def entries_of(path: AnyPath) -> dict[baseline.Key, SavedBatch]:
    """The entries of a baseline file, or what a document measured, also where no baseline was written.

    Raises :class:`~pytest_cudagraph.errors.CudagraphError`, also for a missing file.
    """
    if isinstance(path, Path) and path.is_file():
        with suppress(OSError, ValueError):
            plain = files.read_json(path)
            if isinstance(plain, dict) and plain.keys() >= {"schema", "tests"}:
                return _measured(read_run(path))
    return dict(content_of(path).entries)


def _measured(run: report.Run) -> dict[baseline.Key, SavedBatch]:
    timed = [(each, batch) for each in run.reports for batch in each.batches if batch.timing and each.device]
    entries = [record.saved_batch(each, batch, saved_at=run.date or "") for each, batch in timed]
    return {(entry.name, entry.batch_size): entry for entry in entries}


def content_of(path: AnyPath) -> baseline.Content:
    """A baseline file. Raises :class:`~pytest_cudagraph.errors.BaselineError`, also for a missing one."""
    if not path.exists():
        raise BaselineError(f"{path}: no such file")
    return baseline.read(path)
