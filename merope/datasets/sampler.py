"""Class-balanced sampling: uniform over clusters of motion, then uniform within the cluster (paper, Section 4.1).

Clusters of a mixture of data sets may have chances of their own.
"""

import zlib
from collections.abc import Iterable, Iterator
from typing import TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Sampler

from merope.curation.curate import Curation
from merope.errors import invalid


class SamplerState(TypedDict):
    """Where a run stands. The same on all ranks."""

    seed: int
    epoch: int
    position: int  # draws of this epoch that all ranks together have used
    epoch_length: int
    fingerprint: int  # of the table that is drawn from


def names_fingerprint(names: Iterable[str]) -> int:
    """Of clips by their names, in their order."""
    return zlib.crc32("\0".join(names).encode())


class ClusterSampler(Sampler[int]):
    """Indices of clips: a cluster by its chance, then one of its clips with equal chances, with replacement.

    An epoch is one global sequence of `epoch_length` draws, fixed by seed and epoch; rank r of W takes draws r, r + W,
    r + 2W, … of it, all ranks equally many. `iter` continues where the last one stopped, also after `load_state_dict`
    and then even with another number of ranks; at the end of an epoch the next one is up. Clusters without a clip to
    draw (for `prototypes_only`, without a prototype) do not take part.
    """

    def __init__(
        self,
        curation: Curation,
        *,
        prototypes_only: bool = False,
        chances: Tensor | None = None,  # [clusters] by their numbers, in any unit; equal ones by default
        epoch_length: int | None = None,  # draws of all ranks; as many as there are clips to draw from
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if not 0 <= rank < world_size:
            raise invalid("rank", f"in [0, world_size = {world_size})", rank, "pass torch.distributed's own numbers")
        if seed < 0:
            raise invalid("seed", "a non-negative integer", seed, "pick another")
        clips = curation.kept.nonzero().squeeze(-1) if prototypes_only else torch.arange(len(curation.cluster))
        if len(clips) == 0:
            raise invalid("curation", "at least one clip", "an empty one", "check the manifest")
        self.cluster = curation.cluster  # [N] of every clip, also of those that are not drawn
        cluster = curation.cluster[clips].numpy()
        order = np.argsort(cluster, kind="stable")
        self.members: NDArray[np.int64] = clips.numpy()[order]  # clips, cluster after cluster
        occupied, self.starts, self.sizes = np.unique(cluster[order], return_index=True, return_counts=True)
        self.bounds = None if chances is None else _upper_bounds(chances, occupied)
        self.epoch_length = len(clips) if epoch_length is None else epoch_length
        if self.epoch_length < world_size:
            expected = f"at least one draw for each of {world_size} ranks"
            raise invalid("epoch_length", expected, self.epoch_length, "pass a longer one")
        self.seed, self.rank, self.world_size = seed, rank, world_size
        self.epoch, self.position = 0, 0

    def __len__(self) -> int:
        """Draws that this rank has left in this epoch."""
        return (self.epoch_length - self.position) // self.world_size

    def __iter__(self) -> Iterator[int]:
        sequence = self._sequence()
        while len(self) > 0:
            index = int(sequence[self.position + self.rank])
            self.position += self.world_size
            yield index
        self.epoch, self.position = self.epoch + 1, 0

    def _sequence(self) -> NDArray[np.int64]:  # [epoch_length]
        random = np.random.default_rng((self.seed, self.epoch))
        if self.bounds is None:
            cluster = random.integers(len(self.sizes), size=self.epoch_length)
        else:
            cluster = np.searchsorted(self.bounds, random.random(self.epoch_length), side="right")
        return self.members[self.starts[cluster] + random.integers(self.sizes[cluster])]

    def stand_ins(self, index: int) -> list[int]:
        """Who takes the place of a clip, in turn: those of its cluster from the next on, then those of the others."""
        place = int(np.flatnonzero(self.members == index)[0])
        group = int(np.searchsorted(self.starts, place, side="right")) - 1
        start, stop = self.starts[group], self.starts[group] + self.sizes[group]
        parts = (self.members[place + 1 : stop], self.members[start:place], self.members[stop:], self.members[:start])
        return np.concatenate(parts).tolist()

    def _fingerprint(self) -> int:
        bounds = 0 if self.bounds is None else zlib.crc32(self.bounds.astype("<f8").tobytes())
        sizes = zlib.crc32(self.sizes.astype("<i8").tobytes(), bounds)
        return zlib.crc32(self.members.astype("<i8").tobytes(), sizes)

    def state_dict(self, epoch: int | None = None, position: int | None = None) -> SamplerState:
        """What `load_state_dict` needs, as plain numbers.

        Data-loader workers fetch ahead of the training loop, so what was drawn is more than what was used. A loop that
        counts for itself passes its epoch and how many draws of it all ranks together have used.
        """
        return SamplerState(
            seed=self.seed,
            epoch=self.epoch if epoch is None else epoch,
            position=self.position if position is None else position,
            epoch_length=self.epoch_length,
            fingerprint=self._fingerprint(),
        )

    def load_state_dict(self, state: SamplerState) -> None:
        """Continue the sequence that the state comes from; refused when clips, clusters or settings differ."""
        mine = self.state_dict()
        for name in ("seed", "epoch_length", "fingerprint"):
            if state.get(name) != mine[name]:
                fix = "resume with the manifest and the settings of the first run"
                raise invalid(f"state[{name!r}]", f"{mine[name]} like this sampler's", state.get(name), fix)
        for name in ("epoch", "position"):
            value = state.get(name)
            if not isinstance(value, int) or value < 0:
                raise invalid(f"state[{name!r}]", "an int ≥ 0", repr(value), "resume from an older checkpoint")
        self.epoch, self.position = state["epoch"], state["position"]


def _upper_bounds(chances: Tensor, occupied: NDArray[np.int64]) -> NDArray[np.float64]:  # [clusters], [n] -> [n]
    """Where the share of each occupied cluster of [0, 1) ends. The last one ends at 1, whatever rounding says."""
    share = chances.double().numpy()[occupied]
    if not (np.isfinite(share).all() and (share >= 0).all() and share.sum() > 0):
        raise invalid("chances", "finite, not negative, and some positive", share.tolist()[:8], "check the weights")
    bounds = np.cumsum(share / share.sum())
    bounds[np.flatnonzero(share)[-1] :] = 1.0
    return bounds
