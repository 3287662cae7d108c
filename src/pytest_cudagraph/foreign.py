"""Text and values from outside (names, files, drivers, models), made fit for a terminal, a message and JUnit."""

from __future__ import annotations


def printable(text: str) -> str:
    """One line of text. Line breaks, terminal escapes and what UTF-8 cannot hold become a question mark."""
    return text if text.isprintable() else "".join(each if each.isprintable() else "?" for each in text)


def printable_lines(text: str) -> str:
    """Lines of text, each as :func:`printable` shows it. Tabs become spaces."""
    return "\n".join(map(printable, text.expandtabs().split("\n")))
