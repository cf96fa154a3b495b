"""Limits of this server that are not in `quire.protocol.limits`.

Each number bounds one resource. An owner gets the ones in the `Limits` message when its session begins.
"""

from __future__ import annotations

from typing import Final

from quire.protocol.limits import MESSAGE_BYTES_MAX

STEP_BYTES_MAX: Final = 1 << 20
ANSWER_BYTES_MAX: Final = MESSAGE_BYTES_MAX - (64 << 10)  # for the arrays in a reply; 64 KiB are left for their frame
OPERATIONS_PER_STEP_MAX: Final = 16_384
SEQUENCES_MAX: Final = 65_536  # live sequences, per pool; one without blocks of its own takes 532 bytes
SEQUENCES_OF_CALLER_MAX: Final = 131_072  # live sequences in all pools of one caller
SEQUENCES_UNSHARED: Final = 512  # each pool may have this many, whatever its caller's other pools have
LAST_STEP_MAX: Final = 1 << 62  # highest step number in a report; the numbers above it suffice for all later steps
WINDOW_MAX: Final = 8  # unanswered steps, and kept replies, per session
REPORT_BLOCK_BYTES_MAX: Final = 256  # a freed block with its own prefix and namespace; 56 bytes in a long prefix
REPORT_SEQUENCE_BYTES_MAX: Final = 384  # memory of a sequence without its tables
REPORT_TABLE_BYTES_MAX: Final = 8  # memory of a table without its entries
REPORT_SHARED_ENTRIES_MAX: Final = 1 << 24  # table entries in addition to one for each block of the pool; 4 bytes each
REPORTS_MAX: Final = 4  # reports staged at a time in all pools, half of them by one caller; empty ones do not count
REPORT_PAUSE_S: Final = 10.0  # longest pause between two chunks of a staged report
CHANGES_PER_CHECK: Final = 64  # changes of a pool between two checks of its counts
QUARANTINES_MAX: Final = 3  # quarantines of one pool within `QUARANTINE_WINDOW_S`; then the pool is refused
QUARANTINE_WINDOW_S: Final = 600.0
STREAMS_MAX: Final = 32  # streams per caller, including those that have not attached yet; a half-sent step takes 2 MiB
STREAMS_OF_ALL_MAX: Final = 1024  # streams of all callers together
UNREAD_BYTES_MAX: Final = 32 << 20  # bytes of replies that one caller has not read, twice as many for all callers
MEMORY_OF_CALLER_MAX: Final = 96 << 20  # bytes of one caller's pools, by estimate: with all else it holds 256 MiB
KEPT_BYTES_MAX: Final = 32 << 20  # bytes of steps and replies kept for replay, per caller; twice as many for all
POOLS_MAX: Final = 256  # pools per caller; twice as many for all callers
BLOCKS_MAX: Final = 1 << 24  # per pool
FIRST_BLOCK_MAX: Final = 1 << 16  # ids before a pool's first block; tables indexed by block id have an entry for each
DROPS_PER_STEP_MAX: Final = 64
DROPS_UNTOLD_MAX: Final = 16  # drops by other callers until the owner's next step; they fit the frame of an answer
DROPS_UNTOLD_DIGESTS_MAX: Final = 1024
REMOVED_TOLD_MAX: Final = 8192  # removed digests that one answer names
REMOVED_SCOPES_MAX: Final = 1024  # namespaces, counted once for each specification of groups
BLOCK_SIZE_MAX: Final = 65_536
GROUPS_MAX: Final = 1024
FEATURES_MAX: Final = 64  # features that an owner may ask for
WINDOW_TOKENS_MAX: Final = 1 << 24
CHUNK_TOKENS_MAX: Final = 1 << 24  # tokens that an owner may announce to compute in one pass
QUOTAS_MAX: Final = 1024  # per pool
METRIC_NAMESPACES_MAX: Final = 20  # each pair of namespaces is a series
ADDRESS_BYTES_MAX: Final = 256  # bytes of a worker's address, of its model's name, and of each adapter's
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
POOLS_PAGE_BYTES_MAX: Final = 1 << 20  # bytes of a page's summaries, without the last summary
STATES_PER_ANSWER_MAX: Final = 1 << 20  # blocks in one GetPool answer, 1 byte each
SEQUENCE_BYTES_PER_ANSWER_MAX: Final = 512 << 10  # bytes of sequences and tables in the same answer
