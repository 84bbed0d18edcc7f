"""Weights go to Hugging Face and come from it, tied ones and folders of several files too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from instep.train.checkpoint.interchange import export, load_weights
from instep.train.world import World

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers, not ours
transformers: Any = pytest.importorskip("transformers")
WORLD = World(0, 1, 0, 1, torch.device("cpu"))


@pytest.fixture(autouse=True)
def no_thread_of_a_progress_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)


def make(seed: int) -> Any:
    torch.manual_seed(seed)
    config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=50, n_positions=16)
    return transformers.GPT2LMHeadModel(config).eval()


def same(one: Any, other: Any) -> bool:
    return all(torch.equal(value, other.state_dict()[key]) for key, value in one.state_dict().items())


def test_hugging_face_loads_an_export(tmp_path: Path) -> None:
    model = make(0)
    model.config.save_pretrained(tmp_path)
    export(model, tmp_path / "model.safetensors", WORLD)
    assert same(model, transformers.GPT2LMHeadModel.from_pretrained(tmp_path))


@pytest.mark.parametrize("max_shard_size", ["1GB", "50KB"])
def test_a_folder_of_hugging_face_is_loaded(tmp_path: Path, max_shard_size: str) -> None:
    model, other = make(0), make(1)
    model.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    assert len(list(tmp_path.glob("*.safetensors"))) > (max_shard_size == "50KB")
    load_weights(other, tmp_path)
    assert same(model, other)


def test_the_inner_model_is_loaded_from_the_whole_one(tmp_path: Path) -> None:
    model, inner = make(0), make(1).transformer
    model.save_pretrained(tmp_path)
    load_weights(inner, tmp_path)
    assert same(inner, model.transformer)
