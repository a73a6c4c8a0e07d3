"""The impossibility theorem as an experiment (paper, Appendix A; docs/trilemma.md walks through both).

Target: MeRoPE's metric translation, τ_ij = ⊕ Rot(ω_k [R_iᵀ(o_j − o_i)]_c), for random pairs of poses. Candidates:
per-token orthogonal operators, U(T_i)ᵀ U(T_j) with U: SE(3) → SO(d) learned. The residual is ‖U_iᵀU_j − τ_ij‖² / d,
averaged over pairs: 0 is exact, 2 is what operators unrelated to the target have.
n poses, d channels of a head, p = d / 2 channel pairs.

Direction phases, Rot(ω_m [R_iᵀR_j d_j − d_i]_c), are the same target for camera centres o = R d on the unit sphere. So
the floor holds for them, too (`direction_rows`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch import Tensor, nn

from merope.encodings.merope import DIRECTION_BASE, MeRoPE, MeRoPEPhases
from merope.encodings.protocol import Encoding
from merope.encodings.rotary import rotary_frequencies
from merope.errors import invalid
from merope.geometry.cameras import Cameras
from merope.geometry.lenses import Pinhole
from merope.geometry.poses import inverse, relative, rigid
from merope.geometry.quaternions import matrix_from_quaternion

Rotations = Literal["none", "all"]
CONDITIONS: tuple[Rotations, ...] = ("none", "all")

WAVELENGTHS_M = (4.0, 16.0)
RADIUS_M = 4.0  # of the ball of camera centres: displacements reach two short wavelengths and half a long one
TRAIN_POSES, TEST_POSES, PLAN_POSES = 32, 256, 24  # each set of n poses makes n(n − 1) pairs
HALF_IMAGE = torch.tensor([0.63, 0.35], dtype=torch.float64)  # tangents of a 64° driving camera
LEARNING_RATE = 1e-2
HIDDEN = 128
HEADS = {"merope": "MeRoPE", "any_map": "any U(T)", "plane_waves": "plane waves", "merope_phases": "with phases"}


@dataclass(frozen=True)
class Row:
    """Residuals of one head size, with cameras that all look the same way ("none") or anywhere ("all")."""

    dim: int
    rotations: Rotations
    merope: float  # the plan of merope.MeRoPE
    any_map: float  # the best U(R, o) found by training
    plane_waves: float  # the best D(o) W(R) found by training: fixed frequency vectors, any continuous W
    floor: float  # no U whatsoever, continuous or not, is below this on the test poses
    blind: float  # U = I: what the theorem leaves


@dataclass(frozen=True)
class DirectionRow:
    """Residuals against direction phases, nothing trained, with cameras that all look the same way or anywhere."""

    dim: int
    rotations: Rotations
    merope_phases: float  # the plan of the encoding of that name
    floor: float  # no per-token U whatsoever is below this on the test rays
    blind: float  # U = I


def direction_rows(dims: tuple[int, ...] = (12, 24, 48), seed: int = 0) -> list[DirectionRow]:
    """For every head size without and with rotations. The caller's random state is left alone."""
    _check_dims(dims)
    with torch.random.fork_rng(devices=[]):
        return [_direction_row(dim, rotations, seed) for dim in dims for rotations in CONDITIONS]


def run(dims: tuple[int, ...] = (12, 24, 48), steps: int = 300, seed: int = 0) -> list[Row]:
    """The experiment, for every head size without and with rotations. The caller's random state is left alone."""
    _check_dims(dims)
    with torch.random.fork_rng(devices=[]):
        return [_row(dim, rotations, steps, seed) for dim in dims for rotations in CONDITIONS]


def _check_dims(dims: tuple[int, ...]) -> None:
    if not dims or any(dim <= 0 or dim % 12 for dim in dims):
        expected = "multiples of 12 (3 axes, 2 wavelengths, 2 channels)"
        raise invalid("dims", expected, dims, "the default is (12, 24, 48)")


def _row(dim: int, rotations: Rotations, steps: int, seed: int) -> Row:
    torch.manual_seed(seed)
    poses = random_poses(TEST_POSES, rotations)
    phases = target_phases(poses, dim)

    def fitted(sees_centre: bool, frequency_scale: float) -> float:
        model = fit(PerTokenOperator(dim, sees_centre, frequency_scale), rotations, steps).double()
        with torch.no_grad():
            return float(residual(model(poses), phases))

    return Row(
        dim=dim,
        rotations=rotations,
        merope=merope_residual(poses[:PLAN_POSES], dim),
        # From the target's own frequencies and from blindness: neither start is better for all rotations.
        any_map=min(fitted(sees_centre=True, frequency_scale=scale) for scale in (1.0, 0.0)),
        plane_waves=fitted(sees_centre=False, frequency_scale=1.0),
        floor=spectral_floor(phases),
        blind=float(residual(torch.eye(dim).double().expand(TEST_POSES, dim, dim), phases)),
    )


def _direction_row(dim: int, rotations: Rotations, seed: int) -> DirectionRow:
    torch.manual_seed(seed)
    poses = random_poses(TEST_POSES, rotations)
    places = HALF_IMAGE * (2 * torch.rand(TEST_POSES, 2, dtype=torch.float64) - 1)  # of the tokens, in the image plane
    rays = nn.functional.normalize(nn.functional.pad(places, (0, 1), value=1.0), dim=-1)
    phases = direction_phases(poses[:, :3, :3], rays, dim)
    some = slice(PLAN_POSES)
    method = MeRoPEPhases(head_dim=dim, partition=(0, dim, 0, 0))
    lens = Pinhole(1.0, 1.0, 0.5 - places[some, 0], 0.5 - places[some, 1], 1, 1)
    return DirectionRow(
        dim=dim,
        rotations=rotations,
        merope_phases=plan_residual(method, Cameras(poses[some], lens), phases[some, some]),
        floor=spectral_floor(phases),
        blind=float(residual(torch.eye(dim).double().expand(TEST_POSES, dim, dim), phases)),
    )


def direction_phases(
    rotations: Tensor,  # [n, 3, 3]
    rays: Tensor,  # [n, 3] one of each camera
    dim: int,
) -> Tensor:  # [n, n, p] float64
    """ω_m [R_iᵀR_j d_j − d_i]_c of every ordered pair, axis-major, then frequency."""
    frequencies = MeRoPEPhases.direction_scale * rotary_frequencies(dim // 3, DIRECTION_BASE)
    on_sphere = rigid(rotations, (rotations @ rays[..., None]).squeeze(-1))
    return (relative(on_sphere[:, None], on_sphere[None])[..., :3, 3, None] * frequencies).flatten(-2)


def random_poses(count: int, rotations: Rotations) -> Tensor:  # [n, 4, 4] float64
    """Camera-to-world poses, centres uniform in a ball, rotations uniform over SO(3) or all equal to the identity."""
    direction, quaternion = torch.randn(count, 3), torch.randn(count, 4)
    radius_m = RADIUS_M * torch.rand(count, 1) ** (1 / 3)
    centres = radius_m * nn.functional.normalize(direction, dim=-1)
    if rotations == "none":
        quaternion = torch.tensor([1.0, 0.0, 0.0, 0.0]).expand(count, 4)
    return rigid(matrix_from_quaternion(nn.functional.normalize(quaternion.double(), dim=-1)), centres.double())


def angular_frequencies(dim: int) -> Tensor:  # [d / 6] rad/m
    """Of the channel pairs of one axis: the two wavelengths, each repeated to fill the head."""
    return (2 * math.pi / torch.tensor(WAVELENGTHS_M, dtype=torch.float64)).repeat_interleave(dim // 12)


def target_phases(
    poses: Tensor,  # [n, 4, 4]
    dim: int,
) -> Tensor:  # [n, n, p] float64
    """ω_k [R_iᵀ(o_j − o_i)]_c of every ordered pair, axis-major, then wavelength (paper, Eq. 8)."""
    displacement_m = relative(poses[:, None], poses[None])[..., :3, 3]
    return (displacement_m[..., None] * angular_frequencies(dim)).flatten(-2)


def residual(
    operators: Tensor,  # [n, d, d] orthogonal
    phases: Tensor,  # [n, n, p]
) -> Tensor:  # scalar
    """Mean of ‖U_iᵀU_j − τ_ij‖² / d = 2 − 2 tr(τ_ijᵀ U_iᵀU_j) / d over pairs i ≠ j.

    τ is block diagonal, so only 2 × 2 blocks of U_iᵀU_j count: with every two neighbouring columns of U as one complex
    column z, the trace is the real part of Σ_p (z_ip* · z_jp) e^{iθ_ijp}.
    """
    columns = torch.complex(operators[..., 0::2], operators[..., 1::2])
    overlaps = torch.einsum("imp,jmp->ijp", columns.conj(), columns)
    traces = (overlaps * torch.polar(torch.ones_like(phases), phases)).real.sum(-1)
    count, dim = operators.shape[:2]
    return 2 - 2 * (traces.sum() - traces.diagonal().sum()) / (count * (count - 1) * dim)


def spectral_floor(phases: Tensor) -> float:  # [n, n, p]
    """A lower bound of the residual, for every choice of orthogonal U_1 … U_n.

    The traces of `residual` sum to Σ_m w_mᵀ S w_m, S the symmetric part of the matrix of all τ_ij and w_m the rows of
    [U_1 … U_n]: d orthogonal rows of squared length n, so at most n times the sum of the d largest eigenvalues of S.
    """
    count, dim = phases.shape[0], 2 * phases.shape[-1]
    waves = torch.polar(torch.ones_like(phases), phases).permute(2, 0, 1)  # one complex n × n block per channel pair
    eigenvalues = torch.linalg.eigvalsh((waves + waves.mH) / 2).flatten()
    largest = eigenvalues.sort(descending=True).values[: dim // 2].sum() * 2  # every one is double in real channels
    return max(0.0, float(2 - 2 * (largest - dim) / ((count - 1) * dim)))


def merope_residual(
    poses: Tensor,  # [n, 4, 4]
    dim: int,
) -> float:
    """The same residual of MeRoPE's plan, all channels given to translation, against dense τ."""
    encoding = MeRoPE(
        head_dim=dim, partition=(0, 0, dim, 0), wavelengths_m=WAVELENGTHS_M, frequencies=len(WAVELENGTHS_M)
    )
    cameras = Cameras(poses, Pinhole(1.0, 1.0, 0.5, 0.5, 1, 1))
    return plan_residual(encoding, cameras, target_phases(poses, dim))


def plan_residual(
    encoding: Encoding,
    cameras: Cameras,  # [n], of one token each
    phases: Tensor,  # [n, n, p]
) -> float:
    """The residual of an encoding's plan, which needs not be per token, against dense τ."""
    count, dim = len(phases), 2 * phases.shape[-1]
    plan = encoding.plan(cameras, grid=(1, 1))
    target = torch.zeros(count, count, dim, dim, dtype=torch.float64)
    even = torch.arange(0, dim, 2)
    target[..., even, even] = target[..., even + 1, even + 1] = phases.cos()
    target[..., even + 1, even] = phases.sin()
    target[..., even, even + 1] = -phases.sin()
    operators = torch.stack([plan.operators(token) for token in range(count)])
    return float((operators - target).square().sum()) / (count * (count - 1) * dim)


class PerTokenOperator(nn.Module):
    """U(T) = D(o) W: plane waves D = ⊕ Rot(ω_aᵀ o) with learned frequency vectors, W = exp of a learned skew matrix.

    Where W is a function of the rotation alone, these are the operators that the proof arrives at before its last step.
    Where W sees the whole pose, every continuous U: SE(3) → SO(d) with a continuous logarithm can be approximated.
    """

    def __init__(self, dim: int, sees_centre: bool, frequency_scale: float) -> None:
        super().__init__()
        self.dim, self.sees_centre = dim, sees_centre
        axes = torch.eye(3).repeat_interleave(dim // 6, dim=0)  # [p, 3]
        target = angular_frequencies(dim).float().repeat(3)[:, None]
        self.frequencies = nn.Parameter(frequency_scale * target * (axes + 0.1 * torch.randn(dim // 2, 3)))
        inputs = 9 + sees_centre * (3 + 4 * 3 * len(WAVELENGTHS_M))
        entries = dim * (dim - 1) // 2
        self.network = nn.Sequential(
            nn.Linear(inputs, HIDDEN), nn.SiLU(), nn.Linear(HIDDEN, HIDDEN), nn.SiLU(), nn.Linear(HIDDEN, entries)
        )
        nn.init.normal_(self.network[-1].weight, std=0.01)  # type: ignore[arg-type]

    def forward(self, poses: Tensor) -> Tensor:  # [n, 4, 4] -> [n, d, d]
        """U of every pose."""
        poses = poses.to(self.frequencies.dtype)
        upper = torch.triu_indices(self.dim, self.dim, 1, device=poses.device)
        generator = poses.new_zeros(poses.shape[0], self.dim, self.dim)
        generator[:, upper[0], upper[1]] = self.network(self._inputs(poses))
        turned = torch.matrix_exp(generator - generator.mT)
        phases = (poses[:, :3, 3] @ self.frequencies.mT)[..., None]
        even, odd = turned[:, 0::2], turned[:, 1::2]
        rows = (phases.cos() * even - phases.sin() * odd, phases.sin() * even + phases.cos() * odd)
        return torch.stack(rows, dim=2).flatten(1, 2)

    def _inputs(self, poses: Tensor) -> Tensor:  # [n, 9] or [n, 36]
        """The rotation; then the centre, with its phases along world axes and along the camera's own."""
        rotation = poses[:, :3, :3].flatten(1)
        if not self.sees_centre:
            return rotation
        centres = torch.stack((poses[:, :3, 3], inverse(poses)[:, :3, 3]), dim=1)  # [n, 2, 3]
        phases = (centres[..., None] * angular_frequencies(12).to(centres)).flatten(1)
        return torch.cat((rotation, poses[:, :3, 3], phases.cos(), phases.sin()), dim=-1)


def fit(model: PerTokenOperator, rotations: Rotations, steps: int) -> PerTokenOperator:
    """Train on fresh random poses in every step, all pairs of them."""
    optimiser = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, LEARNING_RATE, total_steps=steps)
    for _ in range(steps):
        poses = random_poses(TRAIN_POSES, rotations)
        loss = residual(model(poses), target_phases(poses, model.dim).float())
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
    return model


def table(rows: Sequence[Row] | Sequence[DirectionRow]) -> str:
    """Rows of one kind as text."""
    names = [column.name for column in fields(rows[0])][2:]
    lines = [f"{'d':>4}  {'rotations':<9}" + "".join(f"{HEADS.get(name, name):>13}" for name in names)]
    for row in rows:
        values = [getattr(row, name) for name in names]
        cells = "".join(f"{value:>13.1e}" if value < 1e-3 else f"{value:>13.3f}" for value in values)
        lines.append(f"{row.dim:>4}  {row.rotations:<9}{cells}")
    return "\n".join(lines)
