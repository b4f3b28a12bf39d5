"""The transfer layer's side channel: what a peer must know to read this pod's blocks, and how to ask a peer for it."""

from __future__ import annotations

import grpc.aio

from kvtransfer.endpoint import KVEndpoint
from pod.rpc import Context, rpc
from proto import kv_pb2, kv_pb2_grpc
from proto.errors import PeerLost
from proto.service import channel

SERVICE_NAME = kv_pb2.DESCRIPTOR.services_by_name["KVTransfer"].full_name
FETCH_TIMEOUT_S = 3.0


class KVService(kv_pb2_grpc.KVTransferServicer):
    def __init__(self, endpoint: KVEndpoint) -> None:
        self._endpoint = endpoint

    @rpc
    async def GetAgentMetadata(
        self, request: kv_pb2.GetAgentMetadataRequest, context: Context
    ) -> kv_pb2.GetAgentMetadataResponse:
        return self._endpoint.describe()


async def fetch_metadata(address: str) -> kv_pb2.GetAgentMetadataResponse:
    """Asks the pod at `address`. Raises PeerLost when it does not answer in FETCH_TIMEOUT_S."""
    async with channel(address) as peer:
        try:
            stub: kv_pb2_grpc.KVTransferAsyncStub = kv_pb2_grpc.KVTransferStub(peer)
            return await stub.GetAgentMetadata(kv_pb2.GetAgentMetadataRequest(), timeout=FETCH_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise PeerLost(f"no transfer metadata from {address}: {error.code().name}: {error.details()}") from error
