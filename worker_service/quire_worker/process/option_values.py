"""Parses values of the worker's command line: names, folders and sizes of memory."""

from __future__ import annotations

import argparse
import re
from fractions import Fraction


def model_name(text: str) -> str:
    """Returns a valid name for a model.

    Raises:
        argparse.ArgumentTypeError: the text is not a valid name.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}", text):
        raise argparse.ArgumentTypeError(
            f"{text!r:.140} is not a valid name of a model: use 1 to 128 letters, digits, '.', '_', '-', ':' and "
            "'/', and begin with a letter or digit"
        )
    return text


def named_folder(text: str) -> tuple[str, str]:
    """Returns the name and the folder of `name=folder`.

    Raises:
        argparse.ArgumentTypeError: the text does not have that form.
    """
    name, equals, folder = text.partition("=")
    if not (name and equals and folder):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form NAME=FOLDER")
    return name, folder


def memory_bytes(text: str) -> int | Fraction:
    """Returns the number of bytes for `256MiB`, `2GiB` or `1e9`, or the fraction for `80%`.

    Raises:
        argparse.ArgumentTypeError: the text has another form, or is 0 or more than 100%.
    """
    share = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", text.strip())
    if share is not None:
        if not 0 < Fraction(share[1]) <= 100:
            raise argparse.ArgumentTypeError(f"{text!r} is not a valid share: write more than 0% and at most 100%")
        return Fraction(share[1]) / 100
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d{1,2})?)\s*(|[kmgt]i?b|b)", text.strip(), re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: write for example 256MiB, 2GiB or 80%")
    unit = match[2].lower()
    base = 1024 if "i" in unit else 1000
    size = int(float(match[1]) * base ** " kmgt".index(unit[0] if unit not in ("", "b") else " "))
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be above 0: write for example 256MiB, 2GiB or 80%")
    return size
