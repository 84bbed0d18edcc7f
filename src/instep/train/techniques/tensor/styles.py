"""Ways to split one layer along the tensor axis, on DTensor; PyTorch's own styles may be used beside them.

Parameters lie as plain contiguous shards, so checkpoints and other splits can read them. Activations are plain tensors:
whole ones outside of a split pair of layers, shares between the two.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from instep.train.absent import is_absent
from instep.train.techniques.blocks import plain_forward
from instep.train.techniques.tensor.moves import (
    add_up,
    as_shares,
    enter,
    gather,
    leave_stretch,
    take_part,
)
from instep.train.techniques.tensor.regions import Region


def place(module: nn.Module, name: str, mesh: DeviceMesh, placement: Placement) -> None:
    """Makes a parameter a DTensor; all ranks hold the same values before, so nothing is sent."""
    parameter = getattr(module, name, None)
    if parameter is not None and not is_absent(parameter):  # of another stage of a pipeline
        placed = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(placed, requires_grad=parameter.requires_grad))


def own_share(parameter: Any, dim: int, parts: int, mesh: DeviceMesh) -> Tensor:
    """This rank's share of each of `parts` projections that lie one after another along `dim`.

    The shards are contiguous over all projections, so they are brought together first, one layer at a time.
    """
    if parts == 1:
        return parameter.to_local()
    whole = parameter.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
    size = whole.shape[dim] // parts
    share, rank = size // mesh.size(), mesh.get_local_rank()
    sizes = [*whole.shape[:dim], parts, size, *whole.shape[dim + 1 :]]
    return whole.view(sizes).narrow(dim + 1, rank * share, share).flatten(dim, dim + 1)


def is_transposed(layer: nn.Module) -> bool:
    """Layers of GPT-2 in transformers keep their weight as (inputs, outputs)."""
    return type(layer).__name__ == "Conv1D"


def is_linear(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Linear) or is_transposed(layer)


def num_outputs(layer: nn.Module) -> int:
    return _weight(layer).shape[1 if is_transposed(layer) else 0]


def num_inputs(layer: nn.Module) -> int:
    return _weight(layer).shape[0 if is_transposed(layer) else 1]


def _weight(layer: nn.Module) -> Tensor:
    weight = layer.weight
    assert isinstance(weight, Tensor)
    return weight


class Split(ParallelStyle):
    """A style of this module. weight: how the layer's weight is cut; region: set before use; mesh: set by use."""

    region: Region
    mesh: DeviceMesh
    weight: Placement = Replicate()
    sequence_dim: int | None = None  # of the activations around, where these are stretches of sequences

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.mesh = device_mesh
        self.place(module)

        def forward(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return self.run(layer, *args, **kwargs)

        module.forward = MethodType(forward, module)  # bound, so that a copy of the layer runs on its own weights
        return module

    @abstractmethod
    def place(self, module: nn.Module) -> None:
        """Cuts the layer's parameters."""

    @abstractmethod
    def run(self, layer: Any, *args: Any, **kwargs: Any) -> Any:
        """The layer's forward."""

    def _place_all(self, module: nn.Module, placements: dict[str, Placement]) -> None:
        for name, placement in placements.items():
            place(module, name, self.mesh, placement)


class Columns(Split):
    """A linear layer by outputs. parts: projections that lie one after another in it; gathered: outputs come out whole,
    or, with `spread`, as a DTensor whose parts stay where they are."""

    def __init__(self, parts: int = 1, *, gathered: bool = False) -> None:
        super().__init__()
        self.parts, self.gathered, self.spread = parts, gathered, False
        self.weight = Shard(0)

    def place(self, module: nn.Module) -> None:
        self._place_all(module, {"weight": Shard(1 if is_transposed(module) else 0), "bias": Shard(0)})

    def run(self, layer: Any, input: Tensor) -> Tensor:
        dim = 1 if is_transposed(layer) else 0
        weight = own_share(layer.weight, dim, self.parts, self.mesh)
        weight = weight.T if dim else weight
        bias = None if layer.bias is None else own_share(layer.bias, 0, self.parts, self.mesh)
        if self.gathered:
            out = F.linear(enter(input, self.mesh), weight, bias)
            return as_shares(out, self.mesh) if self.spread else gather(out, self.mesh, -1)
        entered = self.region.enter_once(input, lambda x: enter(x, self.mesh, self.sequence_dim))
        self.region.inside = True
        return F.linear(entered, weight, bias)

    def __repr__(self) -> str:
        return f"Columns(parts={self.parts}, gathered={self.gathered})"


class Rows(Split):
    """A linear layer by inputs, whose outputs are added up. whole_input: inputs come whole, each rank takes its share."""

    def __init__(self, *, whole_input: bool = False) -> None:
        super().__init__()
        self.whole_input = whole_input
        self.weight = Shard(1)

    def place(self, module: nn.Module) -> None:
        self._place_all(module, {"weight": Shard(0 if is_transposed(module) else 1), "bias": Replicate()})

    def run(self, layer: Any, input: Tensor) -> Tensor:
        self.region.leave()
        share = take_part(input, self.mesh, -1) if self.whole_input else input
        local = layer.weight.to_local()
        out = F.linear(share, local.T if is_transposed(layer) else local)
        if self.sequence_dim is None:
            out, placements = add_up(out, self.mesh), None
        else:
            out, placements = leave_stretch(out, self.mesh, self.sequence_dim), [Partial()]
        return out if layer.bias is None else out + layer.bias.to_local(grad_placements=placements).to(out.dtype)

    def __repr__(self) -> str:
        return f"Rows(whole_input={self.whole_input})"


class Vocabulary(Split):
    """An embedding by its rows: each rank looks up the tokens that it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = Shard(0)

    def place(self, module: nn.Module) -> None:
        self._place_all(module, {"weight": Shard(0)})

    def run(self, layer: Any, input: Tensor) -> Tensor:
        count = layer.num_embeddings // self.mesh.size()
        first = self.mesh.get_local_rank() * count
        padding = layer.padding_idx
        own_padding = padding - first if padding is not None and first <= padding < first + count else None
        tokens = input - first
        elsewhere = (tokens < 0) | (tokens >= count)
        rows = F.embedding(tokens.masked_fill(elsewhere, 0), layer.weight.to_local(), own_padding)
        return add_up(rows.masked_fill(elsewhere[..., None], 0), self.mesh)

    def __repr__(self) -> str:
        return "Vocabulary()"


class Features(Split):
    """An embedding by its columns, such as a number per head: each rank looks up its share of them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = Shard(1)

    def place(self, module: nn.Module) -> None:
        self._place_all(module, {"weight": Shard(1)})

    def run(self, layer: Any, input: Tensor) -> Tensor:
        return F.embedding(input, layer.weight.to_local(), layer.padding_idx)

    def __repr__(self) -> str:
        return "Features()"


class OnShares(Split):
    """A layer with the same parameters on all ranks, each of which applies it to its share, as a norm per head."""

    def place(self, module: nn.Module) -> None:
        self._names = [name for name, _ in module.named_parameters(recurse=False)]
        self._plain = plain_forward(module)
        self._place_all(module, dict.fromkeys(self._names, Replicate()))

    def run(self, layer: Any, *args: Any, **kwargs: Any) -> Any:
        own: dict[str, Any] = {name: layer._parameters[name] for name in self._names}
        layer._parameters.update({n: p.to_local(grad_placements=[Partial()]) for n, p in own.items()})
        try:
            return self._plain(layer, *args, **kwargs)
        finally:
            layer._parameters.update(own)

    def __repr__(self) -> str:
        return "OnShares()"


class Whole(ParallelStyle):
    """A layer that stays as it is, on every rank."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return module

    def __repr__(self) -> str:
        return "Whole()"


BY_NAME: dict[str, Callable[[], ParallelStyle]] = {  # as transformers calls them in a model's tp_plan
    "colwise": Columns,
    "colwise_gather_output": partial(Columns, gathered=True),
    "colwise_rep": partial(Columns, gathered=True),
    "packed_colwise": partial(Columns, 2),
    "colwise_qkv": partial(Columns, 3),
    "rowwise": Rows,
    "rowwise_split_input": partial(Rows, whole_input=True),
    "rowwise_rep": partial(Rows, whole_input=True),
    "embedding_rowwise": Vocabulary,
    "replicated_with_grad_allreduce": OnShares,
    "replicate": Whole,
    "whole": Whole,
}
