"""Enums of messages that accept numbers from later versions."""

from __future__ import annotations

import enum
from typing import Self


class OpenEnum(enum.IntEnum):
    """An enum that accepts every number. A number that this version does not know is named UNKNOWN_ plus the number."""

    @classmethod
    def _missing_(cls, value: object) -> Self | None:
        if not isinstance(value, int):
            return None
        unknown = int.__new__(cls, value)
        unknown._name_, unknown._value_ = f"UNKNOWN_{value}", value
        return unknown

    @property
    def is_known(self) -> bool:
        """Tells whether this version knows the number."""
        return self._value_ in type(self)._value2member_map_
