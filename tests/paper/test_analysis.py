"""Analysis of a camera branch: amplitudes and attention masses are what their definitions say, and nothing changes."""

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters.family_models import CASES
from adapters.family_models import output as family_output
from adapters.wan_models import TINY_MEROPE, cameras, perturb, run, tiny_config, tiny_inputs, tiny_wan
from diffusers import AutoencoderKLWan, WanPipeline
from matplotlib.colors import to_rgba
from scenes import PINHOLE, random_poses
from tiny_pipelines import HEIGHT, WIDTH, dice, drive, tiny_pipeline
from torch import Tensor

from merope.adapters.attachment import attach
from merope.adapters.history import HistoryReferences
from merope.generate.preflight import outline_model
from merope.geometry.cameras import Cameras
from merope.paper.analysis import RED, Analysis, Sampling, _by_distance, draw_amplitude, draw_attention_mass, recording


def branched(**config: Any) -> Any:
    transformer = tiny_wan()
    perturb(attach(transformer, tiny_config(**config)))
    return transformer


def inputs(**changes: Any) -> dict[str, Any]:
    return {**tiny_inputs(), "attention_kwargs": {"cameras": cameras()}, **changes}


def seen_by(processor: Any) -> list[tuple[Any, ...]]:
    """Arguments of every later call of a processor."""
    calls: list[tuple[Any, ...]] = []
    processor.register_forward_pre_hook(lambda m, args: calls.append(args))
    return calls


@torch.no_grad()
def analyse(transformer: Any, **inputs: Any) -> Analysis:
    """Amplitudes and attention masses of one forward with these arguments."""
    with recording(transformer) as record:
        transformer(**inputs)
    return record.analysis()


def modulation_amplitude(transformer: Any, **inputs: Any) -> dict[int, float]:
    """Of every camera block ‖camera residual‖ / ‖self-attention output‖, in one forward with these arguments."""
    analysis = analyse(transformer, **inputs)
    return dict(zip(analysis.blocks, analysis.amplitude.tolist(), strict=True))


class TestAmplitude:
    def test_it_is_the_ratio_of_the_two_norms(self) -> None:
        transformer = branched()
        processor = transformer.blocks[1].attn1.processor
        calls = seen_by(processor)
        amplitude = modulation_amplitude(transformer, **inputs())
        attn, hidden, _, _, rotary = calls[0]
        with torch.no_grad():
            own = processor.base(attn, hidden, None, None, rotary.native)
            residual = processor.camera_output(hidden, rotary.condition)
        assert list(amplitude) == [1, 3]
        assert math.isclose(amplitude[1], float(residual.norm() / own.norm()), rel_tol=1e-5)
        assert amplitude[1] > 0.01

    def test_a_fresh_branch_has_none(self) -> None:
        transformer = tiny_wan()
        attach(transformer, tiny_config())
        analysis = analyse(transformer, **inputs())
        assert analysis.amplitude.tolist() == [0.0, 0.0]
        assert analysis.share.tolist() == [0.0, 0.0]

    def test_it_grows_with_the_output_projection_of_its_block_alone(self) -> None:
        transformer = branched()
        before = modulation_amplitude(transformer, **inputs())
        with torch.no_grad():
            for parameter in transformer.blocks[3].attn1.processor.cam_out.parameters():
                parameter *= 2
        after = modulation_amplitude(transformer, **inputs())
        assert after[1] == before[1]
        assert math.isclose(after[3], 2 * before[3], rel_tol=1e-5)

    def test_forwards_are_averaged(self) -> None:
        transformer, others = branched(), inputs(**tiny_inputs(seed=8))
        one, two = modulation_amplitude(transformer, **inputs()), modulation_amplitude(transformer, **others)
        with torch.no_grad(), recording(transformer) as record:
            transformer(**inputs())
            transformer(**others)
        both = record.analysis()
        assert both.forwards == 2
        expected = torch.tensor([(one[block] + two[block]) / 2 for block in (1, 3)])
        assert torch.allclose(both.amplitude, expected)
        assert math.isclose(float(both.share.sum()), 1.0, rel_tol=1e-6)


class TestAttentionMass:
    def test_branch_by_the_definition(self) -> None:
        """Softmax of q_aᵀ U_ab k_b / √d with every operator written out."""
        transformer = branched(encoding_options=TINY_MEROPE)
        processor = transformer.blocks[1].attn1.processor
        calls = seen_by(processor)
        mass = analyse(transformer, **inputs()).branch_mass[0]
        _, hidden, _, _, rotary = calls[0]
        with torch.no_grad():
            q, k, _ = processor.projected(hidden)
        plan, tokens = rotary.condition.plan, 6
        rows = []
        for token in range(q.shape[2]):
            logits = torch.einsum("bhi,tij,bhtj->bht", q[:, :, token], plan.operators(token), k) / math.sqrt(24)
            rows.append(logits.softmax(-1).unflatten(-1, (-1, tokens)).sum(-1).mean((0, 1)))
        assert torch.allclose(mass, torch.stack(rows).unflatten(0, (-1, tokens)).mean(1), atol=1e-5)
        assert float((mass - 1 / 3).abs().max()) > 1e-3

    def test_backbone_by_diffusers_own_attention(self) -> None:
        """With values that mark frames and no output projection, Wan's processor gives the mass itself."""
        transformer = branched()
        processor = transformer.blocks[1].attn1.processor
        calls = seen_by(processor)
        mass = analyse(transformer, **inputs()).backbone_mass[0]
        attn, hidden, _, _, rotary = calls[0]
        frame = torch.arange(18) // 6
        marks = (frame[:, None] == torch.arange(24)).float().repeat(1, 2).expand(2, -1, -1)  # [B, N, heads · d]
        attn.to_v.forward = lambda x: marks
        attn.to_out[0].forward = lambda x: x
        with torch.no_grad():
            out = processor.base(attn, hidden, None, None, rotary.native)
        expected = out.unflatten(2, (2, 24)).mean((0, 2))[:, :3].unflatten(0, (3, 6)).mean(1)
        assert torch.allclose(mass, expected, atol=1e-5)

    @pytest.mark.parametrize("encoding", ["merope", "merope_phases", "rayrope", "cape"])
    def test_rows_sum_to_one(self, encoding: str) -> None:
        options = TINY_MEROPE if encoding.startswith("merope") else {}
        transformer = branched(encoding=encoding, encoding_options=options)
        analysis = analyse(transformer, **inputs())
        for mass in (analysis.branch_mass, analysis.backbone_mass):
            assert mass.shape == (2, 3, 3)
            assert torch.allclose(mass.sum(-1), torch.ones(2, 3), atol=1e-5)
            assert (mass >= 0).all()

    def test_more_frames_than_channels_of_a_head(self) -> None:
        transformer, count = branched(), 30
        clip = tiny_inputs(shape=(1, 4, count, 2, 2))
        mass = analyse(transformer, **clip, attention_kwargs={"cameras": cameras(count)}).branch_mass
        assert mass.shape == (2, count, count)
        assert torch.allclose(mass.sum(-1), torch.ones(2, count), atol=1e-5)

    def test_references_are_the_last_frames(self) -> None:
        transformer = branched(history="sa")
        history = HistoryReferences(torch.randn(1, 4, 2, 4, 6), Cameras(random_poses(2), PINHOLE), (101.0, 102.0))
        analysis = analyse(transformer, **inputs(attention_kwargs={"cameras": cameras(), "history": history}))
        assert analysis.branch_mass.shape == (2, 5, 5)
        assert torch.allclose(analysis.backbone_mass.sum(-1), torch.ones(2, 5), atol=1e-5)


def test_watching_changes_nothing_and_leaves_nothing() -> None:
    transformer = branched()
    before = run(transformer, cameras())
    with torch.no_grad(), recording(transformer) as record:
        during = transformer(**inputs())[0]
    assert torch.equal(before, during)
    transformer(**inputs())
    assert record.analysis().forwards == 1
    assert torch.equal(run(transformer, cameras()), before)


def test_an_unmodified_pipeline_can_be_watched() -> None:
    pipe = tiny_pipeline()
    with recording(pipe.transformer) as record:
        pipe("a street", drive(13), height=HEIGHT, width=WIDTH, num_frames=13, num_inference_steps=2, generator=dice())
    analysis = record.analysis()
    assert analysis.forwards == 4  # two steps, two guidance passes
    assert analysis.branch_mass.shape == (1, 4, 4)


@pytest.mark.parametrize("name", CASES)
def test_every_family_can_be_watched(name: str) -> None:
    """Also where text takes part in attention, before the video or behind it."""
    case = CASES[name]
    transformer, given = case.model(), case.arguments()
    before = perturb(attach(transformer, tiny_config(blocks="every"))), family_output(transformer, given, cameras())
    with torch.no_grad(), recording(transformer) as record:
        assert torch.equal(family_output(transformer, given, cameras()), before[1])
    analysis = record.analysis()
    assert (analysis.amplitude > 0.01).all()
    for mass in (analysis.branch_mass, analysis.backbone_mass):
        assert mass.shape == (2, 3, 3)
        assert torch.allclose(mass.sum(-1), torch.ones(2, 3), atol=1e-5)
        assert (mass >= 0).all()


def test_mass_of_the_video_is_not_that_of_text() -> None:
    """CogVideoX, whose text stands first: keys of one frame that answer every query take all of the mass."""
    case = CASES["cogvideox"]
    transformer, given = case.model(), case.arguments()
    attach(transformer, tiny_config(blocks=[0]))
    attn = transformer.transformer_blocks[0].attn1
    attn.norm_q = attn.norm_k = torch.nn.Identity()
    attn.to_q.forward = lambda x: torch.ones_like(x)
    middle = (torch.arange(5 + 18) - 5) // 6 == 1  # text, then three frames of six tokens
    attn.to_k.forward = lambda x: 50.0 * middle[:, None].expand_as(x)
    mass = analyse(transformer, **given, attention_kwargs={"cameras": cameras()}).backbone_mass[0]
    assert torch.allclose(mass, torch.tensor([0.0, 1.0, 0.0]).expand(3, 3), atol=1e-5)


def test_a_sampling_runs_from_noise_to_no_noise() -> None:
    transformer, times = branched(), []
    transformer.register_forward_pre_hook(lambda m, a, k: times.append(float(k["timestep"][0])), with_kwargs=True)
    noise = tiny_inputs()["hidden_states"]
    assert Sampling(3).watched({"transformer": transformer}, cameras(), noise)["transformer"].forwards == 3
    assert times == sorted(times, reverse=True)
    assert times[0] == 1000.0
    assert times[-1] > 0


def test_a_sampling_takes_eulers_steps_between_the_shifted_levels() -> None:
    transformer, seen = branched(), []
    transformer.register_forward_hook(
        lambda m, args, k, out: seen.append((k["hidden_states"], float(k["timestep"][0]), out[0])), with_kwargs=True
    )
    Sampling(3).watched({"transformer": transformer}, cameras(), tiny_inputs()["hidden_states"])
    levels = [1.0, 10 / 11, 5 / 7]  # 5u / (1 + 4u) of u = 1, 2/3, 1/3
    assert [time for _, time, _ in seen] == pytest.approx([1000.0 * level for level in levels])
    steps = torch.tensor(levels).diff()
    for ((latents, _, velocity), (next_latents, _, _)), step in zip(pairwise(seen), steps, strict=True):
        assert torch.allclose(next_latents, latents + step * velocity, atol=1e-6)


def test_the_picture_marks_the_two_largest_blocks_and_says_their_share(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, file: drawn.append(figure.axes[0]))
    nothing = torch.zeros(3, 2, 2)
    draw_amplitude(Analysis((0, 2, 5), 6, torch.tensor([1.0, 6.0, 3.0]), nothing, nothing, 1), Path("amplitude.png"))
    assert [bar.get_facecolor() == to_rgba(RED) for bar in drawn[0].patches] == [False, True, True]
    assert "two largest blocks have 90% of it" in drawn[0].get_title()


def test_the_picture_of_one_camera_block_has_one_bar_and_no_share(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, file: drawn.append(figure.axes[0]))
    nothing = torch.zeros(1, 2, 2)
    draw_amplitude(Analysis((1,), 2, torch.tensor([0.5]), nothing, nothing, 1), Path("amplitude.png"))
    low, high = drawn[0].get_xlim()
    assert (low + high) / 2 == 1.0
    assert drawn[0].get_title() == "Camera modulation"


def test_the_label_of_the_colour_bar_is_apart_from_that_of_the_next_panel(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, file: drawn.append(figure))
    mass = torch.eye(3)[None]
    draw_attention_mass(Analysis((1,), 2, torch.tensor([0.5]), mass, mass, 1), Path("attention-mass.png"))
    (figure,) = drawn
    figure.draw_without_rendering()
    _, _, right, bar = figure.axes
    gap_px = right.yaxis.label.get_window_extent().x0 - bar.yaxis.label.get_window_extent().x1
    assert gap_px > right.yaxis.label.get_window_extent().width


def test_mass_by_distance_counts_frames_before_and_after() -> None:
    mass = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.6, 0.3], [0.0, 0.3, 0.7]])
    assert _by_distance(mass).tolist() == pytest.approx([0.6, 0.25, 0.1])


def test_numbers_that_are_none_are_refused() -> None:
    transformer = branched()
    with torch.no_grad():
        transformer.blocks[2].attn1.to_q.bias[0] = torch.nan
    with pytest.raises(ValueError, match="the amplitude of block 3 must be finite, got NaN or inf"):
        analyse(transformer, **inputs())


def test_what_cannot_be_watched() -> None:
    with pytest.raises(ValueError, match=r"transformer.*camera branch"):
        analyse(tiny_wan(), **tiny_inputs())
    transformer = tiny_wan()
    attach(transformer, tiny_config(encoding="plucker", encoding_options={}, integration="additive"))
    with pytest.raises(ValueError, match=r"parallel.*additive"):
        analyse(transformer, **inputs())
    with recording(branched()) as record, pytest.raises(ValueError, match=r"at least one forward"):
        record.analysis()


def test_marks_are_per_frame() -> None:
    """Uniform attention gives every frame its share of the tokens."""
    transformer = branched()
    with torch.no_grad():
        for block in transformer.blocks:
            block.attn1.to_q.weight.zero_()
            block.attn1.to_q.bias.zero_()
    mass: Tensor = analyse(transformer, **inputs()).backbone_mass
    assert torch.allclose(mass, torch.full((2, 3, 3), 1 / 3), atol=1e-6)


def test_strides_that_the_file_leaves_to_the_defaults(tmp_path: Path) -> None:
    """vae/config.json of Wan2.1 was written before the strides had names in it."""
    numbers = {"latents_mean": [0.0] * 4, "latents_std": [1.0] * 4}
    vae = AutoencoderKLWan(base_dim=3, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1, **numbers)
    pipe = tiny_pipeline(with_branch=False, vae=vae)
    WanPipeline(**pipe.components).save_pretrained(tmp_path)
    file = tmp_path / "vae" / "config.json"
    config = json.loads(file.read_text())
    strides = outline_model(str(tmp_path)).strides
    assert (strides.frames, strides.pixels) == (config.pop("scale_factor_temporal"), config.pop("scale_factor_spatial"))
    file.write_text(json.dumps(config))
    strides = outline_model(str(tmp_path)).strides
    assert (strides.frames, strides.pixels) == (4, 8)
