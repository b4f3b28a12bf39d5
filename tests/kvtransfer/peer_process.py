"""`python -m tests.kvtransfer.peer_process BACKEND PARAMS BYTES`: an agent that does what stdin says."""

from __future__ import annotations

import json
import sys

from kvtransfer.agent import Agent, AgentConfig
from kvtransfer.memory import allocate
from tests.kvtransfer.support import drain, serve


def main() -> None:
    backend, params, num_bytes = sys.argv[1:]
    memory = allocate(backend, int(num_bytes))
    agent = Agent("peer", AgentConfig(backends=[]))
    agent.create_backend(backend, json.loads(params))
    agent.register_memory([memory])

    def notifs(count: int) -> list[tuple[str, str]]:
        return [(name, m.hex()) for name, messages in drain(agent, count).items() for m in messages] if count else []

    serve(
        {
            "metadata": lambda: agent.get_agent_metadata().hex(),
            "address": lambda: memory.ctypes.data,
            "fill": memory.fill,
            "count": lambda value: int((memory == value).sum()),
            "notifs": notifs,
            "add": lambda metadata: agent.add_remote_agent(bytes.fromhex(metadata)).decode(),
            "send": lambda name, message: agent.send_notif(name, bytes.fromhex(message)),
        }
    )


if __name__ == "__main__":
    main()
