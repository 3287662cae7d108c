"""Text and values from outside (names, files, drivers, models), made fit for a terminal, a message and JUnit."""

from __future__ import annotations

import re
import reprlib
from typing import Any

_SHOWN = reprlib.Repr()
_SHOWN.maxlist = _SHOWN.maxtuple = _SHOWN.maxdict = _SHOWN.maxset = _SHOWN.maxfrozenset = 20
_SHOWN.maxstring = _SHOWN.maxother = _SHOWN.maxlong = 200


_COMMAND = re.compile(r"(?<=^:)(?=:)|(?<=##)(?=\[)")
"""Where a space ends what GitHub's runner would take for a command: ``::`` at the start of a line, ``##[`` anywhere."""


def printable(text: str) -> str:
    """One line of text. Line breaks, terminal escapes and what UTF-8 cannot hold become a question mark.

    A text that GitHub's runner would obey as a command of its log gets a space into it.
    """
    shown = text if text.isprintable() else "".join(letter if letter.isprintable() else "?" for letter in text)
    begin = len(shown) - len(shown.lstrip())
    return shown[:begin] + _COMMAND.sub(" ", shown[begin:]) if "::" in shown or "##[" in shown else shown


def printable_lines(text: str) -> str:
    """Lines of text, each as :func:`printable` shows it. Tabs become spaces."""
    return "\n".join(map(printable, text.expandtabs().split("\n")))


def value_text(value: Any) -> str:
    """``repr(value)`` on one line, shortened. A value whose own ``__repr__`` raises is shown by its class."""
    try:
        return printable(_SHOWN.repr(value).replace("\n", " "))
    # A value may raise anything. The message about it must still be read.
    except Exception:
        return f"<{type(value).__name__}>"


_USER = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_QUERY = re.compile(r"(?<=\?)\S+$")


def without_credentials(text: str, url: str | None = None) -> str:
    """A text without the user, the password and the query of ``url``, which by default is the text itself."""
    found = [match.group() for each in (_USER, _QUERY) for match in each.finditer(text if url is None else url)]
    from urllib.parse import unquote

    parts = {part for secret in found for part in (secret, *secret.split(":")) if part}
    # A driver that logs in shows them decoded.
    secrets = parts | set(map(unquote, parts))
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, "***")
    return text


def first_line_of(text: str) -> str:
    """The first line that is not blank. Empty without one."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def message_of(error: BaseException) -> str:
    """``str(error)``. Empty if the error's own ``__str__`` raises."""
    try:
        return str(error)
    except Exception:
        return ""
