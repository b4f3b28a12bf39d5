"""What every gRPC process of pdserve shares: channel options, a server with health and reflection, and its stop.

A stop has two stages: `drain` turns health to NOT_SERVING and refuses new calls while running ones finish, then what
is left after the grace period is cancelled.
"""

from __future__ import annotations

from collections.abc import Iterable

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from proto.decoding import RefuseUndecodable

MAX_MESSAGE_BYTES = 64 * 1024 * 1024

POD_PATIENCE_S = 4  # with a peer that does not answer pings, which go out every 2 s
CALLER_PATIENCE_S = 5  # with a caller, pinged every 5 s: one that vanished or froze is cut off, its calls cancelled
# Between a router and its gateways, either way: what a pod does another can do, but a router or a gateway that stood
# still goes on with what it alone has.
ROUTER_PATIENCE_S = 15

# A reconnect is tried after 0.1 s so that a restarted peer is found soon.
CHANNEL_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 2000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.use_local_subchannel_pool", 1),
]
SERVER_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),  # a taken port is an error, not a second owner
    ("grpc.keepalive_time_ms", 5000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 1000),
    ("grpc.keepalive_permit_without_calls", 1),
]


def channel(address: str, patience_s: float = POD_PATIENCE_S) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address, options=[*CHANNEL_OPTIONS, *_patience(patience_s)])


def _patience(seconds: float) -> list[tuple[str, int]]:
    """grpc 1.85 heeds the latter: without it a frozen peer is kept for 60 s."""
    patience_ms = int(seconds * 1000)
    return [("grpc.keepalive_timeout_ms", patience_ms), ("grpc.http2.ping_timeout_ms", patience_ms)]


class Server:
    """A grpc.aio server with health and reflection. Register servicers on `.grpc`, then `start()`."""

    def __init__(self, service_names: Iterable[str], patience_s: float = CALLER_PATIENCE_S) -> None:
        options = [*SERVER_OPTIONS, *_patience(patience_s)]
        self.grpc = grpc.aio.server(options=options, interceptors=[RefuseUndecodable()])
        self.port = 0
        self._health = health.aio.HealthServicer()
        self._names = tuple(service_names)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)
        reflection.enable_server_reflection((*self._names, health.SERVICE_NAME, reflection.SERVICE_NAME), self.grpc)

    async def start(self, host: str, port: int) -> int:
        """Binds and serves; returns the port (a free one for 0). Raises OSError when it cannot bind."""
        try:
            self.port = self.grpc.add_insecure_port(f"{host}:{port}")
        except RuntimeError as error:
            raise OSError(f"cannot listen on {host}:{port}: address in use or not permitted") from error
        await self.grpc.start()
        return self.port

    async def set_serving(self, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", *self._names):
            await self._health.set(name, status)

    async def stop(self, grace_s: float) -> None:
        await self._health.enter_graceful_shutdown()
        await self.grpc.stop(grace_s)
