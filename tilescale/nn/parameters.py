"""Parameters of which each rank has a part, and how they go from and to checkpoints of the whole.

Made with a `DeviceMesh` of one axis, a module's parameters are DTensors on that mesh: `Shard` where each rank
has rows or columns, `Replicate` where all have the same. That is how PyTorch itself describes such
parameters, so what is built on it works without knowing of this package: `torch.distributed.checkpoint`
saves and loads them on any number of ranks, `fully_shard` splits them once more along another axis,
`clip_grad_norm_` adds up norms over all ranks, optimizers keep states of the same kind.

Made with anything else (all ranks, a team, a process group) parameters are plain tensors with this rank's
part.

No layout depends on the number of ranks. Where one product needs several matrices of a checkpoint (gate and
up, or queries, keys and values), their rows are woven together in a fixed order, of which each rank has a
run of rows (`Woven`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable

from tilescale import agree
from tilescale.errors import TileTypeError, TileValueError
from tilescale.nn import groups, products
from tilescale.nn.operations import refuse_transform, straight
from tilescale.ops.ranks.groups import number_of


def mesh_of(group: Any) -> Any:
    """The mesh, where a group is one.

    Raises:
        TileValueError: a mesh of several axes.
    """
    if type(group).__name__ != "DeviceMesh":
        return None
    if group.ndim != 1:
        raise TileValueError(
            f"a mesh of {group.ndim} axes", expected="one axis", hint='group=mesh["tp"], a name of one axis'
        )
    return group


def split(extent: int, ranks: int, what: str) -> int:
    """A rank's part of an extent that has to be a multiple of the ranks: a kernel is compiled for as many
    columns, and all ranks launch the same.

    Raises:
        TileValueError: it is none. TileTypeError: it is no integer.
    """
    if number_of(extent, what) % ranks:
        raise TileValueError(f"{what}={extent} on {ranks} ranks", expected="a multiple of the ranks")
    return extent // ranks


@dataclass(frozen=True)
class Woven:
    """Several tensors of a checkpoint in one parameter: their names, how they are woven along the first axis,
    and apart again. Functions of a module or a `functools.partial` of one, so that a layer can be pickled."""

    names: tuple[str, ...]
    weave: Callable[..., Tensor]
    part: Callable[[Tensor], tuple[Tensor, ...]]


class Parallel(nn.Module):
    """A module of which each rank of a group has a part.

    Attributes:
        group_name: the ranks. mesh: that of its parameters, or None where they are plain tensors.
        woven: own parameter or that of a child, by its name → the tensors of a checkpoint in it.
    """

    def __init__(self, group: Any):
        super().__init__()
        self.mesh = mesh_of(group)
        self.group_name = groups.name_of(group)
        team = groups.team(self.group_name)
        self.rank, self.ranks = team.rank, team.size
        self.woven: dict[str, Woven] = {}
        #: parameter's name → the axis along which ranks have parts, None: all have all of it
        self.axes: dict[str, int | None] = {}
        self.register_load_state_dict_pre_hook(_load)

    def place(self, name: str, whole: tuple[int, ...], axis: int | None, like: Mapping[str, Any]) -> None:
        """Makes a parameter without contents: ``whole`` is its shape on all ranks together."""
        shape = list(whole)
        if axis is not None:
            shape[axis] = split(shape[axis], self.ranks, f"{type(self).__name__}.{name}'s axis {axis}")
        self.axes[name] = axis
        made = torch.empty(shape, **like)
        self.register_parameter(name, nn.Parameter(made if self.mesh is None else self._on_mesh(made, axis)))

    def _on_mesh(self, part: Tensor, axis: int | None) -> Tensor:
        from torch.distributed.tensor import DTensor, Replicate, Shard

        placement = Replicate() if axis is None else Shard(axis)
        return DTensor.from_local(part, self.mesh, [placement], run_check=False)

    def local(self, name: str) -> Any:
        """This rank's part of a parameter, with its gradient; None where there is no such parameter."""
        param = getattr(self, name)
        if self.mesh is None or param is None:
            return param
        refuse_transform(type(self).__name__)
        known = torch.is_grad_enabled() and straight(()) and param._local_tensor.is_contiguous()
        return _Part.apply(param) if known else param.to_local()

    def whole_shape(self, name: str) -> tuple[int, ...]:
        """A parameter's, of all ranks together."""
        shape = list(getattr(self, name).shape)
        if self.mesh is None and (axis := self.axes[name]) is not None:
            shape[axis] *= self.ranks
        return tuple(shape)

    def share_of(self, name: str) -> str:
        """In words which part of a parameter this rank has."""
        axis, whole = self.axes[name], self.whole_shape(name)
        share = tuple(n // self.ranks if k == axis else n for k, n in enumerate(whole))
        return f"rank {self.rank} of {self.ranks} has {share}"

    def part_of(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of a parameter."""
        axis = self.axes[name]
        return whole if axis is None else whole.chunk(self.ranks, axis)[self.rank]

    def from_whole(self, name: str, whole: Tensor, assign: bool = False) -> Tensor:
        """What a state dict has as this parameter, of one of all ranks together. ``assign``: it becomes the
        parameter, so it stays on its device, and other ranks' parts do not stay in memory with it."""
        param, part = getattr(self, name), self.part_of(name, whole)
        device = whole.device if assign else local(param).device
        if assign and part is not whole:
            part = part.clone(memory_format=torch.contiguous_format)
        if self.mesh is not None and len(param.placements) == 1:
            return self._on_mesh(part.to(device), self.axes[name])
        given = whole if self.mesh is not None else part
        if not _is_placed(param):
            return given
        from torch.distributed.tensor import distribute_tensor  # fully_shard has split it further

        made: Tensor = distribute_tensor(
            given.to(device), param.device_mesh, param.placements, src_data_rank=None
        )
        return made

    @torch.no_grad()
    def set_whole(self, name: str, whole: Tensor) -> None:
        """Fills a parameter from one of all ranks together, which each of them brings."""
        local(getattr(self, name)).copy_(local(self.from_whole(name, whole)))

    def drawn(self, name: str, fill: Callable[[Tensor], Any]) -> None:
        """Fills a parameter as the unsharded module would from the same random numbers: the whole is drawn on
        every rank, and each keeps its part. Ranks must have the same seed, which makes the parameters that
        are alike on all of them alike, too. Collective where this one is.

        Raises:
            TileValueError: it is, and ranks drew different numbers.
        """
        param = local(getattr(self, name))
        if param.is_meta:
            return
        whole = torch.empty(self.whole_shape(name), dtype=param.dtype, device=param.device)
        fill(whole)
        if self.axes[name] is None and not isinstance(whole, FakeTensor):
            found = agree.table([float(whole.sum(dtype=torch.float64))], groups.team(self.group_name))
            if any(of != found[0] for of in found):
                raise TileValueError(
                    f"{type(self).__name__}.{name}: ranks drew different numbers",
                    expected="the same seed on all ranks of the group: it is alike on all of them",
                    hint="torch.manual_seed(seed) before layers are made, seed + rank behind them",
                )
        self.set_whole(name, whole)


class _Part(torch.autograd.Function):
    """``DTensor.to_local`` of a contiguous one. Its gradient lies as it does itself, so the parameter's own
    description is the gradient's; torch works a new one out, and sends the gradient through one more autograd
    function: 60 µs of each parameter's backward."""

    @staticmethod
    def forward(ctx: Any, param: Any) -> Tensor:
        ctx.spec = param._spec
        ctx.set_materialize_grads(False)
        part: Tensor = param._local_tensor
        return part.view_as(part)

    @staticmethod
    @once_differentiable  # as the products are
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        from torch.distributed.tensor import DTensor

        if grad is None:
            return None
        # A copy: what computes with a DTensor may change its description.
        return DTensor(grad.contiguous(), copy.copy(ctx.spec), requires_grad=False)


def local(param: Tensor) -> Tensor:
    """This rank's part of a parameter."""
    return param.to_local() if hasattr(param, "to_local") else param


def cast(*tensors: Tensor | None) -> tuple[Any, ...]:
    """The tensors in autocast's dtype, where it is on and they are floats but for float64."""
    kind = next(t for t in tensors if t is not None).device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return tensors
    to = torch.get_autocast_dtype(kind)
    return tuple(t if t is None or t.dtype == torch.float64 else t.to(to) for t in tensors)


# ---- checkpoints


def _load(
    module: Any, state: dict[str, Any], prefix: str, metadata: Any, strict: bool, missing: Any, extra: Any,
    errors: list[str],
) -> None:  # fmt: skip
    """Before a module loads: tensors of a whole checkpoint become what its parameters are. One of another
    shape is among the errors that torch raises, and the parameter stays what it is."""
    for name, woven in module.woven.items():
        names = [prefix + n for n in woven.names]
        if all(n in state for n in names) and not any(_is_placed(state[n]) for n in names):
            at, _, own = name.rpartition(".")
            owner, parts = module.get_submodule(at), [state.pop(n) for n in names]
            whole = owner.whole_shape(own)
            told = f"it is a part of {prefix + name} {whole}, of which {owner.share_of(own)}"
            like = woven.part(torch.empty(whole, device="meta"))
            wrong = [
                _of_another_shape(n, given, tuple(part.shape), told)
                for n, given, part in zip(names, parts, like, strict=True)
                if given.shape != part.shape
            ]
            errors += wrong
            state[prefix + name] = getattr(owner, own) if wrong else woven.weave(*parts)
    for name in module.axes:
        given, param = state.get(prefix + name), getattr(module, name)
        if not isinstance(given, Tensor) or _is_placed(given) or given is param:
            continue
        whole = module.whole_shape(name)
        if given.shape == whole:
            assign = bool(metadata.get("assign_to_params_buffers"))
            state[prefix + name] = module.from_whole(name, given, assign)
        elif module.mesh is not None or given.shape != param.shape:
            told = module.share_of(name) + (", which does as well" if module.mesh is None else "")
            errors.append(_of_another_shape(prefix + name, given, whole, told))
            state[prefix + name] = param


def _of_another_shape(name: str, given: Tensor, whole: tuple[int, ...], told: str) -> str:
    """What is said of a tensor of a state dict that fits a parameter nowhere."""
    what = f"{name} is {tuple(given.shape)} in the state dict"
    return str(TileValueError(what, expected=f"{whole}, all ranks' together; {told}"))


def _is_placed(tensor: Any) -> bool:
    return hasattr(tensor, "placements")


def _whole(module: Any, name: str, tensor: Tensor) -> Tensor:
    """A parameter or buffer of all ranks together; collective."""
    if _is_placed(tensor):
        tensor = tensor.full_tensor()
    if not isinstance(module, Parallel) or module.mesh is not None:
        return tensor
    axis = module.axes.get(name)
    if axis is None:
        return tensor
    rows = tensor.movedim(axis, 0).contiguous()
    every = products.all_gather(rows, rows.shape[0] * module.ranks, module.group_name)
    return every.movedim(0, axis).contiguous()


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The state dict that the unsharded model would have, its names and whole tensors, on every rank.
    Collective. `load_state_dict` of a parallel model takes it, on any number of ranks.

    Raises:
        TileTypeError: ``model`` is no module.
    """
    if not isinstance(model, nn.Module):
        raise TileTypeError(f"full_state_dict of {type(model).__name__}", expected="a torch.nn.Module")
    made: dict[str, Tensor] = {}
    with torch.no_grad():
        for key, tensor, module, name in _kept_tensors(model):
            made[key] = _whole(module, name, tensor.detach()).clone()
    for prefix, module in model.named_modules():
        if isinstance(module, Parallel):
            at = f"{prefix}." if prefix else ""
            for name, woven in module.woven.items():
                if at + name in made:
                    parts = woven.part(made.pop(at + name))
                    made |= {at + n: p.contiguous() for n, p in zip(woven.names, parts, strict=True)}
    return made


def _kept_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor, nn.Module, str]]:
    """What a state dict has: key, tensor, the module that has it, its name there."""
    for key, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor):
            at, _, name = key.rpartition(".")
            try:
                module = model.get_submodule(at)
            except AttributeError:
                module = model
            yield key, tensor, module, name
