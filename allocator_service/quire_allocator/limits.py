"""The limits of this server, beside those of `quire.protocol.limits`.

Each number bounds one resource; clients learn them at Ready.
"""

from __future__ import annotations

from typing import Final

from quire.protocol.limits import MESSAGE_BYTES_MAX

STEP_BYTES_MAX: Final = 1 << 20
ANSWER_BYTES_MAX: Final = MESSAGE_BYTES_MAX - (64 << 10)  # of the arrays in a reply; the rest is for what wraps them
OPERATIONS_PER_STEP_MAX: Final = 16_384
SEQUENCES_MAX: Final = 65_536  # live, per pool
LAST_STEP_MAX: Final = 1 << 62  # in a report: leaves room for every number that can follow
WINDOW_MAX: Final = 8  # unanswered steps, and kept replies, per session
REPORT_BLOCK_BYTES_MAX: Final = 256  # of a freed block that is alone in its prefix and namespace; 56 in a long prefix
REPORT_SEQUENCE_BYTES_MAX: Final = 256  # of a sequence beside its tables
REPORT_TABLE_BYTES_MAX: Final = 8  # of a table beside its entries
REPORT_SHARED_ENTRIES_MAX: Final = 1 << 26  # of all tables, beyond one for each block of the pool; 4 bytes each
REPORTS_MAX: Final = 4  # staged at a time, of all pools; empty ones do not count
REPORT_PAUSE_S: Final = 10.0  # between two parts of one that is staged
CHANGES_PER_CHECK: Final = 64  # of a pool, between two looks at its counts
QUARANTINES_MAX: Final = 3  # of one pool in
QUARANTINE_WINDOW_S: Final = 600.0  # so many seconds, before it is refused
STREAMS_MAX: Final = 512  # of owners, attached or not yet
POOLS_MAX: Final = 256
BLOCKS_MAX: Final = 1 << 24  # per pool
BLOCK_SIZE_MAX: Final = 65_536
GROUPS_MAX: Final = 1024
WINDOW_TOKENS_MAX: Final = 1 << 24
CHECKPOINTS_MAX: Final = 1 << 16  # of one sequence
QUOTAS_MAX: Final = 1024  # per pool
HOLD_MS_MAX: Final = 86_400_000
WATCHERS_MAX: Final = 64  # of all pools
EVENTS_PER_TURN_MAX: Final = 256  # sent to one watcher before anybody else has a turn
NAME_CHARACTERS_MAX: Final = 128  # of a pool
LAYOUT_BYTES_MAX: Final = 256
FINGERPRINT_BYTES_MAX: Final = 64
ATTACH_TIMEOUT_S: Final = 5.0
LEASE_S: Final = 10.0
LEASE_S_MIN: Final = 0.1  # three heartbeats of an owner, and a network between them
LEASE_S_MAX: Final = 86_400.0
STATES_PER_ANSWER_MAX: Final = 1 << 20  # blocks in one GetPool answer, a byte each
SEQUENCE_BYTES_PER_ANSWER_MAX: Final = 512 << 10  # of sequences and tables beside them
