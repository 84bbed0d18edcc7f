"""Which samples a pass takes, whether two data sets are equal, and what containers hold: the facts behind the rules."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import Dataset, Subset, TensorDataset

from instep.diagnose.engine import judge
from instep.diagnose.nonfinite_source import find_operation, imported_files
from instep.diagnose.parameter_writes import find_write
from instep.diagnose.rules.numbers.sum_not_mean import _factors
from instep.diagnose.rules.speed.collectives_each_step import _is_needed
from instep.diagnose.run_view import RunView
from instep.diagnose.slices import definitions
from instep.diagnose.source import Source, load
from instep.launch.probe import holders
from instep.launch.probe.memory import graph_length
from instep.launch.probe.sample_sets import Seen, print_data_set
from instep.launch.probe.schedules import find_length
from instep.launch.probe.tokens import find_count
from instep.records.finding import CallSite


class Numbers(Dataset[int]):
    def __init__(self, length: int, scale: float = 1.0) -> None:
        self.length, self.scale = length, scale

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


def test_samples_of_a_subset_are_numbered_by_the_data_set_below() -> None:
    seen = Seen(Subset(Subset(Numbers(100), list(range(50, 100))), [0, 2, 4]), 1, 3)
    seen.add([0, 1, 2])
    assert seen.as_list() == [50, 52, 54]


def test_of_a_large_set_the_same_few_samples_are_followed_everywhere() -> None:
    rows = [Seen(Numbers(100_000), 1, 100_000) for _ in range(2)]
    for one in rows:
        one.add(list(range(100_000)))
    assert rows[0].as_list() == rows[1].as_list()
    assert 150 < len(rows[0].numbers) < 400


def test_later_passes_are_not_followed() -> None:
    seen = Seen(Numbers(100), 4, 100)
    seen.add([1, 2, 3])
    assert seen.as_list() == []


def test_a_data_set_is_known_by_what_it_holds() -> None:
    x = torch.arange(40.0)
    assert print_data_set(TensorDataset(x)) == print_data_set(TensorDataset(x.clone()))
    assert print_data_set(TensorDataset(x)) != print_data_set(TensorDataset(x + 1))
    assert print_data_set(Numbers(10)) == print_data_set(Subset(Numbers(10), [1, 2]))
    assert print_data_set(Numbers(10)) != print_data_set(Numbers(10, 2.0))


def test_the_count_that_a_masked_sum_is_divided_by_is_read_from_the_graph() -> None:
    values, mask = torch.rand(6, requires_grad=True), torch.tensor([1.0, 1, 1, 0, 0, 0])
    loss = (values * mask).sum() / mask.sum() / 4
    assert find_count(loss.grad_fn) == 3 or find_count(loss.grad_fn) == 4
    assert find_count(values.mean().grad_fn) is None


def test_a_graph_that_goes_from_step_to_step_gets_longer() -> None:
    weight, state = nn.Parameter(torch.ones(2)), torch.zeros(2)
    lengths = []
    for _ in range(3):
        state = 0.9 * state + 0.1 * weight
        lengths.append(graph_length(state))
    assert lengths[0] < lengths[1] < lengths[2]
    assert graph_length(torch.zeros(2)) == 0


def make_schedule(kind: str) -> object:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    if kind == "cosine":
        return lr_scheduler.CosineAnnealingLR(optimizer, T_max=7)
    if kind == "one-cycle":
        return lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=9)
    if kind == "lambda":
        return lr_scheduler.LambdaLR(
            optimizer, functools.partial(lambda step, *, num_training_steps: 1.0, num_training_steps=11)
        )
    return lr_scheduler.StepLR(optimizer, 3)


@pytest.mark.parametrize(("kind", "length"), [("cosine", 7), ("one-cycle", 9), ("lambda", 11), ("step", None)])
def test_how_long_a_schedule_is_made_to_be(kind: str, length: int | None) -> None:
    assert find_length(make_schedule(kind)) == length


KEPT: list[torch.Tensor] = []


class Keeper:
    def __init__(self) -> None:
        self.outputs: list[torch.Tensor] = [torch.ones(3) for _ in range(9)]


@pytest.fixture
def own_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holders, "is_users_file", lambda name: Path(name).name == Path(__file__).name)


@pytest.mark.usefixtures("own_files")
def test_a_container_is_named_by_where_it_is_kept() -> None:
    keeper = Keeper()
    store: list[torch.Tensor] = [torch.ones(2) for _ in range(9)]
    hook = lambda: store.append(torch.ones(2))  # noqa: E731
    found = (
        holders.find_place(keeper.outputs),
        holders.find_place(KEPT),
        holders.find_place(hook.__closure__[0].cell_contents),
    )  # type: ignore[index]
    assert [place.name if place else None for place in found] == ["Keeper.outputs", "KEPT", "store"]


@pytest.mark.usefixtures("own_files")
def test_what_a_library_keeps_has_no_name() -> None:
    module = ModuleType("a_library")
    module.kept = [torch.ones(2) for _ in range(9)]  # type: ignore[attr-defined]
    sys.modules["a_library"] = module
    try:
        assert holders.find_place(module.kept) is None
    finally:
        del sys.modules["a_library"]


def test_containers_are_looked_through_as_memory_grows() -> None:
    kept = [torch.ones(4, requires_grad=True) * 2 for _ in range(10)]
    looks = holders.Holders()
    found = {id(one): held for one, held in looks.look(100)}
    assert found[id(kept)] == holders.Held(graphs=10, tensors=10, size=160)
    assert looks.look(110) == []  # not grown by a third


class Lazy(dict[str, Any]):
    """Loads what it has when it is asked, as registries of models do."""

    def __len__(self) -> int:
        raise AssertionError("asked for its length")

    def values(self) -> Any:
        raise AssertionError("asked for its values")


def test_no_method_of_a_container_is_called() -> None:
    lazy = Lazy({str(i): torch.ones(4) for i in range(10)})
    found = {id(one): held for one, held in holders.Holders().look(100)}
    assert found[id(lazy)].tensors == 10
    assert holders.find_place(lazy) is None


def source_of(text: str, path: Path) -> Source:
    path.write_text(text)
    source = load(str(path))
    assert source is not None
    return source


def test_what_a_method_keeps_on_its_object_is_followed(tmp_path: Path) -> None:
    text = "class Data:\n    def __init__(self):\n        self.part, self.rest = random_split(full, [8, 2])\n\n    def loader(self):\n        return DataLoader(self.part)\n"
    source = source_of(text, tmp_path / "data.py")
    call = source.statement_at(6).value  # type: ignore[union-attr]
    lines = {getattr(node, "lineno", 0) for node in definitions(source, call.args[0], source.function_at(6))}  # type: ignore[attr-defined]
    assert 3 in lines


def test_an_operation_is_found_in_a_file_that_the_script_imports(tmp_path: Path) -> None:
    losses = "import torch\n\n\ndef focal(p):\n    return -torch.log(p).mean()\n"
    (tmp_path / "losses.py").write_text(losses)
    script = source_of("from losses import focal\n\nloss = focal(model(x))\nloss.backward()\n", tmp_path / "train.py")
    assert [Path(one.path).name for one in imported_files(script)] == ["losses.py"]
    found = find_operation(CallSite(script.path, 4, "loss.backward()"), "Log")
    assert found is not None and (Path(found.file).name, found.line) == ("losses.py", 5)


def test_what_a_source_divides_by(tmp_path: Path) -> None:
    text = "p.grad /= size\nloss = total / count\np.grad.div_(dist.get_world_size())\n"
    found = set(_factors(source_of(text, tmp_path / "s.py")))
    assert {"size", "count", "dist.get_world_size()"} <= found


@pytest.mark.parametrize(
    ("line", "needed"),
    [
        ("dist.all_gather(parts, embeddings)", True),
        ("dist.all_gather_object(rows, outputs)", False),
        ("dist.all_reduce(value)", False),
        ("dist.barrier()", False),
    ],
)
def test_exchanges_of_tensors_are_a_part_of_the_computation(line: str, needed: bool) -> None:
    assert _is_needed(line) is needed


def test_writes_to_parameters_are_told_from_first_values_and_copies(tmp_path: Path) -> None:
    text = """
def build():
    layer.weight.data.normal_()
    return DDP(layer)

def revive(layer, dead):
    ema.weight.data.copy_(layer.weight)
    layer.weight[dead] = 0.1
"""
    source = source_of(text, tmp_path / "train.py")
    found = find_write(CallSite(source.path, 4, "return DDP(layer)"))
    assert found is not None and found.source == "layer.weight[dead] = 0.1"


def test_no_rule_fails_on_a_run_that_left_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert judge(RunView(tmp_path, ())) == []
    assert capsys.readouterr().err == ""


def test_a_stand_in_is_no_schedule() -> None:
    assert find_length(SimpleNamespace(T_max=True)) is None
