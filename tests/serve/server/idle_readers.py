"""Readers of events that request a replay, subscribe, and read nothing until stdin is closed.

python -m tests.serve.server.idle_readers EVENTS REPLAY NUM
"""

from __future__ import annotations

import sys

import zmq


def main(events: str, replay: str, num: int) -> None:
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 4 * num)
    sockets = []
    for _ in range(num):
        sub, asking = context.socket(zmq.SUB), context.socket(zmq.DEALER)
        for each, endpoint in ((sub, events), (asking, replay)):
            each.setsockopt(zmq.RCVHWM, 1)
            each.setsockopt(zmq.RCVBUF, 4096)
            each.setsockopt(zmq.RECONNECT_IVL, -1)
            each.setsockopt(zmq.LINGER, 0)
            each.connect(endpoint)
            sockets.append(each)
        sub.setsockopt(zmq.SUBSCRIBE, b"")
        asking.send_multipart([b"", bytes(8)])
    print("asked", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
