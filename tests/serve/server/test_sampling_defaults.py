"""A model's ``generation_config.json`` as defaults of requests."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import openai
import pytest

from kvtier.core.errors import ConfigError
from kvtier.serve.engine import Engine, EngineConfig
from kvtier.serve.engine.checkpoint import SamplingDefaults, read_sampling_defaults
from kvtier.serve.engine.model_names import BUILTIN

from .conftest import MODEL, running

pytestmark = pytest.mark.engine


def write(folder: Path, **settings: object) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(settings))
    return folder


def test_the_settings_are_read(tmp_path: Path) -> None:
    assert read_sampling_defaults(tmp_path) == SamplingDefaults()
    found = read_sampling_defaults(
        write(
            tmp_path,
            do_sample=True,
            temperature=0.6,
            top_k=20,
            top_p=0.95,
            min_p=0,
            repetition_penalty=1.05,
            max_new_tokens=5,
        )
    )
    assert found == SamplingDefaults(0.6, 0.95, 20, 0, 1.05)
    left_out = write(tmp_path, temperature=None, top_k=-1, do_sample=False)
    assert read_sampling_defaults(left_out) == SamplingDefaults()


@pytest.mark.parametrize(
    "setting", [{"top_p": 0}, {"top_p": "0.9"}, {"temperature": -1}, {"top_k": True}, {"min_p": 2}]
)
def test_what_makes_no_sense_is_an_error(tmp_path: Path, setting: dict[str, Any]) -> None:
    [name] = setting
    with pytest.raises(ConfigError, match=f"model: {name} in .* has to be a number in"):
        read_sampling_defaults(write(tmp_path, **setting))


def test_requests_get_the_models_settings_and_override_them(tmp_path: Path) -> None:
    folder = shutil.copytree(BUILTIN / MODEL, tmp_path / MODEL)
    write(folder, temperature=1.9, top_k=1, eos_token_id=[2, 0])
    config = EngineConfig(model=str(folder), device_capacity="16MiB", threads=1)

    def text(client: openai.OpenAI, **given: Any) -> str:
        answer = client.completions.create(
            model=MODEL, prompt="class Node:\n", max_tokens=24, seed=1, extra_body=given
        )
        return answer.choices[0].text

    with Engine(config) as engine, running(engine) as served, served.client() as client:
        assert engine.sampling_defaults == SamplingDefaults(temperature=1.9, top_k=1)
        greedy = text(client, temperature=0)
        assert text(client) == greedy  # the likeliest one token, by top_k
        assert text(client, top_k=None) == greedy
        assert text(client, top_k=0) != greedy
        assert text(client, top_k=0, temperature=0) == greedy
