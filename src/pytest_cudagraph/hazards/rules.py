"""The rules that tell which dispatched operation a CUDA capture refuses.

The rules judge operations on any device. For an operation on the CPU they give what the same operation would do on
CUDA. They know both forms of a composite: the whole operation (inference mode) and its parts (``no_grad``). They look
up operators by name, because older and newer versions of torch lack some of them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pytest_cudagraph.hazards import collectives
from pytest_cudagraph.hazards.argument_rules import (
    SHAPE,
    SPECIAL,
    SYNC,
    FromHost,
    Rule,
    always,
    flag_rule,
    generator_rule,
    reader,
)
from pytest_cudagraph.hazards.catalogue import CAPTURE_UNSUPPORTED, RawFinding

# Operations that wait for the device. torch does not tag them so, or tags only some of their forms.
# Linear algebra checks error codes on the host. cov and corrcoef compare a 0-dim tensor with True.
_SYNC_NAMES = frozenset(
    """
    item _local_scalar_dense is_nonzero equal allclose _linalg_check_errors
    _nested_tensor_from_mask_left_aligned _nested_tensor_from_mask
    linalg_inv inverse linalg_tensorinv linalg_tensorsolve linalg_cholesky cholesky linalg_solve linalg_lu_factor
    linalg_ldl_factor _linalg_eigh linalg_eigh linalg_eigvalsh linalg_eig linalg_eigvals _linalg_eigvals
    _linalg_svd linalg_svd linalg_svdvals svd linalg_lstsq linalg_pinv pinverse linalg_matrix_rank linalg_cond
    nuclear_norm linalg_matrix_exp matrix_exp cov corrcoef
    _ctc_loss ctc_loss istft embedding_renorm_ embedding_renorm pin_memory _pin_memory
    """.split()
)

# Operations that read a size from the device. _pack_padded_sequence takes its lengths on the host. CUDA captures it
# without an error and then replays the captured lengths, so the rules refuse it.
_SHAPE_NAMES = frozenset(
    """
    nonzero nonzero_numpy argwhere masked_select bincount combinations
    _unique _unique2 unique_consecutive unique_dim unique_dim_consecutive
    to_sparse _to_sparse coalesce _coalesce _pack_padded_sequence
    """.split()
)

_KNOWN_NAMESPACES = frozenset(
    """
    aten prim prims quantized _quantized mkldnn mkl onednn mkldnn_prepacked sparse profiler inductor
    inductor_prims rngprims debugprims c10d _c10d_functional _c10d_functional_autograd symm_mem
    """.split()
)


def refusal(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None, *, from_host: FromHost | None = None
) -> RawFinding | None:
    """The reason why a CUDA capture refuses this operation, or None if it records it.

    ``from_host`` tells whether a 0-dim tensor was a Python number, as in ``x[mask] = value``. Without it every such
    value counts as a number, which is legal.
    """
    found = judge(func, args, kwargs or {}, from_host)
    # A capture records collectives. They are an error of a test, which is one of the ranks.
    return found if found is not None and found.level == "error" and found.id != "collective" else None


def judge(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], from_host: FromHost | None = None
) -> RawFinding | None:  # fmt: skip
    """The finding in this operation: an error, a note, or None. For ``from_host`` see :func:`refusal`."""
    for rule in _rules(func):
        found = rule(args, kwargs, from_host)
        if found is not None:
            return replace(found, operation=str(getattr(func, "overloadpacket", func)))
    return None


def is_judged(func: Any) -> bool:
    """Whether any rule applies to an operation. Most operations are legal with all arguments."""
    return bool(_rules(func))


# Cached: a capture looks up every operation, and the rules of an overload never change.
@functools.cache
def _rules(func: Any) -> tuple[Rule, ...]:
    schema = getattr(func, "_schema", None)
    if schema is None:
        # The host reads a tensor to decide. Torch records that only inside of its own graph trees.
        is_decided = func.name() in ("cond", "while_loop")
        return (always(SYNC if is_decided else _opaque("a higher-order operator")),)
    namespace, _, name = schema.name.partition("::")
    rules = [] if namespace == "aten" else _foreign_rules(func, namespace, schema.name)
    if namespace == "aten":
        rules += _aten_rules(func, name)
    named = {argument.name for argument in schema.arguments}
    if "generator" in named:
        rules.append(generator_rule(reader(func, "generator")))
    if "pin_memory" in named:
        rules.append(flag_rule(reader(func, "pin_memory")))
    return tuple(rules)


def _aten_rules(func: Any, name: str) -> list[Rule]:
    special = SPECIAL.get(name) or SPECIAL.get(name.removesuffix("_"))
    if special is not None:
        return special(func)
    if name in _SYNC_NAMES or _has_tag(func, "data_dependent_output"):
        return [always(SYNC)]
    if name in _SHAPE_NAMES or _has_tag(func, "dynamic_output_shape"):
        return [always(SHAPE)]
    return [flag_rule(reader(func, "check_errors"))] if name.endswith("_ex") else []


def _foreign_rules(func: Any, namespace: str, qualified_name: str) -> list[Rule]:
    if _has_tag(func, "cudagraph_unsafe"):
        return [always(RawFinding(id="unknown-op", text=CAPTURE_UNSUPPORTED.text))]
    if _has_tag(func, "data_dependent_output"):
        return [always(SYNC)]
    # nms reads its output size from the device, and torchvision does not tag it.
    if _has_tag(func, "dynamic_output_shape") or qualified_name == "torchvision::nms":
        return [always(SHAPE)]
    if namespace in _KNOWN_NAMESPACES:
        return collectives.rules_of(func)
    return [always(_opaque("a custom operator"))]


def _opaque(text: str) -> RawFinding:
    return RawFinding(id="unknown-op", text=text, level="note")


def _has_tag(func: Any, name: str) -> bool:
    # By name, because older versions of torch lack some of the tags.
    return any(tag.name == name for tag in func.tags)
