"""Settings of the gateway: flags, then PDSERVE_... variables, then the `gateway` section of the file."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from gateway.exchange import BodyLimits
from proto.settings import Address, LogLevel, Port, Settings


class GatewaySettings(Settings):
    section: ClassVar[str] = "gateway"

    host: str = Field("127.0.0.1", description="address to listen on")
    port: Port = Field(8000, description="HTTP port; 0 takes a free one")
    router: Address = Field("127.0.0.1:50051", description="the router's gRPC address, HOST:PORT")
    max_body_bytes: int = Field(8 * 2**20, gt=0, description="a larger request body is refused with 413")
    body_timeout_s: float = Field(
        120, gt=0, le=3600, description="a request body that takes longer, or is silent for 15 s, is refused with 408"
    )
    drain_timeout_s: int = Field(30, ge=0, description="how long a stop waits for running answers")
    log_level: LogLevel = Field("info", description="what to log")

    @property
    def body_limits(self) -> BodyLimits:
        return BodyLimits(self.max_body_bytes, self.body_timeout_s)
