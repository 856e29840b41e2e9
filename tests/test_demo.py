"""The packaged demo model: its files, and answers to held-out questions through the library.

The scores of all held-out questions stand in examples/demo_model/README.md. Here a sample of them is asked; all of it
was right when the weights were made, so that a fault anywhere on the way shows.
"""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections import defaultdict
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from lfm2serve import LLM

ROOT = Path(__file__).parent.parent
DEMO = ROOT / "lfm2serve" / "demo"
EXAMPLE = ROOT / "examples" / "demo_model"
QUESTIONS = ROOT / "tests" / "data" / "demo_questions.jsonl"
TOKENIZER = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
Item = dict[str, Any]


def read_json(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DEMO / name).read_text())
    return found


def part() -> list[Item]:
    """A fixed sample of 48: every kind, and four recalls over 2,000 tokens and more."""
    return [json.loads(line) for line in QUESTIONS.read_text().splitlines()][9::11]


def kind_of(item: Item) -> str:
    return "long recall" if item["kind"] == "recall" and item["prompt_tokens"] >= 2000 else str(item["kind"])


@pytest.fixture(scope="module")
def evaluate() -> ModuleType:
    """The scoring that the figures of the model card come from."""
    spec = spec_from_file_location("demo_model_evaluate", EXAMPLE / "evaluate.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_held_out_questions_are_answered(evaluate: ModuleType) -> None:
    items = part()
    with LLM("demo", progress=False) as llm:
        replies = evaluate.asked_and_used(items, evaluate.ours(llm))
    right: dict[str, list[bool]] = defaultdict(list)
    for item in items:
        # our rendering and tokens are those the model was trained with
        assert replies[item["id"]]["prompt_tokens"] == item["prompt_tokens"]
        right[kind_of(item)].append(evaluate.passes(item, replies))
    promised = {"facts": 0.95, "copy": 0.95, "long recall": 0.9, "tools": 0.9}
    rest = {"recall", "system", "json", "story", "invented", "told", "counting", "talk"}
    least = promised | dict.fromkeys(rest, 0.6)
    assert set(right) == set(least) and len(right["long recall"]) >= 2
    share = {kind: sum(found) / len(found) for kind, found in right.items()}
    assert {kind: share[kind] for kind in least if share[kind] < least[kind]} == {}


def test_held_out_questions_are_apart_from_the_training_chats() -> None:
    command = [sys.executable, str(EXAMPLE / "questions.py"), "--check", str(QUESTIONS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    found = int(done.stdout.split()[0])
    assert found >= 400 and "none of a wording, name or number of the training chats" in done.stdout


def test_files_are_small_and_complete() -> None:
    files = {path.name: path.stat().st_size for path in DEMO.iterdir()}
    published = "config.json generation_config.json model.safetensors tokenizer.json tokenizer_config.json"
    assert set(files) == {*published.split(), "chat_template.jinja", "README.md"}
    assert sum(files.values()) < 12_000_000


def test_configuration_is_of_the_published_format() -> None:
    config, generation = read_json("config.json"), read_json("generation_config.json")
    assert (config["architectures"], config["model_type"]) == (["Lfm2MoeForCausalLM"], "lfm2_moe")
    assert set(config["layer_types"]) == {"conv", "full_attention"} and config["num_dense_layers"] == 2
    assert (config["num_experts"], config["num_experts_per_tok"]) == (8, 2)
    assert config["max_position_embeddings"] >= 4096
    assert generation["do_sample"] is False
    ends = [TOKENIZER.token_to_id(token) for token in ("<|im_end|>", "<|endoftext|>")]
    assert generation["eos_token_id"] == ends
    assert TOKENIZER.get_vocab_size() == config["vocab_size"]


def test_weights_are_bfloat16_but_the_router_bias() -> None:
    data = (DEMO / "model.safetensors").read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    tensors = {k: v for k, v in json.loads(data[8 : 8 + size]).items() if k != "__metadata__"}
    assert {k for k, v in tensors.items() if v["dtype"] != "BF16"} == {k for k in tensors if k.endswith("expert_bias")}
    # embeddings, final norm, layers 0 and 1 dense, 2 to 7 of experts
    assert sum("feed_forward.experts." in k for k in tensors) == 6 * 8 * 3
    assert max(v["data_offsets"][1] for v in tensors.values()) == len(data) - 8 - size


@given(st.text())
def test_every_text_survives_the_tokenizer(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text
