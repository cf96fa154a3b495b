"""Limits of this server that are not in `quire.protocol.limits`.

Each number bounds one resource. When a session begins, its owner gets some of them in the `Limits` message.
"""

from __future__ import annotations

from typing import Final

from quire.protocol.limits import MESSAGE_BYTES_MAX

STEP_BYTES_MAX: Final = 1 << 20
ANSWER_BYTES_MAX: Final = MESSAGE_BYTES_MAX - (64 << 10)  # bytes of a reply's arrays; its other fields have 64 KiB
OPERATIONS_PER_STEP_MAX: Final = 16_384
SEQUENCES_MAX: Final = 65_536  # live sequences per pool; a sequence without blocks of its own takes 532 bytes
SEQUENCES_OF_CALLER_MAX: Final = 131_072  # live sequences in all pools of one caller
SEQUENCES_UNSHARED: Final = 512  # live sequences that a pool may always have, whatever its caller's other pools have
LAST_STEP_MAX: Final = 1 << 62  # highest step number in a report; later steps never use up the higher numbers
WINDOW_MAX: Final = 8  # most unanswered steps, and most kept replies, per session
REPORT_BLOCK_BYTES_MAX: Final = 256  # bytes of a freed block with its own prefix and namespace; 56 in a long prefix
REPORT_SEQUENCE_BYTES_MAX: Final = 384  # bytes of a reported sequence without its tables
REPORT_TABLE_BYTES_MAX: Final = 8  # bytes of a reported table without its entries
REPORT_SHARED_ENTRIES_MAX: Final = 1 << 24  # table entries beyond one for each block of the pool; an entry has 4 bytes
REPORTS_MAX: Final = 4  # reports staged at a time, at most half of them by one caller; empty reports do not count
REPORT_PAUSE_S: Final = 10.0  # longest pause between two chunks of a staged report
CHANGES_PER_CHECK: Final = 64  # changes of a pool between two checks of its counts
QUARANTINES_MAX: Final = 3  # quarantines of one pool within `QUARANTINE_WINDOW_S`; then the pool is refused
QUARANTINE_WINDOW_S: Final = 600.0
STREAMS_MAX: Final = 32  # streams per caller, including those that have not attached yet; a half-sent step takes 2 MiB
STREAMS_OF_ALL_MAX: Final = 1024  # streams of all callers together
UNREAD_BYTES_MAX: Final = 32 << 20  # bytes of replies that one caller has not read; twice as many for all callers
MEMORY_OF_CALLER_MAX: Final = 96 << 20  # estimated bytes of one caller's pools; with all else, a caller holds 256 MiB
KEPT_BYTES_MAX: Final = 32 << 20  # bytes of steps and replies kept for replay, per caller; twice as many for all
POOLS_MAX: Final = 256  # pools per caller; twice as many for all callers
BLOCKS_MAX: Final = 1 << 24  # blocks per pool
FIRST_BLOCK_MAX: Final = 1 << 16  # highest first id of a pool's blocks; tables indexed by block id have entries from 0
DROPS_PER_STEP_MAX: Final = 64
DROPS_UNTOLD_MAX: Final = 16  # drops by others until the owner's next step; they fit the 64 KiB beside a reply's arrays
DROPS_UNTOLD_DIGESTS_MAX: Final = 1024
REMOVED_TOLD_MAX: Final = 8192  # most removed digests that one answer names
REMOVED_SCOPES_MAX: Final = 1024  # namespaces of removed digests in an answer, counted for each specification
BLOCK_SIZE_MAX: Final = 65_536
GROUPS_MAX: Final = 1024
FEATURES_MAX: Final = 64  # features that an owner may ask for
WINDOW_TOKENS_MAX: Final = 1 << 24
CHUNK_TOKENS_MAX: Final = 1 << 24  # tokens that an owner may announce to compute in one pass
QUOTAS_MAX: Final = 1024  # quotas per pool
METRIC_NAMESPACES_MAX: Final = 20  # namespaces with metric labels; each pair of them is a time series
ADDRESS_BYTES_MAX: Final = 256  # bytes of a worker's address, of its model's name, and of each adapter's name
ADAPTERS_MAX: Final = 1024  # adapters that one worker names to routers
PREFILL_RATE_MAX: Final = 1 << 24  # tokens per second that a worker may claim
PROMPT_TOKENS_MAX: Final = 1 << 24  # tokens of a prompt to route
EXCLUDED_POOLS_MAX: Final = 256
RESERVATION_MS_MAX: Final = 60_000
RESERVED_BYTES_MAX: Final = 32 << 20  # bytes of one caller's reservations; twice as many for all callers
WATCHERS_MAX: Final = 64  # watchers per caller; twice as many for all callers
EVENTS_PER_TURN_MAX: Final = 256  # events sent to one watcher before another one has a turn
NAME_CHARACTERS_MAX: Final = 128  # characters of a pool's name
BLOCK_BYTES_MAX: Final = 1 << 40
LAYOUT_BYTES_MAX: Final = 256
FINGERPRINT_BYTES_MAX: Final = 64
ATTACH_TIMEOUT_S: Final = 5.0
LEASE_S: Final = 10.0
LEASE_S_MIN: Final = 0.1  # three heartbeats of an owner, plus network delays
LEASE_S_MAX: Final = 86_400.0
POOLS_PER_PAGE_MAX: Final = 256
POOLS_PAGE_BYTES_MAX: Final = 1 << 20  # a page ends with the summary that reaches this many bytes
STATES_PER_ANSWER_MAX: Final = 1 << 20  # block states in one GetPoolBlocks answer, 1 byte each
SEQUENCE_BYTES_PER_ANSWER_MAX: Final = 512 << 10  # bytes of sequences and tables in one GetPoolBlocks answer
