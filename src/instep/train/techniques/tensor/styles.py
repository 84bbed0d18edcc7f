"""Ways to split one layer along the tensor axis, on DTensor; PyTorch's own styles may be used beside them.

Parameters lie as plain contiguous shards, so checkpoints and other splits can read them. Activations are plain tensors:
whole ones outside of a split pair of layers, shares between the two.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from instep.errors import UsageError
from instep.train.absent import is_absent
from instep.train.techniques.tensor.regions import Region


def enter(x: Tensor, mesh: DeviceMesh, sequence_dim: int | None = None) -> Tensor:
    """A whole activation comes to where each rank does its share; backward adds the ranks' gradients up.

    sequence_dim: where it comes in stretches along that dim.

    Raises UsageError for the output of a layer that was taken for the model's last one.
    """
    if isinstance(x, DTensor):
        raise UsageError(
            f"a layer got a DTensor of shape {tuple(x.shape)}, whose parts split_loss leaves on their ranks for cross_entropy, so "
            "another layer is the model's last one. Name it: Parallel(split_loss='head')."
        )
    if sequence_dim is not None:
        return bring_together(x, mesh, sequence_dim)
    return DTensor.from_local(x, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])


def add_up(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """The sum of the ranks' contributions, whole on each."""
    return _whole(x, mesh, Partial())


def gather(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Shares of the last dim one after another, whole on each rank."""
    return _whole(x, mesh, Shard(x.dim() - 1))


def take_stretch(x: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
    """This rank's stretch of a whole activation."""
    return DTensor.from_local(x, mesh, [Replicate()], run_check=False).redistribute(placements=[Shard(dim)]).to_local()


def gather_along(x: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
    """Stretches one after another, whole on each rank, to go on alike on all of them."""
    return _whole(x, mesh, Shard(dim))


def bring_together(x: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
    """Stretches come to where each rank does its share of the whole; backward adds up and leaves each its stretch."""
    whole = DTensor.from_local(x, mesh, [Shard(dim)], run_check=False).redistribute(placements=[Replicate()])
    return whole.to_local(grad_placements=[Partial()])


def leave_stretch(x: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
    """Of the sum of the ranks' contributions, this rank's stretch."""
    return DTensor.from_local(x, mesh, [Partial()], run_check=False).redistribute(placements=[Shard(dim)]).to_local()


def as_shares(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Shares of the last dim as one DTensor."""
    return DTensor.from_local(x, mesh, [Shard(x.dim() - 1)], run_check=False)


def _whole(x: Tensor, mesh: DeviceMesh, placement: Placement) -> Tensor:
    whole = DTensor.from_local(x, mesh, [placement], run_check=False).redistribute(placements=[Replicate()]).to_local()
    # The same numbers, which nobody else holds, but no view to autograd: FSDP2 warns of views that a model returns.
    return torch.ops.aten._unsafe_view.default(whole, whole.shape)


def take_share(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """This rank's share of the last dim of a whole activation."""
    share = [Shard(x.dim() - 1)]
    return DTensor.from_local(x, mesh, [Replicate()], run_check=False).redistribute(placements=share).to_local()


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
    """A style of this module. weight: how the layer's weight is cut; region: set before use."""

    region: Region
    weight: Placement = Replicate()
    sequence_dim: int | None = None  # of the activations around, where these are stretches of sequences


class Columns(Split):
    """A linear layer by outputs. parts: projections that lie one after another in it; gathered: outputs come out whole,
    or, with `spread`, as a DTensor whose parts stay where they are."""

    def __init__(self, parts: int = 1, *, gathered: bool = False) -> None:
        super().__init__()
        self.parts, self.gathered, self.spread = parts, gathered, False
        self.weight = Shard(0)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        dim = 1 if is_transposed(module) else 0
        place(module, "weight", device_mesh, Shard(dim))
        place(module, "bias", device_mesh, Shard(0))

        def forward(input: Tensor) -> Tensor:
            weight = own_share(module.weight, dim, self.parts, device_mesh)
            bias = None if module.bias is None else own_share(module.bias, 0, self.parts, device_mesh)
            if self.gathered:
                out = F.linear(enter(input, device_mesh), weight.T if dim else weight, bias)
                return as_shares(out, device_mesh) if self.spread else gather(out, device_mesh)
            entered = self.region.enter_once(input, lambda x: enter(x, device_mesh, self.sequence_dim))
            self.region.inside = True
            return F.linear(entered, weight.T if dim else weight, bias)

        module.forward = forward
        return module

    def __repr__(self) -> str:
        return f"Columns(parts={self.parts}, gathered={self.gathered})"


class Rows(Split):
    """A linear layer by inputs, whose outputs are added up. whole_input: inputs come whole, each rank takes its share."""

    def __init__(self, *, whole_input: bool = False) -> None:
        super().__init__()
        self.whole_input = whole_input
        self.weight = Shard(1)

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        dim = 0 if is_transposed(module) else 1
        place(module, "weight", device_mesh, Shard(dim))
        place(module, "bias", device_mesh, Replicate())

        def forward(input: Tensor) -> Tensor:
            self.region.leave()
            share = take_share(input, device_mesh) if self.whole_input else input
            weight: Any = module.weight
            local = weight.to_local()
            out, bias = F.linear(share, local if dim else local.T), module.bias
            if self.sequence_dim is None:
                out, placements = add_up(out, device_mesh), None
            else:
                out, placements = leave_stretch(out, device_mesh, self.sequence_dim), [Partial()]
            return out if bias is None else out + bias.to_local(grad_placements=placements).to(out.dtype)

        module.forward = forward
        return module

    def __repr__(self) -> str:
        return f"Rows(whole_input={self.whole_input})"


class Vocabulary(Split):
    """An embedding by its rows: each rank looks up the tokens that it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = Shard(0)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        place(module, "weight", device_mesh, Shard(0))
        table: Any = module
        count = table.num_embeddings // device_mesh.size()
        first = device_mesh.get_local_rank() * count
        padding = table.padding_idx
        own_padding = padding - first if padding is not None and first <= padding < first + count else None

        def forward(input: Tensor) -> Tensor:
            tokens = input - first
            elsewhere = (tokens < 0) | (tokens >= count)
            rows = F.embedding(tokens.masked_fill(elsewhere, 0), table.weight.to_local(), own_padding)
            return add_up(rows.masked_fill(elsewhere[..., None], 0), device_mesh)

        module.forward = forward
        return module

    def __repr__(self) -> str:
        return "Vocabulary()"


class OnShares(Split):
    """A layer with the same parameters on all ranks, each of which applies it to its share, as a norm per head."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        names = [name for name, _ in module.named_parameters(recurse=False)]
        for name in names:
            place(module, name, device_mesh, Replicate())
        plain = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            own: dict[str, Any] = {name: module._parameters[name] for name in names}
            module._parameters.update({n: p.to_local(grad_placements=[Partial()]) for n, p in own.items()})
            try:
                return plain(*args, **kwargs)
            finally:
                module._parameters.update(own)

        module.forward = forward
        return module

    def __repr__(self) -> str:
        return "OnShares()"


class Whole(Split):
    """A layer that stays as it is, on every rank."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return module

    def __repr__(self) -> str:
        return "Whole()"


BY_NAME: dict[str, Callable[[], Split]] = {  # as transformers calls them in a model's tp_plan
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
