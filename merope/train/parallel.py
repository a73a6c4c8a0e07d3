"""Ranks and what they share: data, replicas and shards of the weights, shards of a clip's frames.

Parallelism is applied from outside: the model does not know about it. One process without torchrun needs none of this.
"""

import os
import warnings
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from merope.adapters.families import family_of
from merope.errors import invalid
from merope.train.config import ParallelSection


@dataclass(frozen=True)
class Ranks:
    """This process among all."""

    rank: int
    world_size: int
    device: torch.device
    data_rank: int = 0  # which clips it takes
    data_ranks: int = 1
    mesh: DeviceMesh | None = None  # replicate × shard × context

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def context_group(self) -> dist.ProcessGroup:
        """The ranks that share this one's clips."""
        assert self.mesh is not None
        return self.mesh.get_group("context")

    def sum(self, values: Iterable[float]) -> list[float]:
        """Numbers added over all ranks."""
        numbers = list(values)
        if self.world_size == 1:
            return numbers
        total = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return total.tolist()

    def gather_names(self, names: list[str]) -> list[str]:
        """Names from all ranks."""
        if self.world_size == 1:
            return names
        gathered: list[list[str]] = [[] for _ in range(self.world_size)]
        dist.all_gather_object(gathered, names)
        return [name for part in gathered for name in part]


def start(parallel: ParallelSection) -> Ranks:
    """Join the ranks that torchrun started; alone without it."""
    world_size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    sizes = mesh_sizes(parallel, world_size)
    if world_size == 1:
        return Ranks(rank, world_size, device)
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    mesh = init_device_mesh(device.type, sizes, mesh_dim_names=("replicate", "shard", "context"))
    replicate, shard, _ = mesh.get_coordinate() or [0, 0, 0]
    return Ranks(rank, world_size, device, replicate * sizes[1] + shard, sizes[0] * sizes[1], mesh)


def mesh_sizes(parallel: ParallelSection, world_size: int) -> tuple[int, int, int]:
    """replicate, shard, context; their product is the number of ranks."""
    given = parallel.replicate * parallel.context
    shard = parallel.shard if parallel.shard is not None else max(world_size // given, 1)
    if given * shard != world_size:
        got = f"{parallel.replicate} × {shard} × {parallel.context}"
        fix = "change [parallel], or torchrun's --nproc-per-node and --nnodes"
        raise invalid("parallel", f"replicate × shard × context = {world_size} ranks", got, fix)
    return parallel.replicate, shard, parallel.context


def shard_model(transformer: nn.Module, ranks: Ranks, precision: str) -> None:
    """FSDP2 on every block and the rest: weights split over shard × context ranks, copies over replicate ones.

    Nothing is cast on the way in: noise levels and rotary tables do not survive bf16.
    """
    if ranks.mesh is None:
        return
    # The output is a view of what the last layer gave; nobody changes it in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    if precision == "bf16":
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    ranks.mesh["shard", "context"]._flatten("weights")
    mesh = ranks.mesh["replicate", "weights"]
    for block in transformer.get_submodule(family_of(transformer).blocks).children():
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(transformer, mesh=mesh, mp_policy=policy)


def as_number(value: Tensor) -> float:
    """A scalar, also when it is spread over ranks. All ranks call it."""
    return float(value.full_tensor() if hasattr(value, "full_tensor") else value)


def stop() -> None:
    """Leave the other ranks in good order."""
    if dist.is_initialized():
        dist.destroy_process_group()
