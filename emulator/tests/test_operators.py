"""Operators on the emulated device: torch's own checks of devices, what waits, and what a graph holds."""

from __future__ import annotations

import contextlib

import cuda_emulator
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

NUMBER = torch.tensor(2.0)
ROW = torch.arange(4.0)
TWO_DEVICES = "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"


@pytest.fixture
def row():
    return ROW.cuda()


def captured(function):
    """The output after one replay."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = function()
    graph.replay()
    return output


# --- tensors of two devices


@pytest.mark.parametrize(
    "call",
    [
        lambda row: row + ROW,
        lambda row: ROW * row,
        lambda row: row.clone().add_(ROW),
        lambda row: torch.where(row > 0, row, ROW),
        lambda row: torch.mul(row, row, out=torch.empty(4)),
        lambda row: row.clone().index_put_((torch.tensor([0], device="cuda"),), ROW[:1]),
        lambda row: torch._foreach_add([row], [ROW]),
    ],
    ids=["add", "cpu-first", "in-place", "where", "out", "index_put", "foreach"],
)
def test_an_elementwise_operator_refuses_a_cpu_tensor(row, call):
    with pytest.raises(RuntimeError, match=TWO_DEVICES):
        call(row)


@pytest.mark.parametrize(
    ("call", "argument", "function"),
    [
        (lambda row: functional.linear(row[None], torch.ones(2, 4)), "mat2", "wrapper_CUDA_mm"),
        (lambda row: functional.linear(row[None], torch.ones(2, 4), ROW[:2]), "bias", "wrapper_CUDA_addmm"),
        (lambda row: torch.cat([row, ROW]), "tensors", "wrapper_CUDA_cat"),
        (lambda row: functional.embedding(torch.tensor([1]), row[:, None]), "index", "wrapper_CUDA__index_select"),
        (lambda row: row.gather(0, torch.tensor([1])), "index", "wrapper_CUDA_gather"),
        (lambda row: functional.layer_norm(row, (4,), ROW), "weight", "wrapper_CUDA__native_layer_norm"),
        (lambda row: torch.clamp(row, NUMBER), "min", "wrapper_CUDA_clamp_Tensor"),
    ],
    ids=["linear", "bias", "cat", "embedding", "gather", "layer_norm", "clamp"],
)
def test_the_other_operators_refuse_it_by_the_argument_and_torchs_function(row, call, argument, function):
    text = rf"got {argument} is on cpu, different from other tensors on cuda:0 \(.* in method {function}\)"
    if argument == "bias":
        text = "Expected all tensors to be on the same device"
    with pytest.raises(RuntimeError, match=text):
        call(row)


def test_a_reduction_refuses_an_output_on_the_cpu(row):
    with pytest.raises(RuntimeError, match="Expected out tensor to have device cuda:0, but got cpu instead"):
        torch.sum(row, 0, out=torch.empty(()))


def test_a_convolution_refuses_a_weight_of_the_cpu(row):
    with pytest.raises(
        RuntimeError, match=r"Input type \(torch.cuda.FloatTensor\) and weight type \(torch.FloatTensor\)"
    ):
        functional.conv1d(row.view(1, 1, 4), torch.ones(1, 1, 2))


def test_a_mask_of_the_cpu_is_refused(row):
    with pytest.raises(RuntimeError, match="expected self and mask to be on the same device, but got mask on cpu"):
        row.masked_fill(ROW > 1, 0.0)


@pytest.mark.parametrize(
    "call",
    [
        lambda row, number: row + number,
        lambda row, number: number - row,
        lambda row, number: torch.where(row > 1, row, number),
        lambda row, number: row.masked_fill(row > 1, number),
        lambda row, number: torch.addcmul(row, number, row),
        lambda row, number: row.clone().fill_(number),
    ],
)
def test_a_0_dim_tensor_of_the_cpu_is_a_number(row, call):
    torch.testing.assert_close(call(row, NUMBER).cpu(), call(ROW, NUMBER))


def test_a_lambda_over_the_cpu_module_is_refused():
    module = nn.Linear(4, 4)
    model = nn.Sequential()
    model.forward = lambda x: module(x)
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        model.cuda()(torch.ones(1, 4, device="cuda"))


class MaskNotRegistered(nn.Module):
    def __init__(self):
        super().__init__()
        self.mask = torch.ones(4)

    def forward(self, x):
        return x * self.mask


def test_a_mask_that_is_no_buffer_is_refused():
    with pytest.raises(RuntimeError, match=TWO_DEVICES):
        MaskNotRegistered().cuda()(torch.ones(1, 4, device="cuda"))


def test_a_number_on_the_host_is_frozen_by_a_capture(row):
    number = NUMBER.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = row * number
    number.fill_(100)
    graph.replay()
    assert output.tolist() == [0, 2, 4, 6]


# --- indices


def test_indices_of_the_cpu_are_copied_to_the_device(row):
    assert row[torch.tensor([1, 3])].tolist() == [1, 3]
    assert row[ROW > 1].tolist() == [2, 3]


@pytest.mark.parametrize(
    "call",
    [
        lambda row: row[torch.tensor([1, 3])],
        lambda row: row.clone().index_put_((row.long(),), NUMBER),
        lambda row: torch.where(row > 1, row, NUMBER),
    ],
    ids=["index", "value", "where"],
)
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_capture_refuses_the_copy_from_pageable_memory(row, call):
    call(row)
    with pytest.raises(RuntimeError, match="Cannot copy between CPU and CUDA tensors during CUDA graph capture"):
        captured(lambda: call(row))


def test_a_number_under_a_mask_is_captured(row):
    def fill():
        output = row.clone()
        output[row > 1] = 0.0
        return output

    assert captured(fill).tolist() == [0, 1, 0, 0]


# --- waiting for the device


@pytest.mark.parametrize(
    "call",
    [
        lambda row: row.nonzero(),
        lambda row: row[row > 1],
        lambda row: row.masked_fill(row > 1, row[0]),
        lambda row: row.index_fill(0, torch.zeros(1, dtype=torch.long, device="cuda"), row[0]),
        lambda row: torch.histc(row, 4),
        lambda row: row.unique(),
        lambda row: row.repeat_interleave(torch.ones(4, dtype=torch.long, device="cuda")),
        lambda row: torch.linalg.inv_ex(torch.eye(2, device="cuda"), check_errors=True),
        lambda row: torch.equal(row, row),
    ],
    ids=[
        "nonzero",
        "mask",
        "masked_fill",
        "index_fill",
        "histc",
        "unique",
        "repeat_interleave",
        "check_errors",
        "equal",
    ],
)
def test_what_waits_for_the_device_is_refused_under_capture(row, call):
    call(row)
    with pytest.raises(RuntimeError, match=r"operation (not permitted|failed due to a previous error)"):
        captured(lambda: call(row))


@pytest.mark.parametrize(
    "call",
    [
        lambda row: row.repeat_interleave(torch.ones(4, dtype=torch.long, device="cuda"), output_size=4),
        lambda row: torch.histc(row, 4, 0, 4),
        lambda row: torch.linalg.inv_ex(torch.eye(2, device="cuda"))[0],
        lambda row: row.clone().fill_(row[1]),
        lambda row: row.softmax(-1).multinomial(1) * 0,
    ],
    ids=["repeat_interleave", "histc", "inv_ex", "fill_", "multinomial"],
)
def test_the_form_that_does_not_wait_is_captured(row, call):
    assert captured(lambda: call(row)).tolist() == call(row).tolist()


@pytest.mark.parametrize(
    "call",
    [
        lambda row: row.sum().item(),
        lambda row: row.nonzero(),
        lambda row: row[row > 1],
        lambda row: row.unique(),
        lambda row: row.long().bincount(),
        lambda row: row.repeat_interleave(torch.ones(4, dtype=torch.long, device="cuda")),
        lambda row: sparse("cuda").coalesce(),
    ],
    ids=["item", "nonzero", "mask", "unique", "bincount", "repeat_interleave", "sparse"],
)
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_torchs_debug_mode_sees_the_wait(row, call):
    try:
        torch.cuda.set_sync_debug_mode("error")
        with pytest.raises(RuntimeError, match="called a synchronizing CUDA operation"):
            call(row)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_reduction_of_segments_waits_for_its_lengths(row):
    def reduce(device):
        lengths = torch.tensor([1, 3], device=device)
        return torch.segment_reduce(ROW.to(device), "sum", lengths=lengths)

    with cuda_emulator.asynchronous(1):
        assert reduce("cuda").tolist() == reduce("cpu").tolist() == [0, 6]
    with pytest.raises(RuntimeError, match=r"operation (not permitted|failed due to a previous error)"):
        captured(lambda: torch.segment_reduce(row, "sum", lengths=row.long()))


# --- what the kernels compute


@pytest.mark.parametrize("cell", [nn.LSTM, nn.GRU])
def test_a_recurrent_network_and_its_gradients_are_those_of_the_cpu(cell):
    torch.manual_seed(0)
    on_cpu = cell(4, 3, num_layers=2)
    on_cuda = cell(4, 3, num_layers=2)
    on_cuda.load_state_dict(on_cpu.state_dict())
    on_cuda.cuda()
    rows = torch.randn(5, 2, 4)
    ours, theirs = on_cuda(rows.cuda())[0], on_cpu(rows)[0]
    torch.testing.assert_close(ours.cpu(), theirs)
    ours.square().sum().backward()
    theirs.square().sum().backward()
    for mine, its in zip(on_cuda.parameters(), on_cpu.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.cpu(), its.grad)


@pytest.mark.parametrize("type_", [torch.float32, torch.bfloat16])
def test_the_gradients_of_rms_norm_are_those_of_the_cpu(type_):
    gradients = {}
    for device in ("cpu", "cuda"):
        rows = torch.arange(6.0).view(2, 3).to(device, type_).requires_grad_()
        weight = torch.ones(3, device=device, dtype=type_, requires_grad=True)
        functional.rms_norm(rows, (3,), weight).square().sum().backward()
        gradients[device] = (rows.grad.cpu(), weight.grad.cpu())
    torch.testing.assert_close(gradients["cuda"], gradients["cpu"], rtol=2e-2, atol=2e-2)


def test_a_product_of_bfloat16_matrices_has_the_asked_type(row):
    rows = row.view(2, 2).bfloat16()
    assert torch.mm(rows, rows, out_dtype=torch.float32).tolist() == [[2, 3], [6, 11]]


def test_an_embedding_bag_replays():
    bag = nn.EmbeddingBag(4, 3).cuda()
    rows = torch.tensor([[0, 1], [2, 3]], device="cuda")
    with torch.no_grad():
        torch.testing.assert_close(captured(lambda: bag(rows)), bag(rows))


def test_a_graph_of_draws_gives_the_numbers_of_eager(row):
    torch.cuda.manual_seed(3)
    eager = functional.dropout(row, 0.5) + torch.rand_like(row)
    torch.cuda.manual_seed(3)
    torch.testing.assert_close(captured(lambda: functional.dropout(row, 0.5) + torch.rand_like(row)), eager)


def test_a_draw_on_the_device_changes_no_generator_of_the_cpu(row):
    torch.manual_seed(0)
    want = torch.rand(1)
    torch.manual_seed(0)
    functional.dropout(row, 0.5)
    captured(lambda: functional.dropout(row, 0.5))
    assert torch.rand(1) == want


def test_an_output_that_is_too_small_is_resized_on_its_own_stream(row):
    output = torch.empty(0, device="cuda")
    torch.mul(row, 2, out=output)
    assert output.tolist() == [0, 2, 4, 6]


def test_an_operator_sees_that_two_arguments_share_memory(row):
    with pytest.raises(RuntimeError, match="some elements of the input tensor and the written-to tensor"):
        row[1:].add_(row[:-1])


def test_an_operator_without_elements_launches_nothing(row):
    none = row[:0]
    before = cuda_emulator.launches()
    none + none
    torch.mul(none, 2, out=torch.empty(0, device="cuda"))
    assert cuda_emulator.launches() == before
    assert none.sum().item() == 0  # a reduction has a result


def test_values_of_the_cpu_are_not_accumulated(row):
    with pytest.raises(RuntimeError, match="expected device cuda:0 but got device cpu for value tensor"):
        row.clone().index_put_((row.long(),), ROW, accumulate=True)


@pytest.mark.parametrize("seed", [None, 1])
def test_a_list_of_outputs_is_written(row, seed):
    def split():
        outputs = [torch.empty(1, device="cuda"), torch.empty(3, device="cuda")]
        torch.split_with_sizes_copy(row, [1, 3], out=outputs)
        return outputs

    with contextlib.nullcontext() if seed is None else cuda_emulator.asynchronous(seed):
        assert [output.tolist() for output in split()] == [[0], [1, 2, 3]]
        assert [output.tolist() for output in captured(split)] == [[0], [1, 2, 3]]


# --- sparse tensors


def sparse(device):
    indices = torch.tensor([[0, 1, 1], [2, 0, 0]])
    values = torch.tensor([3.0, 4.0, 5.0])
    return torch.sparse_coo_tensor(indices, values, (2, 3), check_invariants=False).to(device)


@pytest.mark.parametrize(
    "call",
    [
        lambda matrix, dense: matrix.to_dense(),
        lambda matrix, dense: matrix.coalesce().values(),
        lambda matrix, dense: matrix @ dense.t(),
        lambda matrix, dense: dense + matrix,
        lambda matrix, dense: dense.clone().add_(matrix),
        lambda matrix, dense: (matrix + matrix).to_dense(),
        lambda matrix, dense: (matrix.coalesce() * matrix.coalesce()).to_dense(),
        lambda matrix, dense: dense.to_sparse().to_dense(),
        lambda matrix, dense: torch.sparse.softmax(matrix, 1).to_dense(),
    ],
    ids=["to_dense", "coalesce", "matmul", "dense+sparse", "add_", "sparse+sparse", "mul", "to_sparse", "softmax"],
)
def test_a_sparse_operator_gives_the_numbers_of_the_cpu(call):
    dense = torch.arange(6.0).view(2, 3)
    torch.testing.assert_close(call(sparse("cuda"), dense.cuda()).cpu(), call(sparse("cpu"), dense))


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_capture_refuses_a_sparse_operator():
    matrix = sparse("cuda")
    with pytest.raises(RuntimeError, match=r"operation (not permitted|failed due to a previous error)"):
        captured(matrix.to_dense)


def test_sparse_gradients_of_an_embedding_train_it():
    rows = {}
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        table = nn.Embedding(4, 3, sparse=True).to(device)
        table(torch.tensor([1, 1, 3], device=device)).sum().backward()
        torch.optim.SGD(table.parameters(), 0.5).step()
        rows[device] = table.weight.detach().cpu()
    torch.testing.assert_close(rows["cuda"], rows["cpu"])


def test_an_index_without_elements_adds_nothing():
    rows, none = torch.ones(2, 3, device="cuda"), torch.empty(0, 3, device="cuda")
    index = torch.empty(0, dtype=torch.int64, device="cuda")
    assert torch.index_add(rows, 0, index, none).eq(1).all()
    assert rows.index_add_(0, index, none).eq(1).all()


def test_integers_are_counted_in_bins():
    counts = torch.histc(torch.tensor([0, 1, 1, 3, 9], dtype=torch.int32, device="cuda"), 4, 0, 3)
    assert (counts.dtype, counts.tolist()) == (torch.int32, [1, 2, 0, 1])


@pytest.mark.parametrize("loss", [functional.mse_loss, functional.l1_loss, functional.smooth_l1_loss])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_a_loss_is_the_cpus(row, loss, reduction):
    wanted = loss(ROW, ROW.flip(0), reduction=reduction)
    assert torch.equal(captured(lambda: loss(row, row.flip(0), reduction=reduction)).cpu(), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_attention_is_computed_where_a_program_asks_for_fused_kernels(dtype):
    query = torch.randn(2, 2, 8, 16, dtype=dtype)
    mask = torch.ones(8, 8, dtype=torch.bool).tril()
    kinds = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    given = query.cuda(), query.cuda(), query.cuda()
    for by in ({"is_causal": True}, {"attn_mask": mask.cuda()}):
        with sdpa_kernel(kinds), torch.inference_mode():
            found = captured(lambda by=by: functional.scaled_dot_product_attention(*given, **by))
        wanted = functional.scaled_dot_product_attention(query, query, query, is_causal=True)
        torch.testing.assert_close(found.cpu(), wanted)
