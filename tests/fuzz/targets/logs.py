"""Logs of vLLM and SGLang whose prompts and lines are hostile: a trace or one sentence."""

from __future__ import annotations

import json
import random
from pathlib import Path

from tests.fuzz.mutations import damage
from tests.fuzz.targets.traces import check
from tests.tools.replay.samples import SGLANG, SGLANG_JSON, VLLM

OUTCOMES = frozenset({"read", "refused"})
PIECES = (
    *("prompt_token_ids: [1, 2]", ", prompt_token_ids: [", "input_ids=[7, 7]", "Receive: obj=A("),
    *("Request a details: prompt: ", "'", '"', "\\", "\\'", "(", ")", "[", "]", "{", "}", ", "),
    *('{"event": "request.received", "obj": {"input_ids": [9, 9]}}', " 11-22 09:00:02 ", "\n"),
    *("2026-02-29 25:61:61", "é", "\u2028", "\x1b[31m", "0", "_", " ", "Receive: obj="),
)


def text(rng: random.Random) -> str:
    """Return a prompt that looks like parts of a log."""
    return "".join(
        rng.choice(PIECES) * rng.choice((1, 1, 1, 2, 2000)) for _ in range(rng.randrange(9))
    )


def a_line(rng: random.Random) -> str:
    """Return a line as an engine would write it for some prompt, or one that only looks so."""
    prompt, ids = text(rng), [rng.randrange(1 << 17) for _ in range(rng.choice((0, 4, 3000)))]
    time = f"{rng.randrange(1, 13):02}-{rng.randrange(1, 29):02} 09:00:00"
    match rng.randrange(5):
        case 0:
            return (
                f"DEBUG {time} [logger.py:39] Request cmpl-2 details: prompt: {prompt!r}, "
                f"prompt_token_ids: {ids}, prompt_embeds shape: None."
            )
        case 1:
            return (
                f"[2026-{time}] Receive: obj=GenerateReqInput(rid='b', text={prompt!r}, "
                f"input_ids={ids}, stop=[{prompt!r}])"
            )
        case 2:
            event = {"event": "request.received", "obj": {"text": prompt, "input_ids": ids}}
            return f"[2026-{time}] {json.dumps(event)}"
        case 3:
            message = f"Received request a: prompt: {prompt!r}, prompt_token_ids: {ids}."
            return json.dumps({"time": f"2026-{time}", "message": message})
        case _:
            return prompt


def attempt(rng: random.Random, folder: Path) -> str:
    lines = [rng.choice((*VLLM, *SGLANG, *SGLANG_JSON)) for _ in range(rng.randrange(4))]
    lines += [a_line(rng) for _ in range(rng.randrange(1, 6))]
    rng.shuffle(lines)
    made = "\n".join(lines).encode() + b"\n" * rng.randrange(2)
    path = folder / "server.log"
    path.write_bytes(damage(made, rng) if rng.random() < 0.4 else made)
    return check(path, rng)
