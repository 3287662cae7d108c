"""Which dispatched operation a CUDA capture refuses.

The rules are written for operations on any device: on the CPU the question is what the same operation would do
on CUDA. Both forms of a composite are known, the whole one (inference mode) and its parts (``no_grad``). Operators
are looked up by name, so that one which an older or newer torch lacks is no error.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
from pytest_cudagraph.hazards.catalogue import CAPTURE_UNSUPPORTED
from pytest_cudagraph.values import Level


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """What a capture would say of one operation. ``level`` is ``note`` where it says nothing and the audit should."""

    id: str
    text: str
    operation: str
    level: Level = "error"


# Operations that wait for the device although torch does not tag them so, or only some of their forms.
# The linear algebra ones check error codes on the host; cov and corrcoef compare a 0-dim tensor with True.
_SYNC_NAMES = frozenset(
    """
    item _local_scalar_dense is_nonzero equal allclose _linalg_check_errors
    _nested_tensor_from_mask_left_aligned _nested_tensor_from_mask
    linalg_inv inverse linalg_tensorinv linalg_tensorsolve linalg_cholesky cholesky linalg_solve linalg_lu_factor
    linalg_ldl_factor _linalg_eigh linalg_eigh linalg_eigvalsh linalg_eig linalg_eigvals _linalg_eigvals
    _linalg_svd linalg_svd linalg_svdvals svd linalg_lstsq linalg_pinv pinverse linalg_matrix_rank linalg_cond
    nuclear_norm linalg_matrix_exp matrix_exp cov corrcoef
    _ctc_loss ctc_loss embedding_renorm_ embedding_renorm pin_memory _pin_memory
    """.split()
)

# Sizes read back from the device. _pack_padded_sequence takes its lengths on the host: CUDA captures it and
# then replays the captured lengths, so it is refused here although CUDA says nothing.
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
) -> Refusal | None:
    """Why a CUDA capture would refuse this operation; None where it would record it.

    ``from_host`` tells Python numbers from 0-dim device tensors in ``x[mask] = value`` and its like; without it
    such a value counts as a number, which is legal.
    """
    found = judge(func, args, kwargs or {}, from_host)
    return found if found is not None and found.level == "error" else None


def remark(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> Refusal | None:
    """What is legal in this operation and still worth a note: a number made into a tensor, a custom operator."""
    found = judge(func, args, kwargs or {})
    return found if found is not None and found.level == "note" else None


def judge(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], from_host: FromHost | None = None
) -> Refusal | None:  # fmt: skip
    """What a capture would say of one operation, be it a refusal or a remark; None where it just records it."""
    for rule in _rules(func):
        found = rule(args, kwargs, from_host)
        if found is not None:
            hazard, text, level = found
            return Refusal(id=hazard, text=text, operation=str(getattr(func, "overloadpacket", func)), level=level)
    return None


def is_judged(func: Any) -> bool:
    """Whether there is any rule for an operation: most are never refused, whatever their arguments."""
    return bool(_rules(func))


# A capture asks for every operation; an overload's rules never change.
@functools.cache
def _rules(func: Any) -> tuple[Rule, ...]:
    schema = getattr(func, "_schema", None)
    if schema is None:
        return (always("unknown-op", "a higher-order operator", "note"),)
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
        return [always(*SYNC)]
    if name in _SHAPE_NAMES or _has_tag(func, "dynamic_output_shape"):
        return [always(*SHAPE)]
    return [flag_rule(reader(func, "check_errors"))] if name.endswith("_ex") else []


def _foreign_rules(func: Any, namespace: str, qualified_name: str) -> list[Rule]:
    if _has_tag(func, "cudagraph_unsafe"):
        return [always("unknown-op", CAPTURE_UNSUPPORTED.text, "error")]
    if _has_tag(func, "data_dependent_output"):
        return [always(*SYNC)]
    # The size of nms is read back from the device; torchvision does not tag it.
    if _has_tag(func, "dynamic_output_shape") or qualified_name == "torchvision::nms":
        return [always(*SHAPE)]
    if namespace in _KNOWN_NAMESPACES:
        return []
    return [always("unknown-op", "a custom operator", "note")]


def _has_tag(func: Any, name: str) -> bool:
    # By name: an older torch lacks some of the tags.
    return any(tag.name == name for tag in func.tags)
