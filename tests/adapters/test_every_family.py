"""What holds for a camera branch on every base model, on tiny random models of the real classes."""

import math
import re
from pathlib import Path
from shutil import copytree
from types import SimpleNamespace

import pytest
import torch
from accelerate import cpu_offload
from family_models import CASES, COLUMNS, FRAMES, ROWS, FamilyCase, output, sample_of
from peft import LoraConfig
from scenes import PINHOLE, random_poses
from torch import Tensor
from wan_models import cameras, perturb, tiny_config

import merope
from merope.adapters.attachment import attach, detach, load_branch
from merope.adapters.families import FAMILIES
from merope.geometry.cameras import Cameras
from merope.geometry.poses import rigid

TWO = cameras(batch=2)  # clips


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> FamilyCase:
    return CASES[request.param]


def test_every_family_has_a_case() -> None:
    assert {case.kind for case in CASES.values()} == set(FAMILIES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fresh_branch_changes_no_bit_and_detach_leaves_no_trace(case: FamilyCase, dtype: torch.dtype) -> None:
    transformer, inputs = case.model(dtype), case.arguments(dtype=dtype)
    before, base = (
        {name: weight.clone() for name, weight in transformer.state_dict().items()},
        output(transformer, inputs),
    )
    branch = attach(transformer, tiny_config())
    assert torch.equal(output(transformer, inputs, TWO), base)
    perturb(branch)
    trained = output(transformer, inputs, TWO)
    assert (trained - base).abs().max() > 0.1
    assert (output(transformer, inputs, cameras(batch=2, seed=4)) - trained).abs().max() > 0.1
    assert detach(transformer) is branch
    assert torch.equal(output(transformer, inputs), base)
    after = transformer.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], weight) for name, weight in before.items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in transformer.modules())


def test_parameters_and_gradients(case: FamilyCase) -> None:
    """Width 48 and one head of 24: as many as four biased layers have. A frozen base stays frozen."""
    transformer, inputs = case.model().requires_grad_(False), case.arguments()
    branch = perturb(attach(transformer, tiny_config(blocks="every")))
    assert sum(weight.numel() for weight in branch.parameters()) == 2 * (3 * 24 * (48 + 1) + 48 * (24 + 1))
    output(transformer, inputs, TWO).square().sum().backward()
    assert all(bool(weight.grad.abs().sum() > 0) for weight in branch.parameters())
    of_branch = {id(weight) for weight in branch.parameters()}
    assert all(weight.grad is None for weight in transformer.parameters() if id(weight) not in of_branch)


def test_the_world_frame_has_no_effect_and_clips_of_a_batch_do_not_meet(case: FamilyCase) -> None:
    transformer, inputs = case.model(), case.arguments()
    perturb(attach(transformer, tiny_config()))
    turn, poses = math.pi / 3, random_poses(2, FRAMES)
    axes = torch.tensor([[math.cos(turn), 0, math.sin(turn)], [0, 1, 0], [-math.sin(turn), 0, math.cos(turn)]])
    world = rigid(axes.double(), torch.tensor([300.0, -20.0, 900.0]).double())
    with torch.no_grad():
        together = output(transformer, inputs, Cameras(poses, PINHOLE))
        assert (output(transformer, inputs, Cameras(world @ poses, PINHOLE)) - together).abs().max() < 1e-5
        for clip in (0, 1):
            alone = output(transformer, sample_of(inputs, clip), Cameras(poses[clip], PINHOLE))
            assert (alone[0] - together[clip]).abs().max() < case.batch_error


def test_tokens_lie_as_cameras_do(case: FamilyCase) -> None:
    """Frame by frame, row by row: a patch of latents that changes is the one token of self-attention that changes."""
    family, transformer, inputs = FAMILIES[case.kind], case.model(), case.arguments()
    patch, seen = family.base(transformer.config)["patch_size"], []
    attn = transformer.get_submodule(f"{family.blocks}.0.{family.attention}")
    attn.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
    )
    frame, row, column = place = (1, 1, 2)
    changed = {**inputs, "hidden_states": inputs["hidden_states"].clone()}
    family.video(changed)[:, :, *(size * index for size, index in zip(patch, place, strict=True))] += 1.0
    with torch.no_grad():
        output(transformer, inputs)
        output(transformer, changed)
    assert seen[0].shape[1] == FRAMES * ROWS * COLUMNS
    differ = (seen[0] != seen[1]).any(-1).any(0).nonzero().flatten().tolist()
    assert differ == [(frame * ROWS + row) * COLUMNS + column]


def test_checkpointing_is_exact_with_two_forwards_under_way(case: FamilyCase) -> None:
    def gradients(checkpoints: bool) -> list[Tensor]:
        transformer, inputs = case.model().train(), case.arguments()
        branch = perturb(attach(transformer, tiny_config(blocks="every")))
        if checkpoints:
            transformer.enable_gradient_checkpointing()
        first, second = (output(transformer, inputs, cameras(batch=2, seed=seed)) for seed in (0, 9))
        return list(torch.autograd.grad(first.square().sum() + 3 * second.square().sum(), list(branch.parameters())))

    assert all(torch.equal(saved, plain) for saved, plain in zip(gradients(True), gradients(False), strict=True))


def test_saved_branches_and_all_ways_to_give_cameras(case: FamilyCase, tmp_path: Path) -> None:
    transformer, inputs = case.model(), case.arguments()
    branch = perturb(attach(transformer, tiny_config()))
    with torch.no_grad():
        expected = output(transformer, inputs, TWO)
        with merope.cameras(transformer, TWO):
            assert torch.equal(output(transformer, inputs), expected)
        ready = branch.prepare(TWO, FAMILIES[case.kind].video(inputs))
        assert torch.equal(output(transformer, inputs, ready), expected)
        branch.save_pretrained(tmp_path)
        detach(transformer)
        assert load_branch(transformer, tmp_path).config["latent_stride"] == branch.config["latent_stride"]
        assert torch.equal(output(transformer, inputs, TWO), expected)


def test_offloaded_weights_and_lora_beside_the_branch(case: FamilyCase) -> None:
    """LoRA finds the base model's layers alone, and adds nothing at first. accelerate moves all arguments of a call."""
    transformer, inputs = case.model(), case.arguments()
    branch = perturb(attach(transformer, tiny_config()))
    names = list(branch.state_dict())
    with torch.no_grad():
        expected = output(transformer, inputs, TWO)
        transformer.add_adapter(LoraConfig(r=2, target_modules=[branch.family.query]))
        assert any("lora" in name for name, _ in transformer.named_parameters())
        assert list(branch.state_dict()) == names
        torch.testing.assert_close(output(transformer, inputs, TWO), expected)
        cpu_offload(transformer, torch.device("cpu"), offload_buffers=True)
        torch.testing.assert_close(output(transformer, inputs, TWO), expected)


def test_a_branch_on_the_hub(case: FamilyCase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `push_to_hub` uploads is a branch that loads; here the hub is a folder."""
    hub = "diffusers.utils.hub_utils"
    monkeypatch.setattr(f"{hub}.create_repo", lambda repo_id, **_: SimpleNamespace(repo_id=repo_id))
    monkeypatch.setattr(f"{hub}.load_or_create_model_card", lambda *_, **__: None)
    monkeypatch.setattr(f"{hub}.populate_model_card", lambda _: SimpleNamespace(save=lambda _: None))
    monkeypatch.setattr(
        f"{hub}.upload_folder", lambda *, repo_id, folder_path, **_: copytree(folder_path, tmp_path / repo_id)
    )
    transformer, inputs = case.model(), case.arguments()
    branch = perturb(attach(transformer, tiny_config()))
    with torch.no_grad():
        expected = output(transformer, inputs, TWO)
        branch.push_to_hub("me/branch")
        assert {file.suffix for file in (tmp_path / "me" / "branch").iterdir()} == {".json", ".safetensors"}
        detach(transformer)
        load_branch(transformer, tmp_path / "me" / "branch")
        assert torch.equal(output(transformer, inputs, TWO), expected)


def test_context_parallelism_is_refused_with_the_familys_name(case: FamilyCase) -> None:
    """Before the branch and after it."""
    models = re.escape(FAMILIES[case.kind].models)
    transformer = case.model()
    processor = attach(transformer, tiny_config()).processors()[1]
    with pytest.raises(ValueError, match=f"None for {models} with a camera branch: plans are not split over ranks"):
        processor._parallel_config = object()
    detach(transformer)
    family = FAMILIES[case.kind]
    attn = transformer.get_submodule(f"{family.blocks}.1.{family.attention}")
    attn.processor._parallel_config = object()
    with pytest.raises(ValueError, match=f"without context parallelism for {models} with a camera branch"):
        attach(transformer, tiny_config())


def test_one_camera_per_frame_of_tokens(case: FamilyCase) -> None:
    """Also where a token spans two latent frames (CogVideoX 1.5)."""
    transformer, inputs = case.model(), case.arguments()
    stride = attach(transformer, tiny_config()).config["latent_stride"]
    for wrong in (FRAMES + 1, FRAMES - 1):
        with pytest.raises(ValueError, match=rf"one per latent frame, 3, got {wrong}; .* RGB frame {stride}n"):
            output(transformer, inputs, cameras(wrong))


@pytest.mark.parametrize("case", [case for case in CASES.values() if case.has_joint_text], ids=lambda case: case.kind)
def test_text_of_joint_attention_gets_nothing_from_the_branch(case: FamilyCase) -> None:
    transformer, inputs = case.model(), case.arguments()
    seen: list[tuple[Tensor, Tensor]] = []
    attn = transformer.transformer_blocks[0].get_submodule(FAMILIES[case.kind].attention)
    attn.register_forward_hook(lambda _, args, out: seen.append(out))
    output(transformer, inputs)
    perturb(attach(transformer, tiny_config(blocks=[0])))
    output(transformer, inputs, TWO)
    (video, text), (changed_video, same_text) = seen
    assert torch.equal(text, same_text)
    assert (video - changed_video).abs().max() > 0.1
