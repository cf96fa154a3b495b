"""What this server accepts beside `quire.limits`. Each number bounds one resource; clients learn them at Ready."""

from __future__ import annotations

from typing import Final

STEP_BYTES_MAX: Final = 1 << 20
OPERATIONS_PER_STEP_MAX: Final = 16_384
SEQUENCES_MAX: Final = 65_536  # live, per pool
LAST_STEP_MAX: Final = 1 << 62  # in a report: leaves room for every number that can follow
WINDOW_MAX: Final = 8  # unanswered steps, and kept replies, per session
POOLS_MAX: Final = 256
BLOCKS_MAX: Final = 1 << 24  # per pool
BLOCK_SIZE_MAX: Final = 65_536
GROUPS_MAX: Final = 64
NAME_CHARACTERS_MAX: Final = 128  # of a pool
LAYOUT_BYTES_MAX: Final = 256
FINGERPRINT_BYTES_MAX: Final = 64
ATTACH_TIMEOUT_S: Final = 5.0
LEASE_S: Final = 10.0
LEASE_S_MAX: Final = 86_400.0
SEQUENCE_BYTES_PER_ANSWER_MAX: Final = 512 << 10  # of tables in one GetPool answer
