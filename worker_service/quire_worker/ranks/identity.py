"""A process's rank in its crew, and where the ranks meet.

There are two ways to start several ranks:

    quire worker --tensor-parallel 2                      this process is rank 0 and starts the other ranks, here; the
                                                          ranks meet over a file in a folder of this user alone
    torchrun --nproc-per-node 2 -m quire_worker ...       torchrun starts all ranks, on any machines; the ranks meet at
                                                          torchrun's address (MASTER_ADDR, MASTER_PORT)

The ranks' messages are neither encrypted nor authenticated. The messages stay on this machine's loopback interface,
unless torchrun names another address and `--trusted-rank-network` allows it (docs/security.md).
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from quire._transport.address import is_local
from quire.errors import UsageError

RENDEZVOUS = "QUIRE_RANKS_RENDEZVOUS"  # this variable names the file where ranks meet, if a worker started them
_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True)
class RankIdentity:
    """One rank's number in its crew, and where the ranks meet.

    Attributes:
        rank: this rank's number, from 0; rank 0 holds the session and the server.
        size: number of ranks in the crew.
        local_rank: this rank's number among the ranks of this machine, from 0.
        local_size: number of ranks on this machine.
        file: where ranks on this machine meet; None if torchrun names an address, or no other rank is started yet.
        is_by_torchrun: whether torchrun has started all ranks.
        is_on_loopback: whether the ranks' messages stay on this machine.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    file: Path | None = None
    is_by_torchrun: bool = False
    is_on_loopback: bool = True

    def store(self) -> dist.Store:
        """Returns the torch store through which the ranks find each other."""
        if self.file is not None:
            return dist.FileStore(str(self.file), self.size)
        store: dist.Store = next(iter(dist.rendezvous("env://")))[0]
        return store


def identity_of(environment: Mapping[str, str], *, size: int | None, may_leave_machine: bool) -> RankIdentity:
    """Determines which rank this process is.

    Args:
        environment: the process's environment variables.
        size: number of ranks on the command line; None if it names none.
        may_leave_machine: whether ranks may meet on a network.

    Returns:
        The rank. The rank is 0 if no ranks were started before: this process is the only rank, or has to start the
        others.

    Raises:
        UsageError: torchrun started a different number of ranks, or they would meet on a network that is not trusted.
    """
    if RENDEZVOUS in environment:
        rank, found = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        return RankIdentity(rank, found, rank, found, Path(environment[RENDEZVOUS]))
    if any(name not in environment for name in _TORCHRUN):
        return RankIdentity(size=size or 1, local_size=size or 1)
    found, address = int(environment["WORLD_SIZE"]), environment["MASTER_ADDR"]
    if size is not None and size != found:
        raise UsageError(f"--tensor-parallel {size}: torchrun has started {found} ranks; leave the option out")
    is_on_loopback = is_local(f"[{address}]:1" if ":" in address else f"{address}:1")
    if not is_on_loopback and not may_leave_machine:
        raise UsageError(
            f"the ranks would connect through {address}, but their messages are neither encrypted nor "
            "authenticated: give --trusted-rank-network if only trusted machines can reach that network"
        )
    rank = int(environment["RANK"])
    local_rank = int(environment.get("LOCAL_RANK", rank))
    local_size = int(environment.get("LOCAL_WORLD_SIZE", found))
    return RankIdentity(rank, found, local_rank, local_size, is_by_torchrun=True, is_on_loopback=is_on_loopback)


def loopback_interface() -> str | None:
    """Returns the name of this machine's loopback interface; None if it is not found."""
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
