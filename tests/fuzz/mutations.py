"""Random changes of JSON values and of bytes."""

from __future__ import annotations

import random

VALUES: tuple[object, ...] = (
    *(None, True, False, 0, 1, -1, 2, 64, 65, 2**31, 2**53 + 1, 2**63, -(2**63), 2**64, 10**60),
    *(10**400, 0.5, -0.0, 1e-46, 1e-40, 5e-324, 1e308, float("nan"), float("inf"), -float("inf")),
    *("", " ", "x" * 5000, "\x00", "\u2028", "\ud800", "\U0001f600", "<|im_end|>", "é" * 300),
    *([], {}, [[]], [None], [0], [[0]], [-1], [1, "a"], ["a", "b"], [[1], [2]], [2**70], [1.5]),
    *({"a": {}}, {"type": "text"}, [{"type": "text", "text": 1}], [{"role": "user"}], [{}] * 50),
)


def mutate(value: object, rng: random.Random) -> object:
    """Return a JSON value that differs from ``value`` in one place."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        made = dict(value)
        key = rng.choice(list(made))
        action = rng.random()
        if action < 0.1:
            del made[key]
        elif action < 0.2:
            names = ("x", "", "n", "prompt", "messages", "\ud800", "best_of", "k" * 99)
            made[rng.choice(names)] = rng.choice(VALUES)
        else:
            made[key] = mutate(made[key], rng)
        return made
    if isinstance(value, list) and value and rng.random() < 0.7:
        at = rng.randrange(len(value))
        return [*value[:at], mutate(value[at], rng), *value[at + rng.randrange(2) :]]
    return rng.choice(VALUES)


def damage(sent: bytes, rng: random.Random) -> bytes:
    """Return the bytes with some of them changed, lost, doubled or added."""
    made = bytearray(sent)
    for _ in range(rng.choice((1, 1, 2, 8))):
        at = rng.randrange(len(made) + 1)
        length = rng.choice((1, 1, 3, 50))
        match rng.randrange(4):
            case 0:
                made[at : at + length] = rng.randbytes(length)
            case 1:
                del made[at : at + length]
            case 2:
                made[at:at] = made[at : at + length] * rng.choice((1, 300))
            case _:
                made[at:at] = rng.choice(
                    (b'"', b"'", b"[", b"{", b"\\", b",", b"\r\n", b"\xff", b"9" * 99, b"[" * 9999)
                )
    return bytes(made)
