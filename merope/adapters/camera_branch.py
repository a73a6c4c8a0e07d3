"""CameraBranch: all that camera control adds to a transformer, as one model that is saved and loaded on its own."""

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any, Self

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.modeling_utils import ModelMixin
from torch import Tensor, nn

import merope
from merope.adapters.batching import (
    check_frame_count,
    check_whole_batch,
    clip_origin,
    clips_of_batch,
    matched_batch,
    rig_times,
    views_as_clips,
)
from merope.adapters.branch_config import (
    Blocks,
    CameraBranchConfig,
    Integration,
    block_indices,
    branch_heads,
    check_causal,
    check_saved,
    make_carved_encoding,
    make_encoding,
)
from merope.adapters.camera_attention import CameraAttention, CameraProcessor, QKNorm, plan_dtype
from merope.adapters.conditioning import CameraCondition, FrameShare, attended_dtype
from merope.adapters.families import family_of, family_of_base
from merope.adapters.history import HistoryPath, HistoryReferences, check_rotary_times, existing
from merope.adapters.rerope import Bands, CarvedAttention, check_carve
from merope.adapters.told_processor import BlockSizes
from merope.adapters.told_ways import TOLD_PROCESSORS, make_features, told
from merope.attention.dispatch import make_ready
from merope.attention.plan import AttentionPlan
from merope.attention.visible_cameras import Visibility
from merope.encodings.additive import AdditiveFeatures, LatitudeUp
from merope.encodings.protocol import Encoding
from merope.encodings.tokens import Times
from merope.errors import invalid
from merope.geometry.cameras import LATENT_STRIDE, Cameras

POSE_CONVENTION = "world_from_camera (camera-to-world), OpenCV axes (x right, y down, z forward), metres"


class CameraBranch(ModelMixin, ConfigMixin):  # type: ignore[misc]  # diffusers' own mixins disagree on a field
    """The camera processors of the chosen blocks, keyed by block index; made by `merope.attach`.

    What diffusers saves of it is only what was added; `config` says for which model, pose convention and scale.
    """

    @register_to_config  # type: ignore[untyped-decorator]
    def __init__(
        self,
        base: dict[str, Any],  # what the family says must agree with the transformer
        encoding: str = "merope",
        encoding_options: dict[str, Any] | None = None,
        integration: Integration = "parallel",
        compression: int = 4,
        blocks: Blocks = "alternating",
        qk_norm: QKNorm = None,
        carve: Bands | None = None,
        translation_scale: float = 1.0,
        latitude_up: bool = False,
        across_views: bool = True,
        history: HistoryPath | None = None,
        base_model: str = "",
        pose_convention: str = POSE_CONVENTION,
        latent_stride: int = LATENT_STRIDE,
        merope_version: str = "",
        causal_block_frames: int | None = None,  # latent frames of a block that it was trained with; None: whole clips
        denoising_levels: list[float] | None = None,  # noise levels of the few steps that it was trained for
    ) -> None:
        super().__init__()
        check_saved(self.config)
        indices = block_indices(blocks, base["num_layers"])
        self.register_to_config(blocks=indices, merope_version=merope_version or merope.__version__)
        self.family = family_of_base(base)
        self._check_supported(integration, history)
        self.time_limit: int | None = None  # frames that the base model's rotary table holds; known once attached
        self.frame_share: Callable[[int], FrameShare] | None = None  # of a clip's latent frames; set where ranks share
        self.encoding: Encoding | None = None
        self.features: AdditiveFeatures | None = None
        build = {"parallel": self._parallel, "rerope": self._carved}.get(integration, self._told)
        self.camera_blocks = nn.ModuleDict({str(index): build() for index in indices})
        for index, processor in self.processors().items():
            processor.layer = f"camera.{index}"
            processor.reason = f"for {self.family.models} with a camera branch"

    def _check_supported(self, integration: Integration, history: HistoryPath | None) -> None:
        """Refuse what the base model's attention does not take."""
        if integration not in self.family.integrations:
            expected = f"one of {list(self.family.integrations)} for {self.family.transformer}"
            raise invalid("integration", expected, repr(integration), "the others rewrite Wan's own attention")
        if history is not None and not self.family.has_history:
            fix = "retrieved references need Wan's patches and times; leave history out"
            raise invalid("history", f"None for {self.family.transformer}", repr(history), fix)
        if history is not None and self.config["base"]["patch_size"][0] != 1:
            fix = "use a model whose tokens span one latent frame"
            raise invalid("history", "None for a patch of several frames", repr(history), fix)

    @classmethod
    def for_transformer(cls, transformer: ModelMixin, config: CameraBranchConfig) -> Self:
        """A fresh branch that fits a transformer; not attached yet."""
        options = asdict(config)
        options["base_model"] = config.base_model or str(transformer.config.get("_name_or_path") or "")
        options["latent_stride"] = family_of(transformer).token_stride(transformer.config)
        with transformer.device:  # large branches are made where they will live
            return cls(base=base_fields(transformer), **options)

    @classmethod
    def from_pretrained(cls, *args: Any, **options: Any) -> Any:
        """As diffusers' own; weights that are not numbers are refused, because they would make every frame black."""
        loaded = super().from_pretrained(*args, **options)
        branch = loaded[0] if isinstance(loaded, tuple) else loaded
        for name, weight in branch.state_dict().items():
            if not weight.is_meta and not bool(weight.isfinite().all()):  # missing ones are for others to tell
                fix = "the file is damaged or its training diverged: take an earlier one"
                raise invalid(f"the branch's weight {name}", "finite", "NaN or inf", fix)
        return loaded

    def _parallel(self) -> CameraProcessor:
        config = self.config
        of_base = self.family.heads(config["base"], config["compression"])
        heads, self.head_dim = branch_heads(*of_base, config["compression"])
        self.encoding = make_encoding(config["encoding"], self.head_dim, self._options(), config["translation_scale"])
        parts = (config["history"] == "ca", config["latitude_up"])
        return CameraAttention(self._width(), heads, self.encoding, config["qk_norm"], *parts)

    def _carved(self) -> CameraProcessor:
        config = self.config
        self.head_dim = config["base"]["attention_head_dim"]
        carve = check_carve(config["carve"], self.head_dim)
        self.encoding = make_carved_encoding(
            config["encoding"], sum(carve), self._options(), config["translation_scale"]
        )
        return CarvedAttention(self.head_dim, carve)

    def _told(self) -> CameraProcessor:
        config, width = self.config, self._width()
        self.features = make_features(config["encoding"], self._options(), config["translation_scale"])
        narrow = max(width // config["compression"], 1)
        sizes = BlockSizes(width, config["base"]["num_attention_heads"], narrow)
        return TOLD_PROCESSORS[config["integration"]](sizes, self.features)

    def _width(self) -> int:
        return self.config["base"]["num_attention_heads"] * self.config["base"]["attention_head_dim"]

    def _options(self) -> dict[str, Any]:
        """Options of the encoding; where they want tuples, JSON gave lists."""
        given = self.config["encoding_options"] or {}
        return {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}

    def processors(self) -> dict[int, CameraProcessor]:
        """The processor of every block that has one."""
        return {int(index): processor for index, processor in self.camera_blocks.items()}  # type: ignore[misc]

    def prepare(
        self,
        cameras: Cameras,  # [V] or [b, V], one per latent frame (and view)
        latents: Tensor,  # [B, channels, T, H, W]
        times: Times | None = None,  # [V] or [b, V] latent frames, of a rig those of its moments
        history: HistoryReferences | None = None,
        sees: Visibility | None = None,
        leading: int = 0,
    ) -> CameraCondition:
        """Cameras, and retrieved references, made ready for latents of this shape, device and precision.

        `attention_kwargs={"cameras": …}` takes the result in place of the cameras. A clip without a batch serves every
        sample. Where a batch of b clips meets B = n·b latents, each clip serves n neighbouring samples, as
        `num_videos_per_prompt` of diffusers' pipelines lays them out. The views of a rig are neighbouring samples, too;
        the branch attends over all of them. `sees`: for a model whose frames do not see all. `leading`: so many of the
        cameras are of references that stand before the clip.
        """
        if self.family.doubles_batch:
            check_whole_batch(cameras, clips_of_batch(cameras, len(latents)))
        if cameras.views > 1:
            self._check_rig(history, sees)
            if not self.config["across_views"]:
                cameras, times = views_as_clips(cameras, times, len(latents))
        if sees is not None:
            self._check_visible(history)
        located = replace(self.located(cameras, latents, times, leading), sees=sees)
        references = self._references(history, latents, cameras)
        if references is not None and self.config["history"] == "sa":
            located = located.with_appended(references)
        located = self._told_up(located, latents)
        if self.features is not None:
            return told(located, self.features, latents)
        assert self.encoding is not None
        if self.encoding.content_channels:  # every block makes its own plan from what it predicts
            return located
        if self.frame_share is not None:
            return self._shared(located, latents, self.frame_share(located.cameras.count))
        plan = self.encoding.plan(located.cameras, located.grid, times=located.times, sees=sees)
        located = replace(located, plan=self.ready(plan, latents))
        if references is None or located.history is not None:
            return located
        return self._looking_across(located, references, latents)

    def prepare_block(
        self,
        cameras: Cameras,  # [block] or [b, block]
        latents: Tensor,  # [B, channels, block, H, W]
        past: Cameras | None,  # [P] or [B, P], those of a stream's cache
        times: Tensor,  # [P + block] latent frames
        history: HistoryReferences | None = None,
        leading: int = 0,
    ) -> CameraCondition:
        """A block of a stream: its cameras are queries, those of the cache and its own are keys.

        leading: so many cameras of the cache are of recalled frames, which stand before the stream's own.
        """
        check_causal(self)
        self._check_visible(history)
        if cameras.views > 1:
            raise invalid("cameras", "of one view in a stream", f"{cameras.views} views", "stream the views one by one")
        assert self.encoding is not None
        check_frame_count(cameras, latents.shape[2], self.config["latent_stride"])
        own, _ = matched_batch(cameras.to("cpu"), None, latents.shape[0])
        keys = (own if past is None else past.joined(own)).to(latents.device)
        references = self._references(history, latents, keys, leading)
        if self.in_world:
            keys = keys.seen_from(clip_origin(keys, leading))
        earlier = keys.count - own.count
        cameras, own_times = keys.at(slice(earlier, None)), times[earlier:]
        located = CameraCondition(cameras, self._grid(latents), self.makes, len(latents), own_times)
        plan = self.encoding.plan(located.cameras, located.grid, key=keys, times=located.times, key_times=times)
        located = replace(self._told_up(located, latents), plan=self.ready(plan, latents))
        return located if references is None else self._looking_across(located, references, latents)

    def _check_rig(self, history: HistoryReferences | None, sees: Visibility | None) -> None:
        """Refuse what a rig's cameras cannot be combined with."""
        if self.config["integration"] in ("rerope", "epipolar"):
            fix = 'make the branch with integration="parallel"'
            got = repr(self.config["integration"])
            raise invalid("integration", 'neither "rerope" nor "epipolar" for a rig', got, fix)
        for name, given in (
            ("history", existing(history) is not None),
            ("a causal model", sees is not None),
            ("a clip shared by ranks", self.frame_share is not None),
        ):
            if given:
                raise invalid(f"cameras with {name}", "of one view", "a rig", "give the views one by one")

    def _check_visible(self, history: HistoryReferences | None) -> None:
        """Refuse what a visibility of the video's own cameras says nothing about."""
        if self.frame_share is not None:
            raise invalid("sees", "None where ranks share a clip", "a visibility", "let one rank hold whole clips")
        if self.config["history"] == "sa" and existing(history) is not None:
            expected = 'None for cameras made ready for a causal model with history "sa"'
            fix = "pass cameras and history to the transformer as they are; a stream keeps references in its cache"
            raise invalid("history", expected, "references", fix)

    def _looking_across(
        self, located: CameraCondition, references: HistoryReferences, latents: Tensor
    ) -> CameraCondition:
        """History "ca": with a plan from the video's tokens to the references'."""
        assert self.encoding is not None
        across = self.encoding.plan(
            located.cameras, located.grid, key=references.posed, times=located.times, key_times=references.times
        )
        return replace(located, history=references, history_plan=self.ready(across, latents))

    def _shared(self, whole: CameraCondition, latents: Tensor, share: FrameShare) -> CameraCondition:
        """The condition of one rank: queries of its own frames, keys of all frames."""
        assert self.encoding is not None
        times = torch.arange(whole.cameras.count) if whole.times is None else torch.as_tensor(whole.times)
        own = whole.cameras.at(share.own)
        whole = self._told_up(whole, latents, share.own)
        plan = self.encoding.plan(
            own, whole.grid, key=whole.cameras, key_grid=whole.grid, times=times[..., share.own], key_times=times
        )
        return replace(whole, plan=self.ready(plan, latents), gather=share.gather)

    def _told_up(self, located: CameraCondition, latents: Tensor, own: slice = slice(None)) -> CameraCondition:
        """With the latitude-up map of the tokens of some frames, where the branch has one."""
        if not self.config["latitude_up"]:
            return located
        features = LatitudeUp().features(located.cameras.at(own), located.grid)
        return replace(located, features=features.to(plan_dtype(latents)))

    def ready(self, plan: AttentionPlan, latents: Tensor) -> AttentionPlan:
        """The plan in the precision of the transforms, with the tables of the kernels that will run it."""
        plan = replace(plan.to(dtype=plan_dtype(latents)), head_dim=self.head_dim)
        make_ready(plan, attended_dtype(latents))
        return plan

    def _references(
        self, history: HistoryReferences | None, latents: Tensor, video: Cameras, leading: int = 0
    ) -> HistoryReferences | None:
        """The references of a batch of latents, checked; None where there are none."""
        given = existing(history)
        if given is None:
            return None
        if self.config["history"] is None:
            fix = 'make the branch with CameraBranchConfig(history="sa") or "ca"'
            raise invalid("history", "None for a branch without history", f"{given.count} references", fix)
        if self.frame_share is not None:
            fix = "let one rank hold whole clips"
            raise invalid("history", "None where ranks share a clip", f"{given.count} references", fix)
        if self.config["history"] == "sa" and self.time_limit is not None:
            check_rotary_times(given, self.time_limit)
        served = given.serving(latents)
        if not self.in_world:
            return served
        matched, _ = matched_batch(video.to(latents.device), None, len(latents))
        return replace(served, cameras=served.posed.seen_from(clip_origin(matched, leading)))

    @property
    def makes(self) -> dict[str, object]:
        """What decides which conditions it makes: branches that agree in this take each other's."""
        names = ("integration", "latitude_up", "across_views", "history")
        return {"encoding": self.encoding or self.features, **{name: self.config[name] for name in names}}

    @property
    def in_world(self) -> bool:
        """Whether the encoding depends on the world frame: a clip's is then that of its first camera.

        So it is in training and for any path later; maps and reconstructions have origins of their own.
        """
        return self.encoding is not None and self.encoding.in_world

    def located(
        self, cameras: Cameras, latents: Tensor, times: Times | None = None, leading: int = 0
    ) -> CameraCondition:
        """Cameras checked against latents, brought to their device and batch, with their token grid; no plan yet."""
        patch_frames = self.config["base"]["patch_size"][0]
        check_frame_count(cameras, latents.shape[2] // patch_frames, self.config["latent_stride"])
        clips = clips_of_batch(cameras, latents.shape[0])
        cameras, times = matched_batch(cameras.to(latents.device), rig_times(cameras, times), clips)
        if self.in_world:
            cameras = cameras.seen_from(clip_origin(cameras, leading))
        return CameraCondition(cameras, self._grid(latents), self.makes, len(latents), times)

    def _grid(self, latents: Tensor) -> tuple[int, int]:
        """Token rows and columns of a latent frame."""
        _, rows, columns = self.config["base"]["patch_size"]
        return latents.shape[3] // rows, latents.shape[4] // columns


def base_fields(transformer: ModelMixin) -> dict[str, Any]:
    """What must agree between a branch and its base model."""
    return family_of(transformer).base(transformer.config)
