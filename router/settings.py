"""The settings of a router."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from proto.settings import LogLevel, ModelName, Name, Port, Settings


class RouterSettings(Settings):
    section: ClassVar[str] = "router"

    host: str = Field("127.0.0.1", description="address to listen on")
    port: Port = Field(50051, description="gRPC port; 0 takes a free one")
    metrics_port: Port = Field(0, description="port of /metrics; 0 takes a free one")
    cluster: Name = Field("default", description="name of the deployment")
    registry_url: str = Field("redis://127.0.0.1:6379/0", description="URL of the Redis-protocol registry")
    model: str = Field(min_length=1, description="the pods' model directory (for its tokenizer), or 'fake'")
    served_model_name: ModelName = Field("", description="what clients ask for; empty: the model's own name")
    queue_wait_s: float = Field(5.0, ge=0, le=3600, description="how long a request without a deadline waits for room")
    resume_wait_s: float = Field(
        30.0, ge=0, le=3600, description="likewise one whose pod was lost, if that is longer: a pod may be restarting"
    )
    max_waiting: int = Field(1024, ge=0, description="requests that may wait for room at a time")
    stop_grace_s: float = Field(10.0, ge=0, description="how long SIGTERM lets running requests finish")
    log_level: LogLevel = Field("info", description="log level")
