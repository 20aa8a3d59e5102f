"""Models of transformers that the embedded engine serves: try each kind, and write the table.

    python -m scripts.model_coverage run [KIND ...]  try kinds (all of them by default)
    python -m scripts.model_coverage tables          write the table of docs/models.md
    python -m scripts.model_coverage tables --check  exit with 1 if it is out of date

A kind is a small random checkpoint. It is tried in three dtypes as a user would: the engine loads
it and checks itself. Of what is served, logits are compared with transformers' own, and with the
engine's from device memory, from host memory, and from disk after a restart. Each kind is recorded
when it has been tried.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import shutil
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "tests/model_coverage.json"
PAGE = ROOT / "docs/models.md"
BEGIN, END = "<!-- Written by scripts/model_coverage.py: -->\n", "<!-- end -->\n"

WINDOW = 48
CHUNK, BLOCK, NUM_TOKENS, NUM_NEW, NUM_PROMPTS = 32, 16, 300, 8, 3
DTYPES = ("float32", "bfloat16", "float16")
TIERS = "device, host, disk"
LARGEST = 30_000_000
"""Parameters of a checkpoint; a kind with more is not tried."""

SIZES: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "initializer_range": 0.1,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "decoder_sparse_step": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "index_head_dim": 16,
    "index_n_heads": 32,  # with few, many scores are 0, and chance decides among them
    "index_topk": 64,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 32,
    "mamba_d_ssm": 128,
    "mamba_expand": 2,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 16,
    "state_size": 8,
    "chunk_size": 32,
    "block_size": 32,
    "ffn_dim": 128,
    "ffn_hidden_size": 128,
    "expert_ffn_hidden_size": 32,
    "word_embed_proj_dim": 64,
    "sliding_window": WINDOW,
    "attention_window_size": WINDOW,
    "attention_chunk_size": 64,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 16,
    "laurel_rank": 8,
    "lru_width": 64,
    "attention_hidden_size": 64,
    "n_embd": 64,
    "n_layer": 4,
    "n_head": 4,
    "n_inner": 128,
    "n_positions": 4096,
    "d_model": 64,
    "n_layers": 4,
    "num_layers": 4,
    "encoder_layers": 2,
    "decoder_layers": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "window_size": WINDOW,
    "n_heads": 4,
    "rotary_dim": 8,
}
"""Sizes of a small checkpoint. A kind takes those that its configuration has."""

MLA = {"num_key_value_heads": 4, "head_dim": 8}
LINEAR = ["linear_attention"] * 3 + ["full_attention"]
SLIDING = ["sliding_attention", "full_attention"] * 2
MAX_ROUNDING = 3.0
"""Largest difference in 16 bits, relative to that of transformers' own logits."""
DEFAULT = object()
"""The value that the configuration has by itself, in spite of ``SIZES``."""

OWN: Mapping[str, dict[str, Any]] = {
    "deepseek_v2": MLA,
    "deepseek_v3": MLA,
    "deepseek_v32": MLA,
    "glm_moe_dsa": {**MLA, "qk_head_dim": 24},
    "glm4_moe_lite": MLA,
    "longcat_flash": {**MLA, "num_layers": 2, "moe_topk": 2, "zero_expert_num": 1},
    "youtu": MLA,
    "axk1": MLA,
    "kimi_linear": {
        **MLA,
        "layer_types": LINEAR,
        "linear_attn_config": {
            "kda_layers": [1, 2, 3],
            "full_attn_layers": [4],
            "num_heads": 4,
            "head_dim": 16,
            "short_conv_kernel_size": 4,
        },
    },
    "mistral": {"sliding_window": None},
    "mixtral": {"sliding_window": None},
    "ministral": {"layer_types": SLIDING},
    "phi": {"num_key_value_heads": 4},
    "gemma2": {"attn_logit_softcapping": 1.0},
    "gemma3_text": {"num_hidden_layers": 6},
    "gemma3n_text": {
        "num_hidden_layers": 10,
        "num_kv_shared_layers": 4,
        "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 2,
        "activation_sparsity_pattern": None,
    },
    "gemma4_text": {
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
    },
    "granitemoehybrid": {
        "shared_intermediate_size": 32,
        "layer_types": ["mamba", "mamba", "mamba", "attention"],
    },
    "falcon": {"head_dim": DEFAULT, "new_decoder_architecture": True, "num_kv_heads": 2},
    "falcon, ALiBi": {"head_dim": DEFAULT, "alibi": True, "multi_query": True},
    "mamba2": {"num_heads": 8, "state_size": 16, "n_groups": 1},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "use_mamba_kernels": False,
        "mamba_d_state": 8,
    },
    "bamba": {"attn_layer_indices": [3]},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"],
        "n_groups": 1,
    },
    "zamba2": {
        "layers_block_type": ["linear_attention", "linear_attention", "hybrid", "linear_attention"],
        "mamba_headdim": 16,
        "n_mamba_heads": 8,
        "mamba_ngroups": 1,
        "num_key_value_heads": 4,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "num_mem_blocks": 1,
        "hybrid_layer_ids": [2],
    },
    "phimoe": {"sliding_window": None},
    "zaya": {"num_experts_per_tok": 1},
    "minicpm3": {"num_key_value_heads": 4, "head_dim": DEFAULT},
    "dots3_note_text": {"num_key_value_heads": 4},
    "gpt_neo": {"num_layers": 4, "attention_types": [[["global", "local"], 2]]},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
    "mpt": {"max_seq_len": 4096},
    "llama4_text": {"intermediate_size_mlp": 128, "interleave_moe_layer_step": 1},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1},
    "hunyuan_v1_moe": {"moe_topk": 2},
    "recurrent_gemma": {"num_hidden_layers": 6},
    "xlstm": {"num_heads": 4},
    "qwen2": {"use_sliding_window": False, "sliding_window": DEFAULT},
    "qwen3": {"use_sliding_window": False, "sliding_window": DEFAULT},
}
"""Further fields of a kind, or other values than in ``SIZES``."""

VARIANTS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "mistral, window": ("mistral", {"sliding_window": WINDOW}),
    "phimoe, window": ("phimoe", {"sliding_window": WINDOW}),
    "qwen2, window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    ),
    "falcon, ALiBi": ("falcon", {}),
}
"""Further kinds, by their type of model."""


@dataclass
class Outcome:
    """Result of one kind in one dtype.

    served: by which runner; "" if refused. reason: of a refusal, or of what went wrong.
    attention: kinds of attention of a served model.
    difference: of logits from transformers' own, relative to the largest logit: the largest one of
    the prompt in one shot and the tokens after it. In 16 bits that of the median token, from logits
    that transformers computes in float32.
    allowed: for the difference. In 16 bits it rests on that of transformers' own logits.
    exact: tiers from which logits are those of a cold run, bit for bit.
    """

    served: str = ""
    reason: str = ""
    attention: str = ""
    difference: float = 0.0
    allowed: float = 1e-3
    exact: str = ""

    @property
    def is_wrong(self) -> bool:
        """Whether the model is served, and not as it should be."""
        return bool(self.served) and not (self.difference < self.allowed and self.exact == TIERS)


# -- one kind --------------------------------------------------------------------------------------


def kinds() -> dict[str, str]:
    """Return the type of model of each kind: all causal ones of transformers, and the variants.

    Those with parts for images or sound are left out: their text models are kinds of their own.
    """
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    found = {each: each for each in NAMES if not CONFIG_MAPPING[each].sub_configs or each == "mpt"}
    found.update({name: kind for name, (kind, _) in VARIANTS.items()})
    return dict(sorted(found.items()))


def small_config(name: str, kind: str, vocab_size: int) -> Any:
    """Return a small configuration of a kind."""
    from transformers import CONFIG_MAPPING

    family = CONFIG_MAPPING[kind]
    known = {*family().to_dict(), *family.attribute_map}
    wanted = {**SIZES, **OWN.get(kind, {}), **OWN.get(name, {}), **VARIANTS.get(name, ("", {}))[1]}
    own = {**OWN.get(kind, {}), **OWN.get(name, {}), **VARIANTS.get(name, ("", {}))[1]}
    given = {
        key: value
        for key, value in wanted.items()
        if value is not DEFAULT and (key in known or key in own)
    }
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    for each in ("vocab_size", "vocab_size_per_layer_input", "unpadded_vocab_size"):
        if each in known or each == "vocab_size":
            special[each] = vocab_size
    return family(**given, **special)


def save(name: str, kind: str, folder: Path) -> None:
    """Write a checkpoint of a kind, with the built-in model's tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM

    from kvtier.serve.engine.model_names import BUILTIN
    from kvtier.serve.engine.models import DEFAULT as TINY

    tokenizer = BUILTIN / TINY
    vocab_size = json.loads((tokenizer / "config.json").read_text())["vocab_size"]
    config = small_config(name, kind, vocab_size)
    with torch.device("meta"):
        size = sum(
            parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters()
        )
    if size > LARGEST:
        raise ValueError(f"{size / 1e6:.0f} million parameters: its sizes have other names")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / file, folder)


def attempt(name: str, folder: Path, disk: Path, dtype: str = "float32", seed: int = 1) -> Outcome:
    """Return what the engine makes of a checkpoint of kind ``name``.

    In 16 bits rounding may send a token to another expert, and all later ones attend to it. After a
    large difference another prompt is tried, two times at most.
    """
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM

    from kvtier.core.config import CacheConfig
    from kvtier.core.errors import ConfigError
    from kvtier.core.types import LoadPolicy
    from kvtier.serve.engine import Completion, Engine, EngineConfig, SamplingParams

    config = EngineConfig(
        model=str(folder),
        dtype=dtype,
        block_size=BLOCK,
        chunk_tokens=CHUNK,
        device_capacity="24MiB",
        max_model_tokens=2 * NUM_TOKENS,
        threads=1,
        cache=CacheConfig(
            host_capacity="64MiB",
            disk_path=str(disk),
            disk_capacity="256MiB",
            load_policy=LoadPolicy.ALWAYS,  # on a busy machine so small a model computes faster
        ),
    )
    params = SamplingParams(max_tokens=NUM_NEW, ignore_eos=True, keep_logits=True)

    def ask(engine: Engine, expected: str = "") -> Completion:
        done = engine.submit(prompt, params).result(120)
        if done.finish_reason != "length":
            raise RuntimeError(f"the request ended by {done.finish_reason}: {done.error}")
        if expected and not done.hit_tokens.get(expected):
            raise RuntimeError(f"nothing came from {expected}: {dict(done.hit_tokens)}")
        return done

    try:
        engine = Engine(config)
    except ConfigError as error:
        told = str(error).removeprefix("model: ").removeprefix(repr(str(folder)))
        return Outcome(reason=told.removeprefix(":").strip().replace(str(folder), name))
    with engine:
        random = torch.Generator().manual_seed(seed)
        prompt = torch.randint(3, engine.info.vocab_size, (NUM_TOKENS,), generator=random).tolist()
        attention, runner = engine.profile.features(), engine.profile.runner_name
        cold = ask(engine)
        warm = [ask(engine, "device")]
        engine.drain()
        engine.clear_tier("device")
        warm.append(ask(engine, "host"))
        engine.drain()
    with Engine(config) as again:
        warm.append(ask(again, "disk"))
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", trust_remote_code=False
    ).eval()
    text = torch.tensor([prompt + list(cold.token_ids[:-1])])
    tiers = TIERS.split(", ")
    exact = [tier for tier, found in zip(tiers, warm, strict=True) if _equal(cold, found)]
    outcome = Outcome(served=runner, attention=attention, exact=", ".join(exact))
    with torch.inference_mode():
        own = model(text, use_cache=False).logits[0, NUM_TOKENS - 1 :].float().numpy()
        if dtype == "float32":
            outcome.difference = float(_off(np.asarray(cold.logits), own).max())
            return outcome
        model = copy.deepcopy(model).float()
        right = model(text, use_cache=False).logits[0, NUM_TOKENS - 1 :].numpy()
    rounding = float(np.median(_off(own, right)))
    outcome.difference = float(np.median(_off(np.asarray(cold.logits), right)))
    outcome.allowed = MAX_ROUNDING * max(rounding, 2 * torch.finfo(getattr(torch, dtype)).eps)
    if outcome.is_wrong and outcome.exact == TIERS and seed < NUM_PROMPTS:
        return attempt(name, folder, disk.with_name(f"{dtype}-{seed}"), dtype, seed + 1)
    return outcome


def _equal(cold: Any, found: Any) -> bool:
    import numpy as np

    return np.array_equal(cold.logits, found.logits)


def _off(found: Any, right: Any) -> Any:
    """Return each token's largest difference, relative to its largest logit."""
    import numpy as np

    return np.abs(found - right).max(-1) / np.abs(right).max(-1)


def run(names: list[str]) -> bool:
    """Try kinds, and note the outcomes. Return whether none was served wrong."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.simplefilter("ignore")
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    known = kinds()
    found = read_record()["kinds"] if names else {}
    found = {name: outcomes for name, outcomes in found.items() if name in known}
    for name in names or known:
        found.pop(name, None)
        with TemporaryDirectory() as folder:
            model = Path(folder, "model")
            try:
                save(name, known[name], model)
            except Exception as error:  # any type: each kind fails in its own way
                print(f"{name:22} not tried: {_reason(error)}", flush=True)
                continue
            found[name] = {"type": known[name]}
            for dtype in DTYPES:
                try:
                    outcome = attempt(name, model, Path(folder, dtype), dtype)
                except Exception as error:
                    outcome = Outcome(served="?", reason=_reason(error))
                found[name][dtype] = asdict(outcome)
                what = "WRONG " if outcome.is_wrong else outcome.served or "refused"
                told = outcome.reason or (
                    f"{outcome.difference:.1e} < {outcome.allowed:.1e}; {outcome.exact}"
                )
                print(f"{name:22} {dtype:8} {what} {outcome.attention} {told}", flush=True)
        record = {"transformers": transformers.__version__, "kinds": dict(sorted(found.items()))}
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
    return not any(
        outcome.is_wrong
        for kind in outcomes_of(read_record()).values()
        for outcome in kind.values()
    )


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


# -- the table -------------------------------------------------------------------------------------


def read_record() -> dict[str, Any]:
    """Return the outcomes of the last run."""
    record: dict[str, Any] = json.loads(RECORD.read_text())
    return record


def outcomes_of(record: Mapping[str, Any]) -> dict[str, dict[str, Outcome]]:
    """Return the outcomes, by kind and dtype."""
    return {
        name: {dtype: Outcome(**found[dtype]) for dtype in DTYPES}
        for name, found in record["kinds"].items()
    }


def rows() -> Iterator[str]:
    """Yield the lines of the table."""
    record = read_record()
    found = outcomes_of(record)
    served = {name: kind for name, kind in found.items() if kind["float32"].served}
    refused = {name: kind for name, kind in found.items() if name not in served}
    wrong = sum(any(outcome.is_wrong for outcome in kind.values()) for kind in found.values())
    counts = f"{len(served)} are served, {len(refused)} are refused, {wrong} are served wrong."
    yield f"With transformers {record['transformers']}, {len(found)} kinds were tried: {counts}"
    yield ""
    yield "| kind | runner | attention | float32 | bfloat16 | float16 | device, host, disk |"
    yield "| -- | -- | -- | -- | -- | -- | -- |"
    for name, kind in served.items():
        first = kind["float32"]
        halves = " | ".join(map(_against_rounding, (kind[dtype] for dtype in DTYPES[1:])))
        is_equal = all(outcome.exact == TIERS for outcome in kind.values() if outcome.served)
        exact = "equal" if is_equal else "differ"
        yield (
            f"| {name} | {first.served} | {first.attention} | {first.difference:.0e} | {halves} | "
            f"{exact} |"
        )
    yield ""
    yield "| kind | refused, because it |"
    yield "| -- | -- |"
    for name, kind in refused.items():
        yield f"| {name} | {kind['float32'].reason.partition(';')[0]} |"


def _against_rounding(outcome: Outcome) -> str:
    if not outcome.served:
        return "refused"
    return f"{outcome.difference / outcome.allowed * MAX_ROUNDING:.1f}"


def write_tables(*, is_check: bool = False) -> bool:
    """Write the table between its marks. Return whether it was as it is now."""
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    made = f"{before}{BEGIN}\n" + "".join(f"{row}\n" for row in rows()) + f"\n{END}{after}"
    if made == text:
        return True
    print(f"{PAGE.relative_to(ROOT)}: the table of models is out of date")
    if not is_check:
        PAGE.write_text(made)
    return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("run").add_argument("kinds", nargs="*")
    commands.add_parser("tables").add_argument("--check", action="store_true")
    given = parser.parse_args()
    if given.command == "run":
        sys.exit(not run(given.kinds))
    sys.exit(not write_tables(is_check=given.check) and given.check)


if __name__ == "__main__":
    main()
