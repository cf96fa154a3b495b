"""The calls of WorkerService that load, drop and list adapters."""

from __future__ import annotations

from typing import Any, TypeAlias

from grpc import aio
from quire._serving.rpc import Authorize, abort
from quire.errors import QuireError, Reason
from quire.protocol.permissions import Permissions
from quire.v1 import worker_pb2 as pb
from quire.v1 import worker_pb2_grpc as pb_grpc

from quire_worker.engine import Engine
from quire_worker.model.adapters.adapter import Adapter
from quire_worker.requests.adapters import request_count

Context: TypeAlias = "aio.ServicerContext[Any, Any]"


class AdapterCalls(pb_grpc.WorkerServiceServicer):
    """RPCs on adapters. Owners of the worker's pool may load and unload adapters. Observers may list them."""

    _engine: Engine
    _pool: str
    _authorize: Authorize

    async def LoadAdapter(self, request: pb.LoadAdapterRequest, context: Context) -> pb.LoadAdapterResponse:
        """Loads an adapter while requests continue."""
        try:
            self._check(self._authorize(context).may_own(self._pool))
            adapter = await self._engine.adapters.load(request.name, request.folder)
        except QuireError as error:
            await abort(context, error)
        return pb.LoadAdapterResponse(adapter=self._message(adapter))

    async def UnloadAdapter(self, request: pb.UnloadAdapterRequest, context: Context) -> pb.UnloadAdapterResponse:
        """Drops an adapter that no request uses."""
        engine = self._engine
        try:
            self._check(self._authorize(context).may_own(self._pool))
            adapter = engine.adapters.named(request.name)
            engine.adapters.drop(request.name, request_count(adapter, engine.open_requests))
        except QuireError as error:
            await abort(context, error)
        return pb.UnloadAdapterResponse()

    async def ListAdapters(self, request: pb.ListAdaptersRequest, context: Context) -> pb.ListAdaptersResponse:
        """Returns the loaded adapters, and their limits."""
        permissions: Permissions = self._authorize(context)
        try:
            self._check(permissions.may_observe(self._pool))
        except QuireError as error:
            await abort(context, error)
        limits = self._engine.adapters.limits
        return pb.ListAdaptersResponse(
            adapters=map(self._message, self._engine.adapters.all),
            count_max=limits.count_max,
            rank_max=limits.rank_max,
            byte_count_max=limits.byte_count_max,
        )

    def _check(self, is_permitted: bool) -> None:
        if not is_permitted:
            raise QuireError.of(Reason.POOL_FORBIDDEN, "the certificate does not permit this worker's pool")

    def _message(self, adapter: Adapter) -> pb.Adapter:
        return pb.Adapter(
            name=adapter.name,
            digest=adapter.digest,
            rank=adapter.rank,
            layer_count=len(adapter.factors),
            byte_count=adapter.byte_count,
            request_count=request_count(adapter, self._engine.open_requests),
        )
