"""kvtier's tier below vLLM's own host tier, in engines whose keys hold names instead of content.

vLLM makes the scheduler's half from its real configuration; no model runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm.config import VllmConfig

from kvtier.connectors.vllm.standalone.settings import engine_of
from kvtier.core.errors import ConfigError
from tests.engines.vllm.blip import make_blip
from tests.engines.vllm.engines import multi
from tests.engines.vllm.scheduler_half import make_config, make_half
from tests.engines.vllm.tiering import Harness, config_of

LORA: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8}
COUNTED = {"mm_processor_cache_gb": 0, "enable_prefix_caching": False}


@pytest.fixture(scope="module")
def vision_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_blip(tmp_path_factory.mktemp("blip"))


def _tiers(folder: Path, **settings: object) -> dict[str, Any]:
    """Return the value of ``--kv-transfer-config``."""
    tier = {"type": "kvtier", "disk_path": str(folder), "disk_capacity": "1MiB", **settings}
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": 1 << 20,
            "secondary_tiers": [tier],
        },
    }


def _start(config: VllmConfig, transfer: dict[str, Any]) -> None:
    """Make and shut down the scheduler's half of vLLM's connector."""
    make_half(config, transfer).shutdown()


@pytest.mark.parametrize(
    ("options", "message"),
    [(LORA, "adapters"), ({"enable_prompt_embeds": True}, "embeddings")],
)
def test_names_in_keys_are_refused_without_a_namespace(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    config = make_config(**options)
    with pytest.raises(ConfigError, match=message):
        _start(config, _tiers(tmp_path))
    _start(config, _tiers(tmp_path, namespace="of Monday's adapters"))


def test_media_are_refused_without_a_namespace(vision_model: Path, tmp_path: Path) -> None:
    config = make_config(vision_model)
    with pytest.raises(ConfigError, match="images, video and audio: .*multi_modal_uuids"):
        _start(config, _tiers(tmp_path))
    _start(config, _tiers(tmp_path, namespace="nobody chooses identifiers"))


def test_media_that_are_counted_are_refused(vision_model: Path, tmp_path: Path) -> None:
    """No text makes a counter that starts again a name of content."""
    config = make_config(vision_model, **COUNTED)
    with pytest.raises(ConfigError, match="vLLM counts images"):
        _start(config, _tiers(tmp_path, namespace="any"))


def test_text_of_a_model_that_could_see_is_served(vision_model: Path, tmp_path: Path) -> None:
    _start(make_config(vision_model, language_model_only=True), _tiers(tmp_path))
    _start(make_config(), _tiers(tmp_path))


def test_tier_inside_another_connector_is_refused_as_well(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="adapters"):
        _start(make_config(**LORA), multi(_tiers(tmp_path)))


def test_engine_is_known_while_its_tiers_are_made_only(tmp_path: Path) -> None:
    with engine_of(make_config()):
        Harness(config_of(tmp_path, 16, 16, namespace="")).manager.shutdown()
    with pytest.raises(ConfigError, match="nothing shows whether the engine serves adapters"):
        Harness(config_of(tmp_path, 16, 16, namespace=""))
