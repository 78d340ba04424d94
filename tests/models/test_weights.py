"""Loading: every stored byte arrives, and a folder that does not fit says what is wrong with it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.hf_folders import write_folder
from mrv2_models.causal_lm import CausalLM
from mrv2_models.errors import ModelFileError, UnsupportedModelError
from mrv2_models.registry import load_model
from mrv2_models.weights import Checkpoint

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def tied_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tied")
    write_folder("llama-tied", folder)
    return folder


@pytest.fixture
def folder(tied_folder: Path, tmp_path: Path) -> Path:
    """A private copy of a tied Llama folder."""
    return Path(shutil.copytree(tied_folder, tmp_path / "model"))


def rewrite(folder: Path, change: Callable[[Tensors], object]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


def shard(folder: Path) -> list[Path]:
    """Split the only weights file in two, with an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for index, part in enumerate((names[::2], names[1::2])):
        file = f"model-{index + 1:05d}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return sorted(folder.glob("model-*.safetensors"))


def state(model: CausalLM) -> Tensors:
    return dict(model.state_dict())


def assert_same(left: CausalLM, right: CausalLM) -> None:
    assert state(left).keys() == state(right).keys()
    for name, tensor in state(left).items():
        assert torch.equal(tensor, state(right)[name]), f"{name} differs"


@pytest.mark.parametrize("stored", [torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wanted", ["float64", "float32", "bfloat16"])
def test_any_stored_dtype_becomes_the_requested_one(folder: Path, stored: torch.dtype, wanted: str) -> None:
    rewrite(folder, lambda tensors: tensors.update({name: t.to(stored) for name, t in tensors.items()}))
    tensors = load_file(folder / "model.safetensors")
    model = load_model(folder, dtype=wanted)
    expected = tensors["model.layers.1.mlp.down_proj.weight"].to(model.dtype)
    assert torch.equal(state(model)["layers.1.mlp.down.weight"], expected)


def test_auto_is_the_published_dtype(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    for key in ("torch_dtype", "dtype"):
        config.pop(key, None)
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": "bfloat16"}))
    assert load_model(folder).dtype == torch.bfloat16
    with pytest.raises(UnsupportedModelError, match="dtype 'int8' is not supported; legal are 'auto', float16"):
        load_model(folder, dtype="int8")


def test_a_sharded_folder_loads_like_a_single_file(tied_folder: Path, folder: Path) -> None:
    shard(folder)
    assert_same(load_model(folder), load_model(tied_folder))


def test_a_tensor_is_a_view_of_the_mapped_file(folder: Path) -> None:
    """A second copy of the weights on the host would show as memory of the process that no file stands behind."""
    source = next(load_model(folder).weight_sources())
    with Checkpoint(folder) as checkpoint:
        address = checkpoint.read(source).data_ptr()
        mappings = [line.split() for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()]
        holding = [
            entry for entry in mappings if int(entry[0].split("-")[0], 16) <= address < int(entry[0].split("-")[1], 16)
        ]
    assert [entry[-1] for entry in holding] == [str((folder / "model.safetensors").resolve())]


def test_a_missing_shard_is_named(folder: Path) -> None:
    shard(folder)[1].unlink()
    with pytest.raises(ModelFileError, match=r"model-00002-of-00002\.safetensors does not exist, though .*index"):
        load_model(folder)


@pytest.mark.parametrize("keep", [100, -1000])
def test_a_truncated_file_is_named(folder: Path, keep: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelFileError, match=r"model\.safetensors is truncated or not a safetensors file"):
        load_model(folder)


def test_an_index_that_is_wrong_is_named(folder: Path) -> None:
    shard(folder)
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.norm.weight"] = "model-00001-of-00002.safetensors"
    content["weight_map"]["model.embed_tokens.weight"] = "model-00002-of-00002.safetensors"
    index.write_text(json.dumps(content))
    with pytest.raises(ModelFileError, match="lacks tensors that .*index.json places there: model"):
        load_model(folder)
    index.write_text(json.dumps({"weights": {}}))
    with pytest.raises(ModelFileError, match="must be JSON with an object 'weight_map'"):
        load_model(folder)
    index.unlink()
    with pytest.raises(ModelFileError, match="holds neither model.safetensors nor model.safetensors.index.json"):
        load_model(folder)


def test_missing_tensors_are_listed(folder: Path) -> None:
    rewrite(folder, lambda tensors: [tensors.pop(f"model.layers.{i}.input_layernorm.weight") for i in range(3)])
    with pytest.raises(ModelFileError, match=r"missing tensors: model\.layers\.0\.input_layernorm\.weight, .*2\.input"):
        load_model(folder)


def test_a_long_list_is_cut(folder: Path) -> None:
    rewrite(folder, lambda tensors: [tensors.pop(name) for name in list(tensors) if "layers.0" in name])
    with pytest.raises(ModelFileError, match="and 1 more$"):
        load_model(folder)


def test_unexpected_tensors_are_listed(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({"model.layers.3.extra.weight": torch.zeros(1)}))
    with pytest.raises(ModelFileError, match=r"does not have: model\.layers\.3\.extra\.weight"):
        load_model(folder)


def test_a_bias_that_the_config_does_not_announce_is_refused(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(192)}))
    with pytest.raises(ModelFileError, match=r"does not have: model\.layers\.0\.self_attn\.q_proj\.bias"):
        load_model(folder)


def test_a_wrong_shape_names_both_shapes(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(95)}))
    with pytest.raises(ModelFileError, match=r"'model\.norm\.weight' has shape \[95\], the config asks for \[96\]"):
        load_model(folder)


def test_integer_weights_are_refused(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(96, dtype=torch.int8)}))
    with pytest.raises(ModelFileError, match=r"'model\.norm\.weight' is stored as I8; legal are F64, F32, F16, BF16"):
        load_model(folder)


def test_a_tied_checkpoint_may_store_the_matrix_twice(tied_folder: Path, folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    assert_same(load_model(folder), load_model(tied_folder))
    rewrite(folder, lambda tensors: tensors["lm_head.weight"][-1].add_(1.0))
    with pytest.raises(ModelFileError, match=r"tie_word_embeddings is true, but 'lm_head\.weight' differs"):
        load_model(folder)


def test_stored_rotary_tables_are_recomputed(tied_folder: Path, folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(16)}))
    assert_same(load_model(folder), load_model(tied_folder))


def test_a_shape_without_weights_asks_for_dummy() -> None:
    with pytest.raises(ModelFileError, match="'tiny-llama' is a shape without weights: pass load_format='dummy'"):
        load_model("tiny-llama")
    with pytest.raises(ValueError, match="load_format='random' must be one of auto, dummy"):
        load_model("tiny-llama", load_format="random")  # type: ignore[arg-type]  # the wrong value is the test


@pytest.mark.parametrize("length", [0, 2049])
def test_a_context_beyond_the_config_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match=rf"max_model_len={length} must be in 1\.\.2048"):
        load_model("tiny-llama", load_format="dummy", max_model_len=length)


def test_float64_on_cuda_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="float64 runs on the CPU only"):
        load_model("tiny-llama", load_format="dummy", dtype="float64", device="cuda")


def test_random_weights_depend_on_the_seed_alone() -> None:
    first, again, other = (load_model("tiny-qwen3", load_format="dummy", seed=seed) for seed in (1, 1, 2))
    assert_same(first, again)
    for name, tensor in state(first).items():
        assert not torch.equal(tensor, state(other)[name]), f"{name} does not depend on the seed"


def test_random_weights_of_all_dtypes_round_the_same_numbers() -> None:
    exact = state(load_model("tiny-llama", load_format="dummy", dtype="float64"))
    for dtype in (torch.float32, torch.bfloat16):
        for name, tensor in state(load_model("tiny-llama", load_format="dummy", dtype=dtype)).items():
            assert torch.equal(exact[name].to(dtype), tensor), f"{name} differs in {dtype}"
