"""The product's own order on one case: eager, audit, capture, check, each judged whatever the one before has said."""

from __future__ import annotations

import functools
import linecache
import random
import warnings
from dataclasses import dataclass, field

import torch
from tests.conformance.cases import CASES, MARK, WRONG, Case

from pytest_cudagraph import inputs
from pytest_cudagraph.audit import Audit, audit
from pytest_cudagraph.backends import open_backend
from pytest_cudagraph.capture import capture_batches
from pytest_cudagraph.check import check_replays
from pytest_cudagraph.errors import CaptureRefusal, EagerFailed
from pytest_cudagraph.pipeline.prepared_model import PreparedModel, run_eagerly
from pytest_cudagraph.values import Agreement, Disagreement

SIZES = (2, 4)
SEED = 5
STAGES = ("eager", "audit", "capture", "check")

PROPERTY = "conformance"
"""The key under which a test reports the outcome of its case; workers of xdist send it on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What the stages said of one case."""

    eager: str = ""
    """What the model raised without any graph; then nothing else was tried."""
    audit: Audit = field(default_factory=Audit)
    refusal: CaptureRefusal | None = None
    disagreement: Disagreement | None = None
    not_judged: tuple[str, ...] = ()
    """What the check leaves open."""

    def said(self, stage):
        """The hazard a stage names: an id, else ``raises``, ``refused`` or ``wrong`` where there is none; or None."""
        if stage == "eager":
            return "raises" if self.eager else None
        if stage == "audit":
            return "+".join(dict.fromkeys(finding.id for finding in self.audit.errors)) or None
        if stage == "capture":
            return (self.refusal.hazard or "refused") if self.refusal else None
        return (self.disagreement.finding_id or WRONG) if self.disagreement else None

    @property
    def words(self):
        """What each stage says."""
        return {stage: self.said(stage) for stage in STAGES}

    @property
    def warnings(self):
        return self._ids("warning")

    @property
    def notes(self):
        return self._ids("note")

    def _ids(self, level):
        return frozenset(finding.id for finding in self.audit.findings if finding.level == level)

    @property
    def verdict(self):
        """What the product says: the first stage that finds against the model, else warnings, else notes, else
        ``clean``."""
        for stage in STAGES:
            if self.said(stage):
                return f"{stage}: {self.said(stage)}"
        for level, told in (("warning", self.warnings), ("note", self.notes)):
            if told:
                return f"{level}: {', '.join(sorted(told))}"
        return "clean"


@functools.cache
def seen(name, kind):
    """What the stages say of one case on one kind of device; each case runs once in a process."""
    case = CASES[name]
    with case.around(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what a module of this suite warns of is its own affair
        return run(case, open_backend(kind))


def run(case: Case, backend, sizes=SIZES) -> Seen:
    """The stages on a case of one's own."""
    model, examples = built(case, backend, sizes)
    try:
        run_eagerly(PreparedModel(eager=model, examples=examples), backend)
    except EagerFailed as error:
        return Seen(eager=str(error))
    found = audit(model, examples[min(examples)], backend, examples[max(examples)])
    with backend.pool() as pool:
        captures = capture_batches(lambda _: model, examples, pool, model=model, backend=backend)
        if captures.refused is not None:
            return Seen(audit=found, refusal=captures.refused)
        case.after_capture(model)
        checked = check_replays(
            captures.graphs,
            lambda _: model,
            examples,
            model=model,
            backend=backend,
            seed=SEED,
            captured_at=captures.addresses,
            size_states=captures.size_states,
        )
    differ = [each for each in checked.values() if isinstance(each, Disagreement)]
    unjudged = [what for each in checked.values() if isinstance(each, Agreement) for what in each.not_judged]
    return Seen(audit=found, disagreement=differ[0] if differ else None, not_judged=tuple(unjudged))


def built(case, backend, sizes):
    """The model of a case and its examples, by batch size, on the device."""
    random.seed(SEED)
    with torch.random.fork_rng(devices=[]), torch.device(backend.device):
        torch.default_generator.manual_seed(SEED)
        if backend.kind == "cuda":
            torch.cuda.manual_seed_all(SEED)
        model, args, kwargs = case.build()
    return model, inputs.batch_examples(inputs.Example(args=args, kwargs=kwargs), sizes, case.batch_dim)


def is_marked(site):
    return MARK in linecache.getline(site.file, site.line)


def outcome(case, said, told):
    """Found or missed, for a hazard; clean or a false alarm, for a look-alike.

    ``said`` is the word of each stage, ``told`` the warnings and notes.
    """
    speaks = any(said.values())
    if not case.is_hazard:
        return "false alarm" if speaks else "clean"
    wanted = case.expected
    if said["eager"] or wanted.audit or wanted.capture or wanted.check:
        return "found" if speaks else "missed"
    # Replayed rightly: a warning or a note is what is wanted, and anything more would be a false alarm.
    return "false alarm" if speaks else "found" if told >= wanted.told else "missed"
