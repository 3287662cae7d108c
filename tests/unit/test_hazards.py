"""The operations that a capture refuses, whole (inference mode) and in parts (no_grad)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_cudagraph import hazards

aten = torch.ops.aten

IDS = [
    "host-sync", "dynamic-shape", "host-data", "control-flow", "baked-scalar", "rng", "mutates-state",
    "hidden-write", "rebinds-state", "mutates-input", "output-alias", "stateful-python", "foreign-tensor", "collective",
    "nested-graph", "unknown-op",
]  # fmt: skip


class Judge(TorchDispatchMode):
    """Collects the errors and notes of all operations. It knows tensors made from numbers by identity."""

    def __init__(self):
        super().__init__()
        self.refused, self.noted, self.numbers = [], [], []

    @classmethod
    def ignore_compile_internals(cls):
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten.lift_fresh.default:
            self.numbers.append(args[0])
        found = hazards.judge(func, args, kwargs, from_host=lambda t: any(t is n for n in self.numbers))
        self.refused += [found] if found and found.level == "error" else []
        self.noted += [found] if found and found.level == "note" else []
        return func(*args, **kwargs)


X = torch.arange(12.0).reshape(4, 3) - 5
MASK = X > 0
INDEX = torch.tensor([0, 1, 2])
REPEATS = torch.tensor([1, 2, 1, 1])
SQUARE = torch.eye(3) * 2
ZERO_DIM = torch.tensor(0.5)
BYTES = MASK.to(torch.uint8)
OWN = torch.Generator()


def assigned(index, value):
    def call():
        X.clone()[index] = value

    return call


REFUSED = {
    "item": ("host-sync", lambda: ZERO_DIM.item()),
    "float": ("host-sync", lambda: float(ZERO_DIM)),
    "bool": ("host-sync", lambda: bool(ZERO_DIM > 0)),
    "format": ("host-sync", lambda: f"{ZERO_DIM}"),
    "slice bound": ("host-sync", lambda: X[: INDEX[1]]),
    "equal": ("host-sync", lambda: torch.equal(X, X)),
    "allclose": ("host-sync", lambda: torch.allclose(X, X)),
    "inv": ("host-sync", lambda: torch.linalg.inv(SQUARE)),
    "inverse": ("host-sync", lambda: torch.inverse(SQUARE)),
    "cholesky": ("host-sync", lambda: torch.linalg.cholesky(SQUARE)),
    "solve": ("host-sync", lambda: torch.linalg.solve(SQUARE, SQUARE)),
    "eigh": ("host-sync", lambda: torch.linalg.eigh(SQUARE)),
    "svd": ("host-sync", lambda: torch.linalg.svd(SQUARE)),
    "eig": ("host-sync", lambda: torch.linalg.eig(SQUARE)),
    "pinv": ("host-sync", lambda: torch.linalg.pinv(SQUARE)),
    "lstsq": ("host-sync", lambda: torch.linalg.lstsq(SQUARE, SQUARE)),
    "matrix_rank": ("host-sync", lambda: torch.linalg.matrix_rank(SQUARE)),
    "matrix_exp": ("host-sync", lambda: torch.linalg.matrix_exp(SQUARE)),
    "inv_ex, checked": ("host-sync", lambda: torch.linalg.inv_ex(SQUARE, check_errors=True)),
    "cov": ("host-sync", lambda: torch.cov(X)),
    "narrow from a tensor": ("host-sync", lambda: X.narrow(1, INDEX[0], 1)),
    "histc, open range": ("host-sync", lambda: torch.histc(X)),
    "renormed embedding": ("host-sync", lambda: F.embedding(INDEX, X.clone(), max_norm=1.0)),
    "masked_fill, device value": ("host-sync", lambda: X.masked_fill(MASK, ZERO_DIM)),
    "index_fill, device value": ("host-sync", lambda: X.index_fill(1, INDEX, ZERO_DIM)),
    "nested mask": (
        "host-sync",
        lambda: torch._nested_tensor_from_mask_left_aligned(torch.ones(2, 3, 1), torch.ones(2, 3, dtype=torch.bool)),
    ),
    "nonzero": ("dynamic-shape", lambda: MASK.nonzero()),
    "nonzero tuple": ("dynamic-shape", lambda: MASK.nonzero(as_tuple=True)),
    "argwhere": ("dynamic-shape", lambda: torch.argwhere(MASK)),
    "where, condition only": ("dynamic-shape", lambda: torch.where(MASK)),
    "masked_select": ("dynamic-shape", lambda: X.masked_select(MASK)),
    "mask read": ("dynamic-shape", lambda: X[MASK]),
    "row mask read": ("dynamic-shape", lambda: X[MASK[:, 0]]),
    "unique": ("dynamic-shape", lambda: torch.unique(INDEX)),
    "unique dim": ("dynamic-shape", lambda: torch.unique(X, dim=0)),
    "unique_consecutive": ("dynamic-shape", lambda: torch.unique_consecutive(INDEX)),
    "bincount": ("dynamic-shape", lambda: torch.bincount(INDEX)),
    "repeat_interleave": ("dynamic-shape", lambda: X.repeat_interleave(REPEATS, 0)),
    "combinations": ("dynamic-shape", lambda: torch.combinations(INDEX)),
    "to_sparse": ("dynamic-shape", lambda: X.to_sparse()),
    "mask write, tensor": ("dynamic-shape", assigned(MASK, torch.ones(int(MASK.sum())))),
    "mask write, device value": ("dynamic-shape", assigned(MASK, ZERO_DIM)),
    "packed sequence": (
        "dynamic-shape",
        lambda: torch._pack_padded_sequence(torch.ones(2, 3, 1), torch.tensor([2, 1]), True),
    ),
    "list to tensor": ("host-data", lambda: torch.tensor([1.0, 2.0])),
    "as_tensor": ("host-data", lambda: torch.as_tensor([1, 2])),
    "new_tensor": ("host-data", lambda: X.new_tensor([1.0, 2.0])),
    "list index": ("host-data", lambda: X[[0, 2]]),
    "from_numpy": ("host-data", lambda: torch.from_numpy(np.ones(3))),
    "number written at indices": ("host-data", assigned(INDEX, 0.0)),
    "own generator": ("rng", lambda: torch.rand(3, generator=OWN)),
    "own generator, in place": ("rng", lambda: X.clone().normal_(generator=OWN)),
}

LEGAL = {
    "integer read": lambda: X[INDEX],
    "integer write": assigned(INDEX, torch.zeros(3, 3)),
    "mask write, number": assigned(MASK, 0.0),
    "masked_fill, number": lambda: X.masked_fill(MASK, 0.0),
    "masked_fill, tensor of a number": lambda: X.masked_fill(MASK, torch.tensor(0.0)),
    "where, three arguments": lambda: torch.where(MASK, X, 0.0),
    "repeat_interleave, number": lambda: X.repeat_interleave(2, 0),
    "repeat_interleave, known size": lambda: X.repeat_interleave(REPEATS, 0, output_size=5),
    "inv_ex": lambda: torch.linalg.inv_ex(SQUARE),
    "qr": lambda: torch.linalg.qr(SQUARE),
    "histc, given range": lambda: torch.histc(X, min=0, max=5),
    "default generator": lambda: torch.rand(3, generator=torch.default_generator),
    "dropout": lambda: F.dropout(X, 0.5, training=True),
    "sdpa": lambda: F.scaled_dot_product_attention(X[None], X[None], X[None]),
    "factories": lambda: (torch.arange(4), torch.full((2,), 3.0), torch.zeros(2), torch.linspace(0, 1, 3)),
    "tensor_split, numbers": lambda: X.tensor_split([1, 2]),
    "empty tensor": lambda: torch.tensor([]),
    "conversion": lambda: X.to(torch.float64),
    "convolution": lambda: F.conv1d(X[None], torch.ones(2, 4, 1)),
}


def judged(call, *, whole):
    judge = Judge()
    with torch.inference_mode() if whole else torch.no_grad(), judge:
        call()
    return judge


@pytest.mark.parametrize("whole", [True, False], ids=["inference", "no_grad"])
@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_its_id_whole_and_in_parts(name, whole):
    hazard, call = REFUSED[name]
    assert hazard in {refusal.id for refusal in judged(call, whole=whole).refused}


@pytest.mark.parametrize("whole", [True, False], ids=["inference", "no_grad"])
@pytest.mark.parametrize("name", LEGAL)
def test_legal_operations_are_left_alone(name, whole):
    assert judged(LEGAL[name], whole=whole).refused == []


def test_one_hot_with_a_number_of_classes_is_legal_as_a_whole():
    assert judged(lambda: F.one_hot(INDEX, 3), whole=True).refused == []
    assert [r.id for r in judged(lambda: F.one_hot(INDEX), whole=True).refused] == ["dynamic-shape"]


def test_sections_in_a_tensor_are_read_by_the_host():
    sections = torch.tensor([1, 2])
    refused = judged(lambda: X.tensor_split(sections), whole=True).refused
    assert [(r.id, r.operation) for r in refused] == [("host-sync", "aten.tensor_split")]


def test_a_byte_mask_counts_as_a_mask():
    refusal = hazards.refusal(torch.ops.aten.index.Tensor, (X, [BYTES]), {})
    assert (refusal.id, refusal.operation) == ("dynamic-shape", "aten.index")


def test_without_knowing_where_a_zero_dim_value_comes_from_it_counts_as_a_number():
    assert hazards.refusal(torch.ops.aten.index_put_.default, (X, [MASK], ZERO_DIM), {}) is None


def test_several_masks_or_accumulation_are_no_fill():
    index_put = torch.ops.aten.index_put_.default
    rows = MASK[:, 0]
    assert hazards.refusal(index_put, (X, [rows, INDEX], ZERO_DIM), {}).id == "dynamic-shape"
    assert hazards.refusal(index_put, (X, [MASK], ZERO_DIM, True), {}).id == "dynamic-shape"


def test_a_refusal_speaks_cudas_words():
    (refusal,) = judged(lambda: ZERO_DIM.item(), whole=True).refused
    assert refusal == hazards.RawFinding(
        id="host-sync", text="operation not permitted when stream is capturing", operation="aten.item", level="error"
    )


def test_a_generator_of_its_own_is_refused_in_pytorchs_words():
    (refusal,) = judged(lambda: torch.rand(3, generator=OWN), whole=True).refused
    assert refusal.text == "Attempt to increase offset for a CUDA generator not in capture mode"


def test_host_data_is_refused_in_pytorchs_words():
    (refusal,) = judged(lambda: torch.tensor([1.0, 2.0]), whole=True).refused
    assert refusal.text == (
        "Cannot copy between CPU and CUDA tensors during CUDA graph capture unless the CPU tensor is pinned."
    )


def test_a_number_made_into_a_tensor_is_a_note_and_no_refusal():
    judge = judged(lambda: X * torch.tensor(2.0), whole=True)
    assert judge.refused == []
    assert [(r.id, r.level) for r in judge.noted] == [("host-data", "note")]


def test_a_pinned_allocation_is_refused():
    empty = torch.ops.aten.empty.memory_format
    assert hazards.refusal(empty, ([2],), {"pin_memory": True}).id == "host-sync"
    assert hazards.refusal(empty, ([2],), {"pin_memory": False}) is None


@pytest.fixture
def custom_ops():
    library = torch.library.Library("cudagraph_hazards", "DEF")
    library.define("plain(Tensor x) -> Tensor")
    library.define("sized(Tensor x) -> Tensor", tags=(torch.Tag.dynamic_output_shape,))
    library.define("read(Tensor x) -> Scalar", tags=(torch.Tag.data_dependent_output,))
    yield torch.ops.cudagraph_hazards
    library._destroy()


def test_a_custom_operator_is_a_note_unless_its_tags_say_more(custom_ops):
    plain = custom_ops.plain.default
    assert hazards.refusal(plain, (X,), {}) is None
    assert hazards.judge(plain, (X,), {}) == hazards.RawFinding(
        id="unknown-op", text="a custom operator", operation="cudagraph_hazards.plain", level="note"
    )
    assert hazards.refusal(custom_ops.sized.default, (X,), {}).id == "dynamic-shape"
    assert hazards.refusal(custom_ops.read.default, (X,), {}).id == "host-sync"


@pytest.mark.skipif(not hasattr(torch.Tag, "cudagraph_unsafe"), reason="this torch has no tag cudagraph_unsafe")
def test_an_operator_that_calls_itself_unsafe_is_refused():
    library = torch.library.Library("cudagraph_hazards_unsafe", "DEF")
    library.define("waits(Tensor x) -> Tensor", tags=(torch.Tag.cudagraph_unsafe,))
    assert hazards.refusal(torch.ops.cudagraph_hazards_unsafe.waits.default, (X,), {}).id == "unknown-op"
    library._destroy()


def test_something_without_a_schema_is_a_note():
    found = hazards.judge(torch.ops.higher_order.flex_attention, (X,), {})
    assert (found.id, found.text, found.operation) == ("unknown-op", "a higher-order operator", "flex_attention")


def test_the_host_reads_the_condition_of_a_branch_that_torch_has():
    found = hazards.judge(torch.ops.higher_order.cond, (X,), {})
    assert (found.id, found.level, found.operation) == ("host-sync", "error", "cond")


def test_the_catalogue_has_its_ids_each_under_its_own_name():
    assert list(hazards.CATALOGUE) == IDS
    assert all(entry.id == name for name, entry in hazards.CATALOGUE.items())


def test_cuda_errors_carry_code_name_and_text():
    errors = [
        hazards.CAPTURE_UNSUPPORTED, hazards.CAPTURE_INVALIDATED, hazards.CAPTURE_UNJOINED,
        hazards.CAPTURE_ISOLATION, hazards.CAPTURE_IMPLICIT,
    ]  # fmt: skip
    assert [(error.code, error.name) for error in errors] == [
        (900, "cudaErrorStreamCaptureUnsupported"),
        (901, "cudaErrorStreamCaptureInvalidated"),
        (904, "cudaErrorStreamCaptureUnjoined"),
        (905, "cudaErrorStreamCaptureIsolation"),
        (906, "cudaErrorStreamCaptureImplicit"),
    ]


def test_the_texts_of_the_catalogue_are_reviewed(golden):
    entries = hazards.CATALOGUE.values()
    texts = [f"{e.id} ({'loud' if e.loud else 'silent'})\n  {e.what}\n  fix: {e.fix}" for e in entries]
    golden("hazard-catalogue.txt", "\n".join(texts))


def test_a_refusal_has_level_error_and_a_legal_hazard_level_note():
    assert hazards.judge(torch.ops.aten.item.default, (X,), {}).level == "error"
    assert hazards.judge(torch.ops.aten.lift_fresh.default, (ZERO_DIM,), {}).level == "note"
    assert hazards.judge(torch.ops.aten.relu.default, (X,), {}) is None


def test_most_operations_have_no_rule():
    assert not hazards.is_judged(torch.ops.aten.relu.default)
    assert hazards.is_judged(torch.ops.aten.nonzero.default)


# Fake tensors of torch claim to lie on a GPU and need no driver.


def refused(func, *args, **kwargs):
    found = hazards.refusal(func, args, kwargs)
    return found and found.id


def test_a_tensor_of_the_host_that_an_operation_takes_as_a_number_is_taken_by_value(on_gpu):
    x, mask = on_gpu(3), on_gpu(3, dtype=torch.bool)
    assert refused(aten.masked_fill.Tensor, x, mask, torch.tensor(1.0)) is None
    assert refused(aten.index_fill.int_Tensor, x, 0, on_gpu(1, dtype=torch.int64), torch.tensor(1.0)) is None


def test_a_number_that_lies_on_the_gpu_is_read_back_where_an_operation_wants_one_of_the_host(on_gpu):
    x, mask = on_gpu(3), on_gpu(3, dtype=torch.bool)
    assert refused(aten.masked_fill.Tensor, x, mask, on_gpu()) == "host-sync"
    assert refused(aten.index_fill.int_Tensor, x, 0, on_gpu(1, dtype=torch.int64), on_gpu()) == "host-sync"


def test_a_masked_write_of_a_number_needs_no_size_only_if_the_number_is_the_hosts(on_gpu):
    x, mask = on_gpu(3), on_gpu(3, dtype=torch.bool)
    assert refused(aten.index_put_.default, x, [mask], torch.tensor(1.0)) is None
    assert refused(aten.index_put_.default, x, [mask], on_gpu()) == "dynamic-shape"


def test_an_index_of_the_host_is_copied_to_the_gpu_by_the_operation_itself(on_gpu):
    x = on_gpu(3)
    assert refused(aten.index.Tensor, x, [torch.tensor([0, 1])]) == "host-data"
    assert refused(aten.index.Tensor, x, [on_gpu(2, dtype=torch.int64)]) is None
    assert refused(aten.index.Tensor, X, [None, torch.tensor([0, 1])]) is None
    assert refused(aten.index_put_.default, x, [torch.tensor([0, 1])], on_gpu(2)) == "host-data"


def test_a_copy_between_host_and_gpu_waits_one_way_and_wants_pinned_memory_the_other(on_gpu, monkeypatch):
    x, host = on_gpu(3), torch.ones(3)
    assert refused(aten.copy_.default, host, x) == "host-sync"
    assert refused(aten.copy_.default, x, host) == "host-data"
    assert refused(aten._to_copy.default, host, device=torch.device("cuda")) == "host-data"
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: True)
    assert refused(aten.copy_.default, x, host) is None
    assert refused(aten.copy_.default, x, on_gpu(3)) is None
    assert refused(aten._to_copy.default, x, device="cpu") == "host-sync"
    assert refused(aten._to_copy.default, host, dtype=torch.float64) is None


def test_the_default_generator_of_a_gpu_is_no_generator_of_a_models_own(monkeypatch):
    generator = torch.Generator()
    monkeypatch.setattr(torch.cuda, "default_generators", (generator,))
    kwargs = {"generator": generator}
    assert hazards.refusal(aten.normal_.default, (torch.ones(2),), kwargs) is None
    assert hazards.refusal(aten.normal_.default, (torch.ones(2),), {"generator": OWN}).id == "rng"
