"""Weights come from every format without running code, and go to one that everything reads."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, StorageMeta

from instep.errors import CheckpointError, UsageError
from instep.train.checkpoint.dcp_folder import _read_metadata
from instep.train.checkpoint.interchange import export, load_weights
from instep.train.checkpoint.state import capture
from instep.train.checkpoint.store import Checkpoints
from instep.train.world import World

WORLD = World(0, 1, 0, 1, torch.device("cpu"))


class Net(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(5, 3)
        self.body = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(value, b.state_dict()[key]) for key, value in a.state_dict().items())


def prefixed(state: dict[str, Any], prefix: str) -> dict[str, Any]:
    return {prefix + key: value for key, value in state.items()}


def torch_plain(model: nn.Module, path: Path) -> Path:
    torch.save(model.state_dict(), path / "w.pt")
    return path / "w.pt"


def torch_old_format(model: nn.Module, path: Path) -> Path:
    torch.save(model.state_dict(), path / "w.pth", _use_new_zipfile_serialization=False)
    return path / "w.pth"


def torch_of_a_script(model: nn.Module, path: Path) -> Path:
    optimizer = torch.optim.Adam(model.parameters())
    content = {"epoch": 3, "model": prefixed(model.state_dict(), "module."), "optimizer": optimizer.state_dict()}
    torch.save(content, path / "w.bin")
    return path / "w.bin"


def lightning(model: nn.Module, path: Path) -> Path:
    state = prefixed(model.state_dict(), "net._orig_mod.")
    torch.save({"state_dict": state, "epoch": 1, "global_step": 5}, path / "w.ckpt")
    return path / "w.ckpt"


def safetensors_without_tied(model: nn.Module, path: Path) -> Path:
    state = model.state_dict()
    state.pop("head.weight")
    save_file(state, path / "model.safetensors")
    return path / "model.safetensors"


def hugging_face_folder(model: nn.Module, path: Path) -> Path:
    state = prefixed({key: value.clone() for key, value in model.state_dict().items()}, "model.")
    names = sorted(state)
    files = {"model-00001-of-00002.safetensors": names[:3], "model-00002-of-00002.safetensors": names[3:]}
    for file, keys in files.items():
        save_file({key: state[key] for key in keys}, path / file)
    index = {"metadata": {}, "weight_map": {key: file for file, keys in files.items() for key in keys}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def hugging_face_bin_folder(model: nn.Module, path: Path) -> Path:
    torch.save(model.state_dict(), path / "pytorch_model-00001-of-00001.bin")
    index = {"weight_map": dict.fromkeys(model.state_dict(), "pytorch_model-00001-of-00001.bin")}
    (path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return path


def dcp_folder(model: nn.Module, path: Path) -> Path:
    optimizer = torch.optim.Adam(model.parameters())
    model.body(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    content = {"app": {"model": model.state_dict(), "optim": optimizer.state_dict()}, "step": 3}
    torch.distributed.checkpoint.save(content, checkpoint_id=path, no_dist=True)
    return path


def dcp_hugging_face_folder(model: nn.Module, path: Path) -> Path:
    writer = HuggingFaceStorageWriter(str(path), save_distributed=True)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    torch.distributed.checkpoint.save(state, storage_writer=writer, no_dist=True)
    return path


def ours(model: nn.Module, path: Path) -> Path:
    checkpoints = Checkpoints(path, WORLD)
    tensors, values = capture({"net": model}, {})
    checkpoints.save(tensors, values, step=1)
    checkpoints.close()
    return path / "checkpoints" / "step-1"


def our_run(model: nn.Module, path: Path) -> Path:
    ours(model, path)
    return path


def exported(model: nn.Module, path: Path) -> Path:
    export(model, path / "deep" / "model.safetensors", WORLD)
    return path / "deep" / "model.safetensors"


WRITERS = [
    torch_plain,
    torch_old_format,
    torch_of_a_script,
    lightning,
    safetensors_without_tied,
    hugging_face_folder,
    hugging_face_bin_folder,
    dcp_folder,
    dcp_hugging_face_folder,
    ours,
    our_run,
    exported,
]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("write", WRITERS)
def test_reads(tmp_path: Path, write: Any) -> None:
    model, other = Net(0), Net(1)
    path = write(model, tmp_path)
    assert not load_weights(other, path)
    assert same(model, other)
    assert other.head.weight is other.embed.weight


def test_a_compiled_model_takes_plain_names(tmp_path: Path) -> None:
    model, other = Net(0), Net(1)
    load_weights(torch.compile(other, backend="eager"), torch_plain(model, tmp_path))  # type: ignore[arg-type]
    assert same(model, other)


def test_differences_are_said_in_words_and_nothing_is_changed(tmp_path: Path) -> None:
    save_file({"body.weight": torch.ones(3, 2), "body.more": torch.ones(1)}, tmp_path / "w.safetensors")
    model = nn.ModuleDict({"body": nn.Linear(3, 3)})
    before = model["body"].weight.clone()
    with pytest.raises(CheckpointError) as caught:
        load_weights(model, tmp_path / "w.safetensors")
    assert str(caught.value) == (
        f"the weights do not fit the model. {tmp_path}/w.safetensors: missing there: 1 (body.bias); not known here: 1 "
        "(body.more); of another shape or type: 1 (body.weight is 3x2 there and 3x3 here). Pass strict=False to take "
        "what fits."
    )
    assert torch.equal(model["body"].weight, before)


def test_without_strict_what_fits_is_taken_and_the_rest_is_said(tmp_path: Path) -> None:
    save_file({"a.weight": torch.ones(2, 2), "a.bias": torch.ones(9)}, tmp_path / "w.safetensors")
    model = nn.ModuleDict({"a": nn.Linear(2, 2)})
    said: list[str] = []
    load_weights(model, tmp_path / "w.safetensors", strict=False, say=said.append)
    assert torch.equal(model["a"].weight, torch.ones(2, 2))
    assert said == [
        f"weights loaded in part: {tmp_path}/w.safetensors: of another shape or type: 1 (a.bias is 9 there and 2 here)."
    ]


def test_half_precision_weights_are_converted(tmp_path: Path) -> None:
    torch.save({key: value.half() for key, value in nn.Linear(2, 2).state_dict().items()}, tmp_path / "w.pt")
    model = nn.Linear(2, 2)
    load_weights(model, tmp_path / "w.pt")
    assert model.weight.dtype == torch.float32


class Evil:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


def test_code_in_a_torch_file_is_not_run(tmp_path: Path) -> None:
    torch.save({"model": {"a": torch.ones(1)}, "x": Evil(tmp_path / "ran")}, tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match="holds more than tensors, and reading that would run code from the file"):
        load_weights(nn.Linear(1, 1), tmp_path / "w.pt")
    assert not (tmp_path / "ran").exists()


def test_a_whole_pickled_model_is_refused_with_advice(tmp_path: Path) -> None:
    torch.save(nn.Linear(1, 1), tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match=r"Save the weights alone: torch.save\(model.state_dict\(\), path\)"):
        load_weights(nn.Linear(1, 1), tmp_path / "w.pt")


class AsEarlierPython:
    """Pickled as a call of getattr, like a member of an enumeration by Python before 3.11.4."""

    def __init__(self, owner: Any, name: str) -> None:
        self._what = owner, name

    def __reduce__(self) -> Any:
        return getattr, self._what


def test_members_of_enumerations_are_read_as_every_python_wrote_them(tmp_path: Path) -> None:
    metadata = tmp_path / ".metadata"
    metadata.write_bytes(pickle.dumps(AsEarlierPython(_MEM_FORMAT_ENCODING, "TORCH_CONTIGUOUS_FORMAT")))
    assert _read_metadata(metadata) is _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT
    metadata.write_bytes(pickle.dumps(AsEarlierPython(StorageMeta, "__init__")))
    with pytest.raises(CheckpointError, match=r"is refused: its \.metadata takes an attribute"):
        _read_metadata(metadata)


def test_code_in_dcp_metadata_is_not_run(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Evil(tmp_path / "ran")))
    with pytest.raises(CheckpointError, match=r"names posix.mkdir, which does not describe tensors"):
        load_weights(nn.Linear(1, 1), tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_damaged_dcp_folder_is_named(tmp_path: Path) -> None:
    dcp_folder(Net(0), tmp_path)
    (tmp_path / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointError, match=r"__0_0.distcp cannot be read: "):
        load_weights(Net(1), tmp_path)
    (tmp_path / ".metadata").write_bytes((tmp_path / ".metadata").read_bytes()[:50])
    with pytest.raises(CheckpointError, match=r"\.metadata cannot be read: "):
        load_weights(Net(1), tmp_path)


def test_damaged_files_are_named(tmp_path: Path) -> None:
    path = torch_plain(Net(0), tmp_path)
    os.truncate(path, 200)
    with pytest.raises(CheckpointError, match=r"w.pt is not a whole torch.save file"):
        load_weights(Net(1), path)
    path = safetensors_without_tied(Net(0), tmp_path)
    os.truncate(path, 200)
    with pytest.raises(CheckpointError, match=r"model.safetensors cannot be read as a safetensors file"):
        load_weights(Net(1), path)
    with pytest.raises(CheckpointError, match=r"none.pt does not exist"):
        load_weights(Net(1), tmp_path / "none.pt")


def test_an_index_whose_files_are_gone_is_named(tmp_path: Path) -> None:
    hugging_face_folder(Net(0), tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"not beside it: 1 \(model-00002-of-00002.safetensors\)"):
        load_weights(Net(1), tmp_path)


def test_a_folder_without_weights_lists_what_it_has(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(CheckpointError, match=r"one torch.save file. It has 1 \(notes.txt\)"):
        load_weights(Net(1), tmp_path)


def test_a_file_without_a_section_of_weights_lists_its_sections(tmp_path: Path) -> None:
    state = {"a": torch.ones(1)}
    torch.save({"generator": state, "critic": state}, tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match=r"it has: 2 \(generator, critic\). Save model.state_dict\(\) alone"):
        load_weights(Net(1), tmp_path / "w.pt")


def test_a_checkpoint_of_several_models_asks_which(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, WORLD)
    checkpoints.save(*capture({"actor": nn.Linear(1, 1), "critic": nn.Linear(1, 1)}, {}), step=1)
    checkpoints.close()
    with pytest.raises(CheckpointError, match=r"holds the models actor, critic; name the one that is meant"):
        load_weights(nn.Linear(1, 1), tmp_path)
    load_weights(nn.Linear(1, 1), tmp_path, name="critic")


def test_an_export_loads_in_plain_torch(tmp_path: Path) -> None:
    model, other = Net(0), Net(1)
    export(torch.compile(model, backend="eager"), tmp_path / "model.safetensors", WORLD)  # type: ignore[arg-type]
    other.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert same(model, other)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_an_export_needs_a_name_that_says_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"the name has to end in .safetensors, as in 'model.safetensors'"):
        export(Net(0), tmp_path / "model.pt", WORLD)


def test_an_export_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"could not be exported to .*file/model.safetensors: "):
        export(Net(0), tmp_path / "file" / "model.safetensors", WORLD)
