"""The branches of callers. A branch is found by its id, and only by callers of its namespace.

Lifecycle of a branch:

    1. held    a worker holds it, and the client's handle renews it there
    2. ended   it was released, no call named it for `ttl_s`, or its worker no longer knows it. A running call counts as
               naming it until the call ends
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from quire.errors import QuireError

from quire_gateway.backend import Model
from quire_gateway.failures import BRANCH_NOT_FOUND, ApiError
from quire_gateway.prepared_call import Held


class Branch:
    """A branch of a caller.

    Attributes:
        held: the client's handle of the branch, and its worker.
        model: the model that computes it.
        namespace: the namespace of its caller.
        ttl_s: how long it lives after the last call that names it.
        identity: the id by which callers name it.
    """

    def __init__(self, held: Held, model: Model, namespace: str, ttl_s: float) -> None:
        self.held, self.model, self.namespace, self.ttl_s = held, model, namespace, ttl_s
        self.identity = f"branch_{held.branch.id.hex()}"
        self.use_count = 0
        self.timer: asyncio.TimerHandle | None = None

    def as_json(self) -> dict[str, Any]:
        """Returns the branch as callers see it."""
        return {
            "id": self.identity,
            "object": "branch",
            "model": self.model.name,
            "token_count": self.held.branch.token_count,
            "cached_token_count": self.held.branch.cached_token_count,
            "ttl_s": self.ttl_s,
        }


class Branches:
    """The branches of all callers. Workers limit their number."""

    def __init__(self) -> None:
        self._of: defaultdict[str, dict[str, Branch]] = defaultdict(dict)
        self._releasing: set[asyncio.Task[None]] = set()

    def add(self, held: Held, model: Model, namespace: str, ttl_s: float) -> Branch:
        """Adds a branch that a worker has made, and starts its timer."""
        branch = Branch(held, model, namespace, ttl_s)
        self._of[namespace][branch.identity] = branch
        self._begin_time(branch)
        return branch

    def all_of(self, namespace: str) -> list[Branch]:
        """Returns the branches of a namespace, the oldest first."""
        return list(self._of[namespace].values()) if namespace in self._of else []

    @contextmanager
    def using(self, namespace: str, identity: str) -> Iterator[Branch]:
        """Yields a branch. The branch cannot expire during the block; its timer restarts afterwards.

        Raises:
            ApiError: the namespace has no branch with this id.
        """
        branch = self._of[namespace].get(identity) if namespace in self._of else None
        if branch is None:
            what = "the branch does not exist: it was released or expired, or its worker was restarted"
            raise ApiError(404, what, code=BRANCH_NOT_FOUND)
        branch.use_count += 1
        try:
            yield branch
        except ApiError as error:
            if error.body["error"]["code"] == BRANCH_NOT_FOUND:
                self._forget(branch)
            raise
        finally:
            branch.use_count -= 1
            if self._of.get(namespace, {}).get(identity) is branch:
                self._begin_time(branch)

    async def release(self, branch: Branch) -> None:
        """Ends a branch; its forks live on."""
        self._forget(branch)
        with contextlib.suppress(QuireError):  # If releasing fails, the branch expires at its worker.
            await branch.held.branch.release()

    def _begin_time(self, branch: Branch) -> None:
        if branch.timer is not None:
            branch.timer.cancel()
        branch.timer = asyncio.get_running_loop().call_later(branch.ttl_s, self._time_is_over, branch)

    def _time_is_over(self, branch: Branch) -> None:
        if branch.use_count:
            self._begin_time(branch)
            return
        task = asyncio.create_task(self.release(branch))
        self._releasing.add(task)
        task.add_done_callback(self._releasing.discard)

    def _forget(self, branch: Branch) -> None:
        if branch.timer is not None:
            branch.timer.cancel()
        own = self._of.get(branch.namespace, {})
        own.pop(branch.identity, None)
        if not own:
            self._of.pop(branch.namespace, None)
