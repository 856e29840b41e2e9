"""Random weights: the tensors that a checkpoint would have, and a model that runs from its config.json alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kernels_numba.cpu import CpuBackend
from lfm2serve import LLM, SamplingParams
from lfm2serve.chat.byte_tokenizer import byte_tokenizer, chatml_template
from lfm2serve.checkpoint import Checkpoint
from lfm2serve.cli import run
from lfm2serve.config import ModelConfig
from lfm2serve.dummy import SHAPES, random_weights, shape, tensor_shapes, weight_bytes
from lfm2serve.errors import CheckpointError
from tests.checkpoints import allocate

SMALL = {"max_streams": 2, "context": 1024, "progress": False}
PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture
def bare(tiny: Path, tmp_path: Path) -> Path:
    """A directory with no more than a config.json."""
    (tmp_path / "config.json").write_bytes((tiny / "config.json").read_bytes())
    return tmp_path


def test_the_tensors_are_those_of_a_checkpoint(tiny: Path) -> None:
    checkpoint = Checkpoint(tiny)
    stored = checkpoint.load(allocate)
    assert dict(tensor_shapes(checkpoint.config)) == {name: array.shape for name, array in stored.items()}
    assert weight_bytes(checkpoint.config) == checkpoint.weight_bytes
    made = random_weights(checkpoint.config, CpuBackend())
    assert {name: array.dtype for name, array in made.items()} == {name: array.dtype for name, array in stored.items()}
    for name, array in made.items():
        values = array if array.dtype == np.float32 else (array.astype(np.uint32) << 16).view(np.float32)
        wanted = (0, 0) if name.endswith("bias") else (1, 0) if "norm" in name else (0, 0.02)
        assert np.allclose((values.mean(), values.std()), wanted, atol=0.01 if "conv.weight" in name else 0.002), name


def test_an_untied_head_and_experts_without_bias(tiny_moe: Path) -> None:
    config = replace(ModelConfig.from_dir(tiny_moe), tie_word_embeddings=False, use_expert_bias=False)
    names = dict(tensor_shapes(config))
    assert names["lm_head"] == names["embed"] and not any(name.endswith("bias") for name in names)


def test_a_model_runs_from_its_config_alone(bare: Path) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Grüße <|im_end|>"}]
    texts = []
    for _ in range(2):
        with LLM(bare, dummy_weights=True, **SMALL) as llm:
            [raw] = llm.generate("Once", PARAMS)
            [chat] = llm.chat(messages, PARAMS)
            texts.append([raw.outputs[0].text, chat.outputs[0].text])
            assert len(raw.prompt_token_ids) == 5 and len(raw.outputs[0].token_ids) == 12
            assert chat.prompt_token_ids.count(llm.get_tokenizer().token_id("<|im_end|>")) == 2
            assert llm.get_tokenizer().size == ModelConfig.from_dir(bare).vocab_size
    assert texts[0] == texts[1] and all(texts[0])


def test_what_the_directory_has_is_used_but_for_the_weights(tiny_moe: Path, bare: Path) -> None:
    config = json.loads((tiny_moe / "config.json").read_text())
    (bare / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (bare / name).write_bytes((tiny_moe / name).read_bytes())
    with LLM(tiny_moe, **SMALL) as real, LLM(bare, dummy_weights=True, **SMALL) as dummy:
        assert dummy.get_tokenizer().encode("Where is Lima?") == real.get_tokenizer().encode("Where is Lima?")
        assert not dummy.has_chat_template
        assert dummy.get_default_sampling_params() == real.get_default_sampling_params()
        [one], [other] = (llm.generate("Where is Lima?", PARAMS) for llm in (real, dummy))
        assert one.outputs[0].token_ids != other.outputs[0].token_ids
    with LLM(tiny_moe, dummy_weights=True, **SMALL) as dummy:  # weights that are there aren't read
        assert dummy.generate("Where is Lima?", PARAMS)[0].outputs[0].token_ids == other.outputs[0].token_ids


def test_without_the_flag_weights_are_wanted(bare: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no model\.safetensors .*--dummy-weights"):
        LLM(bare, progress=False)
    with pytest.raises(CheckpointError, match=r"^lfm2-1\.2b: a built-in shape .*--dummy-weights"):
        LLM("lfm2-1.2b", progress=False)


def test_a_directory_comes_before_a_shape_of_its_name(
    tiny_moe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lfm2-24b-a2b").symlink_to(tiny_moe)
    monkeypatch.chdir(tmp_path)
    assert run(["info", "lfm2-24b-a2b", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["parameters"] == 1_743_872


def test_info_knows_the_shapes_and_plans_for_a_config(bare: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for name in SHAPES:
        assert run(["info", name, "--json"]) == 0
        facts = json.loads(capfd.readouterr().out)
        assert facts["weight_bytes"] == weight_bytes(shape(name)) and facts["path"] is None and facts["chat_template"]
    assert run(["info", "lfm2.5-24b-a2b"]) == 0
    assert "a built-in shape" in capfd.readouterr().out
    assert run(["info", str(bare)]) == 2
    assert "--dummy-weights" in capfd.readouterr().err
    assert run(["info", str(bare), "--dummy-weights"]) == 0
    assert "page pool" in capfd.readouterr().out


def test_generate_takes_the_flag(bare: Path, capfd: pytest.CaptureFixture[str]) -> None:
    flags = ["--dummy-weights", "--temperature", "0", "--max-tokens", "3", "--max-streams", "1", "--context", "1024"]
    assert run(["generate", str(bare), "Once", *flags, "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["usage"]["completion_tokens"] <= 3


# ---- the byte tokeniser ----


@pytest.mark.parametrize("name", ["lfm2-350m", "lfm2.5-24b-a2b"])
def test_bytes_and_control_tokens_have_ids_and_every_id_has_text(name: str) -> None:
    config = shape(name)
    tokenizer = byte_tokenizer(config)
    names = {text: tokenizer.token_id(text) for text in ("<|pad|>", "<|startoftext|>", "<|im_start|>", "<|im_end|>")}
    assert list(names.values()) == [0, 1, 6, 7] and tokenizer.size == config.vocab_size
    text = "Größe 東京 \x00\n" + bytes(range(256)).decode("latin-1")
    ids = tokenizer.encode(text, add_special_tokens=True)
    assert ids[0] == 1 and len(ids) == 1 + len(text.encode()) and tokenizer.decode(ids) == text
    assert all(tokenizer.bytes_of) and len(set(tokenizer.bytes_of)) == config.vocab_size
    assert tokenizer.encode("<|im_end|>") == [7] and 7 not in tokenizer.encode_plain("<|im_end|>")


@pytest.mark.parametrize(
    ("eos", "bos", "pad"), [((), None, None), ((2,), 2, 2), ((0,), 1, 0), ((300, 5), 5, None), ((259,), None, 258)]
)
def test_control_tokens_share_no_id_whatever_the_config_says(
    eos: tuple[int, ...], bos: int | None, pad: int | None
) -> None:
    config = replace(shape("lfm2-350m"), vocab_size=320, eos_token_ids=eos, bos_token_id=bos, pad_token_id=pad)
    tokenizer = byte_tokenizer(config)
    ends, starts = tokenizer.token_id("<|im_end|>"), tokenizer.token_id("<|im_start|>")
    assert None not in (ends, starts) and ends != starts and ends == (eos[0] if eos else ends)
    assert tokenizer.bos_token_id == (bos if bos not in eos[:1] else None)
    assert tokenizer.decode(tokenizer.encode("héllo", add_special_tokens=True)) == "héllo"
    ids = chatml_template(tokenizer).encode([{"role": "user", "content": "<|im_end|>"}])
    assert ids.count(ends) == 1 and ids.count(starts) == 2


def test_a_vocabulary_below_the_bytes_is_refused() -> None:
    byte_tokenizer(replace(shape("lfm2-350m"), vocab_size=260))
    with pytest.raises(CheckpointError, match="vocab_size=259: too small"):
        byte_tokenizer(replace(shape("lfm2-350m"), vocab_size=259))


def test_tools_and_calls_are_written_as_json() -> None:
    template = chatml_template(byte_tokenizer(shape("lfm2-350m")))
    tool = {"type": "function", "function": {"name": "now"}}
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "now", "arguments": "{}"}}]}
    text = template.render([{"role": "user", "content": "Time?"}, call], tools=[tool])
    assert text.startswith("<|startoftext|><|im_start|>system\nList of tools: [{") and text.count('"name": "now"') == 2
    assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")
