"""Save what containers hold, and undo added, removed and replaced entries. The entries are not copied."""

from __future__ import annotations

import functools
import operator
from collections import OrderedDict, deque
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from types import CellType, MemberDescriptorType
from typing import Any, Protocol


class Frame(Protocol):
    """One container and the objects it held. :meth:`restore` makes it hold the same objects again."""

    def is_same(self) -> bool:
        """Whether it holds the same objects now."""
        ...

    def restore(self) -> None: ...


@dataclass(frozen=True, slots=True)
class DictFrame:
    """A dict, or the ``__dict__`` of an object or module: keys in order, and their values."""

    container: dict[Any, Any]
    held: dict[Any, Any]

    def is_same(self) -> bool:
        now, held = self.container, self.held
        if not held:  # most of a module's dicts: its hooks
            return not dict.__len__(now)
        return _are_same(dict.keys(now), held.keys()) and _are_same(dict.values(now), held.values())

    def restore(self) -> None:
        if self.is_same():
            return
        now = self.container
        # Methods of dict itself: a ModelOutput forbids its own, and other classes would also write attributes.
        base: Any = OrderedDict if isinstance(now, OrderedDict) else dict
        base.clear(now)
        for key, value in self.held.items():
            base.__setitem__(now, key, value)


@dataclass(frozen=True, slots=True)
class ListFrame:
    """A list: its entries in order."""

    container: list[Any]
    held: list[Any]

    def is_same(self) -> bool:
        return _are_same(list.copy(self.container), self.held)

    def restore(self) -> None:
        list.__setitem__(self.container, slice(None), self.held)


@dataclass(frozen=True, slots=True)
class DequeFrame:
    """A deque: its entries in order."""

    container: deque[Any]
    held: list[Any]

    def is_same(self) -> bool:
        return _are_same(list(deque.__iter__(self.container)), self.held)

    def restore(self) -> None:
        deque.clear(self.container)
        deque.extend(self.container, self.held)


@dataclass(frozen=True, slots=True)
class SlotsFrame:
    """The ``__slots__`` of an object that were set."""

    container: Any
    held: dict[str, Any]

    def is_same(self) -> bool:
        now = slots_of(self.container)
        return now.keys() == self.held.keys() and _are_same(now.values(), self.held.values())

    def restore(self) -> None:
        now = slots_of(self.container)
        for name, slot in _slots(self.container).items():
            if name in self.held:
                slot.__set__(self.container, self.held[name])
            elif name in now:
                slot.__delete__(self.container)


@dataclass(frozen=True, slots=True)
class CellFrame:
    """A variable that a function closes over."""

    container: CellType
    held: Any

    def is_same(self) -> bool:
        try:
            return self.container.cell_contents is self.held
        except ValueError:  # deleted
            return False

    def restore(self) -> None:
        self.container.cell_contents = self.held


def _are_same(ones: Collection[Any], others: Collection[Any]) -> bool:
    # Without a loop in Python: a check asks this of every module, before and after each call.
    return len(ones) == len(others) and all(map(operator.is_, ones, others))


def slots_of(value: Any) -> dict[str, Any]:
    """The slots that are set, by attribute name. Private names are mangled."""
    found: dict[str, Any] = {}
    for name, slot in _slots(value).items():
        with suppress(AttributeError):
            found[name] = slot.__get__(value)
    return found


def _slots(value: Any) -> dict[str, MemberDescriptorType]:
    cls: Any = type(value)
    return _slots_of_class(cls)


@functools.lru_cache(maxsize=1024)
def _slots_of_class(cls: Any) -> dict[str, MemberDescriptorType]:
    """Every slot of a class and its bases. An attribute of a class may hide a slot of its base."""
    classes = [base for base in reversed(cls.__mro__) if "__slots__" in vars(base)]  # not those written in C
    members = [member for base in classes for member in vars(base).items()]
    return {name: slot for name, slot in members if isinstance(slot, MemberDescriptorType)}


def attributes_of(value: Any) -> dict[str, Any] | None:
    """The ``__dict__`` of ``value`` itself, without the code of its class. None if there is none."""
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return found if isinstance(found, dict) else None
