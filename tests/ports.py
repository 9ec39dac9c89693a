"""Ports for servers that another process opens a moment later."""

from __future__ import annotations

import random
import socket

# Below those that the kernel hands to clients: one of them cannot take a port between its choice and its use.
LOWEST, HIGHEST = 10_000, 19_999
_dice = random.SystemRandom()


def free_ports(count: int) -> list[int]:
    """So many different ports of 127.0.0.1 that nobody listens on now."""
    found: set[int] = set()
    while len(found) < count:
        port = _dice.randint(LOWEST, HIGHEST)
        with socket.socket() as listening:
            try:
                listening.bind(("127.0.0.1", port))
            except OSError:
                continue
        found.add(port)
    return sorted(found)
