"""A judge of pictures: what is decoded grows sharp, gradients have their sizes, and a run is like any other."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.testing import assert_close

from merope.train.picture_judge import PictureJudge, aim_of_sharpness, judged_pictures
from merope.train.vae_config import VaeTrainConfig
from merope.train.vae_loop import VaeRun, export_vae_checkpoint, train_step, train_vae
from merope.train.vae_model import squared_steps
from tests.train.test_vae_training import logged, tiny, weights

CPU = torch.device("cpu")


def stripes(clips: int) -> Tensor:  # [clips, 3, 1, 16, 16]
    """Black and white columns, beginning with either."""
    columns = (torch.arange(16) // 2 % 2 * 2.0 - 1.0).expand(clips, 3, 1, 16, 16)
    return columns * (torch.randint(2, (clips, 1, 1, 1, 1)) * 2.0 - 1.0)


def sharpness_of_guesses(weight: float) -> float:
    """Of what is decoded from latents that do not tell which column is white, at the end of a short training."""
    torch.manual_seed(0)
    decoder, judge, found = nn.Conv3d(2, 3, (1, 5, 5), padding=(0, 2, 2)), PictureJudge(), []
    optimiser = torch.optim.AdamW([*decoder.parameters(), *judge.parameters()], lr=3e-3, betas=(0.5, 0.99))
    dice = torch.Generator().manual_seed(0)
    for step in range(60):
        video = stripes(4)
        latents = torch.stack([torch.randn(4, 1, 16, 16) / 4, stripes(4)[:, 0]], dim=1)
        decoded = decoder(latents)
        loss = (decoded - video).square().mean()
        optimiser.zero_grad()
        (loss + aim_of_sharpness(judge, loss, decoded, video, weight)).backward()
        judged_pictures(judge, decoded, video, dice).loss.mean().backward()
        optimiser.step()
        if step >= 40:
            found.append(float((squared_steps(decoded.detach()) / squared_steps(video)).mean()))
    return sum(found) / len(found)


def test_what_is_open_is_not_decoded_as_a_blur() -> None:
    """The mean of both kinds of stripes is grey."""
    assert sharpness_of_guesses(0.0) < 0.1
    assert sharpness_of_guesses(2.0) > 0.2


@pytest.mark.parametrize("weight", [0.0, 0.7])
def test_the_aim_has_its_size_in_every_frame(weight: float) -> None:
    torch.manual_seed(0)
    video, judge = torch.rand(2, 3, 3, 16, 24) * 2 - 1, PictureJudge()
    decoded = (video + 0.1 * torch.randn_like(video)).requires_grad_()
    of_frames = torch.tensor([1.0, 5.0, 0.0])[:, None, None]
    loss = ((decoded - video).square() * of_frames).mean()
    (own,) = torch.autograd.grad(loss, decoded, retain_graph=True)
    aim = aim_of_sharpness(judge, loss, decoded, video, weight)
    assert_close(aim, torch.zeros(()))
    (gradient,) = torch.autograd.grad(aim, decoded)
    size, aim_size = (x.square().sum((1, 3, 4)).sqrt() for x in (own, gradient))
    assert_close(aim_size, weight * size, rtol=1e-4, atol=1e-7)
    assert all(parameter.grad is None for parameter in judge.parameters())


def test_a_step_along_the_aim_is_taken_for_true_more_often() -> None:
    torch.manual_seed(0)
    video, judge = torch.rand(2, 3, 3, 16, 24) * 2 - 1, PictureJudge()
    decoded = torch.zeros_like(video, requires_grad=True)
    aim = aim_of_sharpness(judge, decoded.square().sum() + decoded.sum(), decoded, video, 1.0)
    (gradient,) = torch.autograd.grad(aim, decoded)
    step = 1e-2 * gradient / gradient.abs().max()
    assert judge(decoded.detach() - step).mean() > judge(decoded.detach()).mean()


def test_the_judge_learns_from_pairs_and_the_decoder_does_not() -> None:
    torch.manual_seed(0)
    judge, dice = PictureJudge(), torch.Generator().manual_seed(0)
    optimiser = torch.optim.AdamW(judge.parameters(), lr=1e-3)
    video = torch.rand(4, 3, 1, 16, 16) * 2 - 1
    decoded = (video + 0.5 * torch.randn_like(video)).requires_grad_()
    for _ in range(30):
        optimiser.zero_grad()
        judged = judged_pictures(judge, decoded, video, dice)
        judged.loss.mean().backward()
        optimiser.step()
    assert decoded.grad is None
    assert judged.loss.mean() < 0.5
    assert judged.told_apart.mean() == 1.0


def judged_run(out: Path, *changes: str) -> VaeTrainConfig:
    judge = ("adversary.judge_first=2", "adversary.weight=0.5", "run.log_every=1", "run.validate_every=4")
    return tiny(out, *judge, *changes)


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("judged") / "run"
    assert train_vae(judged_run(out, "run.steps=4"))
    return out


def test_a_run_logs_its_judge_and_exports_a_vae_without_it(judged: Path) -> None:
    rows = logged(judged)
    assert all({"judge_loss", "told_apart", "judge_gradient_norm"} <= row.keys() for row in rows)
    report = json.loads((judged / "trained" / "vae-report.json").read_text())
    assert report["sharpness"] == pytest.approx(sum(report["sharpness_of_worlds"]) / 2)
    assert not [name for name in weights(judged) if "judge" in name]


def test_stopping_and_going_on_changes_nothing(judged: Path, tmp_path: Path) -> None:
    """The judge goes on, too. The rate falls by the steps of the whole run, so both runs are told of four."""
    config = judged_run(tmp_path, "run.steps=4", "run.checkpoint_every=2", "run.keep_checkpoints=2")
    train_vae(config)
    newest = sorted((tmp_path / "checkpoints").iterdir())[-1]
    newest.rename(tmp_path / "aside")
    (tmp_path / "log.jsonl").unlink()
    train_vae(config)
    names = ("loss", "judge_loss", "judge_gradient_norm")
    again = [[row[name] for name in names] for row in logged(tmp_path)]
    assert again == [[row[name] for name in names] for row in logged(judged)[2:]]
    for name, value in weights(judged).items():
        assert torch.equal(weights(tmp_path)[name], value), name


def test_a_checkpoint_of_a_judged_run_is_exported(judged: Path) -> None:
    config = judged_run(judged, "run.steps=4")
    (place,) = (judged / "checkpoints").iterdir()
    folder = export_vae_checkpoint(config, place)
    exported = load_file(folder / "vae" / "diffusion_pytorch_model.safetensors")
    for name, value in weights(judged).items():
        assert torch.equal(exported[name], value), name


def test_a_judge_alone_at_first_leaves_the_vae_as_without_one(tmp_path: Path) -> None:
    first = judged_run(tmp_path / "judged", "run.steps=1", "adversary.judge_first=1")
    run, plain = VaeRun.of(first), VaeRun.of(replace(first, adversary=None))
    for each in (run, plain):
        each.pool.fill(2)
    train_step(run, 0, 1e-3), train_step(plain, 0, 1e-3)
    for name, value in plain.vae.named_parameters():
        assert_close(run.vae.get_parameter(name), value, rtol=1e-5, atol=1e-6)


def test_a_judge_works_in_fp32_beside_a_vae_in_bf16(tmp_path: Path) -> None:
    """Its slope is a difference of verdicts that bf16 cannot tell."""
    run = VaeRun.of(judged_run(tmp_path, "run.steps=1", "vae.precision=bf16", "adversary.judge_first=0"))
    assert run.judge is not None
    made_of: set[torch.dtype] = set()
    run.judge.last.register_forward_hook(lambda _, inputs, verdict: made_of.update({inputs[0].dtype, verdict.dtype}))
    run.pool.fill(2)
    numbers, _ = train_step(run, 0, 1e-3)
    assert made_of == {torch.float32}
    assert numbers["judge_loss"] < 2.0
