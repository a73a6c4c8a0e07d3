"""CameraBranchConfig: how cameras enter a transformer, and what follows from it for a model's heads and blocks."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

from merope.adapters.camera_attention import QKNorm
from merope.adapters.history import HistoryPath
from merope.adapters.rerope import PARTITION_96, Bands
from merope.adapters.told_ways import FEATURES, TOLD_PROCESSORS, features_for
from merope.encodings import ENCODINGS, encoding
from merope.encodings.merope import MeRoPE
from merope.encodings.option_types import check_types
from merope.encodings.protocol import Encoding
from merope.errors import did_you_mean, invalid

if TYPE_CHECKING:
    from merope.adapters.camera_branch import CameraBranch

DECIDED = ("head_dim", "kind", "translation_scale")
"""Fields of encodings that are no options: they follow from the model and from other fields of the config."""

PEAK_BLOCKS = (11, 13)
"""The two blocks with the largest camera modulation in Wan2.2 TI2V-5B (paper, Appendix "Injection schedule")."""

Integration = Literal[
    "parallel", "rerope", "additive", "recammaster", "motionctrl", "modulation", "epipolar", "raype", "roce"
]
Blocks = Literal["alternating", "every", "peak"] | list[int] | tuple[int, ...]


@dataclass(frozen=True)
class CameraBranchConfig:
    """How cameras enter a video transformer.

    encoding, encoding_options: name and options of `merope.encoding`; head_dim follows from the model. Integrations
        other than the first two are told numbers per token: "plucker" or "origin_direction" (with the options of
        `merope.RayFeatures`), "latitude_up" or "extrinsics"; "epipolar" takes "camco", "raype" takes "raype".
    integration: "parallel" (the paper's branch), "rerope" (camera channels in the backbone's own attention, no new
        parameters), "additive" (the CameraCtrl-style baseline), "recammaster", "motionctrl", "modulation",
        "epipolar", "raype" or "roce" (docs/bases.md).
    compression: C; the branch has width / C channels in heads // C heads, at least one (Wan2.2 5B, C = 4: 6 of 128).
    blocks: "alternating" (1, 3, 5, …), "every", "peak" (11 and 13) or a list of block indices.
    qk_norm: None (the paper's parameter count leaves no room for one) or "rms".
    carve: for "rerope", channels that the time, row and column band of a head give up; heads of 128 have a default.
    translation_scale: 1 / metres, for encodings that need their translations near 1 (`merope.translation_scale`).
    latitude_up: whether the branch is told which way is up: UCPE's map through a linear layer, added to its input. The
        world must then be aligned with gravity, y down.
    across_views: whether the views of a rig see each other in the branch; False takes every view for a clip of its own.
    history: how retrieved references enter: None (they are refused), "sa" (as further frames of all self-attention) or
        "ca" (a cross-attention in every camera block, saved with the branch).
    base_model: name of the base model, for the record; by default where the transformer was loaded from.
    """

    encoding: str = "merope"
    encoding_options: dict[str, Any] = field(default_factory=dict)
    integration: Integration = "parallel"
    compression: int = 4
    blocks: Blocks = "alternating"
    qk_norm: QKNorm = None
    carve: Bands | None = None
    translation_scale: float = 1.0
    latitude_up: bool = False
    across_views: bool = True
    history: HistoryPath | None = None
    base_model: str = ""

    def __post_init__(self) -> None:
        check_types(type(self), vars(self))
        names = features_for(self.integration) if self.integration in TOLD_PROCESSORS else sorted(ENCODINGS)
        if self.encoding not in names:
            fix = did_you_mean(self.encoding, names, f"{self.integration} takes these")
            raise invalid("encoding", f"one of {names}", repr(self.encoding), fix)
        if self.compression < 1:
            raise invalid("compression", "an int ≥ 1", repr(self.compression), "the paper uses 2, 4 and 8")
        for name, integration in (("qk_norm", "parallel"), ("carve", "rerope")):
            if getattr(self, name) is not None and self.integration != integration:
                expected = f'None but with integration="{integration}"'
                raise invalid(name, expected, repr(getattr(self, name)), f"{self.integration} has no use for it")
        if not self.across_views and self.integration != "parallel":
            raise invalid("across_views", 'True but with integration="parallel"', False, "others see one view anyway")
        # In the frame of the first camera up is no longer up.
        leaves_the_world = self.encoding in ENCODINGS and ENCODINGS[self.encoding].in_world
        if self.latitude_up and (self.integration != "parallel" or leaves_the_world):
            got = f"True with {self.integration}, {self.encoding}"
            fix = "leave it out: others have no branch to tell, or turn the world with the first camera"
            raise invalid("latitude_up", "False but for a parallel branch of relative poses", got, fix)
        self._check_options()
        self._check_history()

    def _check_options(self) -> None:
        """Refuse options that the encoding does not have, or of another type, before a model is read."""
        kind: Any = ENCODINGS.get(self.encoding) or FEATURES[self.encoding]
        known = [option.name for option in fields(kind) if option.name not in DECIDED]
        unknown = sorted(set(self.encoding_options) - set(known))
        if unknown:
            raise invalid("encoding_options", f"among {known}", unknown, f"these are the options of {self.encoding}")
        check_types(kind, self.encoding_options, "encoding_options.")

    def _check_history(self) -> None:
        reads_tokens = self.encoding in ENCODINGS and ENCODINGS[self.encoding].content_channels
        if self.history == "ca" and (self.integration != "parallel" or reads_tokens):
            got = f"{self.integration}, {self.encoding}"
            raise invalid('a branch with history "ca"', "parallel, of a geometric encoding", got, 'use history "sa"')


def check_saved(config: Mapping[str, Any]) -> None:
    """Refuse a saved branch that no config could have made: its file may be of any origin."""
    names = [each.name for each in fields(CameraBranchConfig)]
    CameraBranchConfig(**{name: config[name] for name in names if config[name] is not None})


def branch_heads(num_heads: int, head_dim: int, compression: int) -> tuple[int, int]:
    """Number of heads and channels per head of a branch: width / C channels in heads // C heads, at least one.

    Where C does not divide the number of heads the heads grow wider: 12 heads of 128, C = 8, give one of 192. Where
    C is larger, the one head is narrower than the model's: 3 heads of 128, C = 6, give one of 64.
    """
    width, count = num_heads * head_dim, max(num_heads // compression, 1)
    if width % (compression * count):
        expected = f"a divisor of the width {width} that leaves whole heads"
        raise invalid("compression", expected, compression, f"take a divisor of {num_heads}")
    return count, width // compression // count


def block_indices(blocks: Blocks, num_layers: int) -> list[int]:
    """Indices of the blocks that get a camera processor, in order."""
    named = {"alternating": range(1, num_layers, 2), "every": range(num_layers), "peak": PEAK_BLOCKS}
    if isinstance(blocks, str) and blocks not in named:
        raise invalid("blocks", f"one of {sorted(named)} or a list of indices", repr(blocks), "check the spelling")
    chosen = list(named[blocks] if isinstance(blocks, str) else blocks)
    if not chosen or len(set(chosen)) < len(chosen) or not all(0 <= index < num_layers for index in chosen):
        expected = f"distinct indices in 0 … {num_layers - 1}, at least one"
        raise invalid("blocks", expected, chosen, f"the model has {num_layers} blocks")
    return sorted(chosen)


def make_encoding(name: str, head_dim: int, options: dict[str, Any], translation_scale: float) -> Encoding:
    """The encoding of heads with so many channels; only some methods have a translation scale."""
    if "translation_scale" in ENCODINGS[name].__dataclass_fields__:
        return encoding(name, head_dim=head_dim, translation_scale=translation_scale, **options)
    if translation_scale != 1:
        fix = "leave it at 1: this encoding takes metres as they are"
        raise invalid("translation_scale", f"1 for {name}", translation_scale, fix)
    return encoding(name, head_dim=head_dim, **options)


def make_carved_encoding(name: str, channels: int, options: dict[str, Any], translation_scale: float) -> Encoding:
    """The encoding of the carved channels of a head; MeRoPE fills the default 96 with its camera blocks alone."""
    if ENCODINGS[name].content_channels:
        expected = f"one that reads no tokens for rerope, which has no layer to predict {name}'s content"
        raise invalid("encoding", expected, repr(name), 'use integration="parallel"')
    if issubclass(ENCODINGS[name], MeRoPE) and channels == sum(PARTITION_96):
        options = {"partition": PARTITION_96, **options}
    return make_encoding(name, channels, options, translation_scale)


def check_causal(branch: "CameraBranch") -> None:
    """Refuse branches whose attention cannot be that of a causal model."""
    if branch.config["integration"] != "parallel":
        fix = 'make the branch with integration="parallel"'
        raise invalid("integration", '"parallel" for a causal model', repr(branch.config["integration"]), fix)
    if branch.encoding is not None and branch.encoding.content_channels:
        fix = 'use an encoding of pure geometry, such as "merope"'
        raise invalid("encoding", "one that does not read tokens, for a causal model", branch.config["encoding"], fix)
