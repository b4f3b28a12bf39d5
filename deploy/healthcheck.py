"""A container's health: `python deploy/healthcheck.py grpc|http ADDRESS`. Exit code 0 when it serves."""

from __future__ import annotations

import sys
import urllib.error
import urllib.request

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

TIMEOUT_S = 3.0


def serves_grpc(address: str) -> bool:
    with grpc.insecure_channel(address) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
        except grpc.RpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def serves_http(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://{address}/health", timeout=TIMEOUT_S) as answer:
            return bool(answer.status == 200)
    except urllib.error.URLError:
        return False


def main() -> int:
    kind, address = sys.argv[1:]
    return 0 if {"grpc": serves_grpc, "http": serves_http}[kind](address) else 1


if __name__ == "__main__":
    raise SystemExit(main())
