"""`merope drive`: from files to a video that grows, stopped in every way and gone on with."""

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from generate_files import path_of
from latent_folder import write_latent_model
from PIL import Image
from safetensors.torch import load_file
from scenes import curved_drive
from tiny_pipelines import HEIGHT, LENS, WIDTH, video

from merope import formats
from merope.cli import main
from merope.demo.drive import loaded
from merope.formats.growing_video import append_frames, fragment_ends
from merope.formats.key_strings import poses_from_keys
from merope.formats.video import read_first_frames, read_video, write_video
from merope.generate.camera_path import lens_of_fov
from merope.generate.drive_folder import LOCK
from merope.generate.frame_coding import streamed_vae_dtype
from merope.generate.stream import CameraStream
from merope.generate.stream_file import FILE as STATE
from merope.geometry.lenses import Pinhole

FILES = {"video.mp4", "video.cameras.json", "path.json", "report.json", "stream.safetensors", LOCK}
FRAMES = 25  # 9 of the first block, 12 of the second, 4 of the third


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a branch, a path with a lens, and a video with its cameras."""
    root = tmp_path_factory.mktemp("drive")
    write_latent_model(root / "model")
    formats.write(path_of(curved_drive(24, step_m=0.4), rate_hz=12.0, lens=LENS), root / "bend.json")
    formats.write(path_of(curved_drive(3, step_m=0.4), rate_hz=12.0, lens=LENS), root / "three.json")
    formats.write(path_of(curved_drive(1), lens=LENS), root / "one.json")
    write_video(video(12), root / "street.mp4", 12.0)
    return root


def arguments(files: Path, out: Path, **changes: object) -> list[str]:
    """The command line of a drive of three blocks; None leaves an option out."""
    options = {"model": files / "model", "branch": files / "model" / "branch", "keys": "w*14 a*10", "fov": 70.0}
    line = ["drive", "--out", str(out)]
    for name, value in {**options, "size": (HEIGHT, WIDTH), "fps": 12.0, "steps": 1, **changes}.items():
        if value is not None:
            values = value if isinstance(value, tuple) else () if value is True else (value,)
            line += [f"--{name.replace('_', '-')}", *map(str, values)]
    return line


@pytest.fixture(scope="module", autouse=True)
def written() -> Iterator[dict[Path, dict[int, torch.Tensor]]]:
    """Frames by video and by the index of the first of them, before the codec changes them."""
    frames: dict[Path, dict[int, torch.Tensor]] = {}

    def spy(path: Path, block: torch.Tensor, first: int, fps: float) -> None:
        frames.setdefault(path, {})[first] = block
        append_frames(path, block, first, fps)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("merope.generate.drive_folder.append_frames", spy)
        yield frames


def all_frames(written: dict[Path, dict[int, torch.Tensor]], folder: Path) -> torch.Tensor:  # uint8 [T, H, W, 3]
    return torch.cat([block for _, block in sorted(written[folder / "video.mp4"].items())])


@pytest.fixture(scope="module")
def whole(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The drive that nothing stopped."""
    out = tmp_path_factory.mktemp("whole") / "drive"
    assert main(arguments(files, out)) == 0
    return out


@pytest.mark.parametrize("place", ["model_index.json", "branch/config.json"])
def test_blocks_are_those_that_the_model_was_trained_to_make(files: Path, tmp_path: Path, place: str) -> None:
    shutil.copytree(files / "model", tmp_path / "model")
    config = json.loads((tmp_path / "model" / place).read_text())
    (tmp_path / "model" / place).write_text(json.dumps(config | {"causal_block_frames": 2}))
    out, model = tmp_path / "drive", tmp_path / "model"
    assert main(arguments(files, out, model=model, branch=model / "branch", window=4, sink=2)) == 0
    report = json.loads((out / "report.json").read_text())
    assert [block["frames"] for block in report["blocks"]] == [5, 8, 8, 4]


def press_ctrl_c() -> None:
    """As Python answers the signal. The signal itself is ignored where a shell runs the tests in the background."""
    signal.default_int_handler(signal.SIGINT, None)


def stop_in_block(number: int, stop: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Call `stop` while a block is denoised."""
    denoised = CameraStream._velocity

    def velocity(self: CameraStream, *args: object) -> torch.Tensor:
        if self.blocks == number:
            stop()
        return denoised(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(CameraStream, "_velocity", velocity)


def test_keys_become_what_the_stream_gives_for_their_cameras(
    files: Path, whole: Path, written: dict[Path, dict[int, torch.Tensor]]
) -> None:
    assert {path.name for path in whole.iterdir()} == FILES
    poses = poses_from_keys("w*14 a*10", 12.0)
    cameras = formats.read(whole / "video.cameras.json")
    torch.testing.assert_close(cameras.world_from_camera, poses)
    poses = formats.read(whole / "path.json").world_from_camera  # to the last bit what was driven
    pipe, lens = loaded(files / "model", torch.device("cpu")), lens_of_fov(70.0, 0.0, WIDTH, HEIGHT)
    pipe.vae.to(streamed_vae_dtype("cpu"))
    stream = pipe.stream(lens=lens, height=HEIGHT, width=WIDTH, num_inference_steps=1, guidance_scale=1.0)
    held = torch.cat((poses, poses[-1:].expand(8, 4, 4)))
    while stream.frames < FRAMES:
        first = stream.frames
        made = stream.drive(held[first : first + stream.block_frames])
        difference = made[: FRAMES - first].int() - written[whole / "video.mp4"][first].int()
        assert difference.abs().max() <= 1
    assert read_first_frames(whole / "video.mp4", 1)[1] == FRAMES
    report = json.loads((whole / "report.json").read_text())
    assert [block["frames"] for block in report["blocks"]] == [9, 12, 4]
    assert min(block["seconds"] for block in report["blocks"]) > 0
    assert set(report["wall_s"]) == {"load", "drive", "keep"}


@pytest.mark.parametrize("block", [0, 2])
def test_after_ctrl_c_it_plays_and_goes_on_exactly(
    block: int,
    files: Path,
    whole: Path,
    tmp_path: Path,
    written: dict[Path, dict[int, torch.Tensor]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with monkeypatch.context() as patched:
        stop_in_block(block, press_ctrl_c, patched)
        assert main(arguments(files, tmp_path)) == 130
    assert "stopped; finished blocks are kept, --resume goes on" in capsys.readouterr().err
    if block:
        assert read_first_frames(tmp_path / "video.mp4", 1)[1] == 21
        assert formats.read(tmp_path / "video.cameras.json").count == 21
    report = json.loads((tmp_path / "report.json").read_text())
    before = {"load": 100.0, "drive": 200.0, "keep": 300.0}
    (tmp_path / "report.json").write_text(json.dumps(report | {"wall_s": before}))
    assert main(["drive", "--out", str(tmp_path), "--resume"]) == 0
    wall_s = json.loads((tmp_path / "report.json").read_text())["wall_s"]
    assert all(before[name] < wall_s[name] < before[name] + 99 for name in before)  # of both runs
    assert (all_frames(written, tmp_path).int() - all_frames(written, whole).int()).abs().max() <= 1
    torch.testing.assert_close(load_file(tmp_path / STATE), load_file(whole / STATE))
    assert (tmp_path / "video.cameras.json").read_bytes() == (whole / "video.cameras.json").read_bytes()
    assert [row["frames"] for row in json.loads((tmp_path / "report.json").read_text())["blocks"]] == [9, 12, 4]
    (tmp_path / "video.cameras.json").unlink()  # as where it was killed between its last block and these
    assert main(["drive", "--out", str(tmp_path), "--resume"]) == 0
    assert "is driven to its end already" in capsys.readouterr().err
    assert (tmp_path / "video.cameras.json").read_bytes() == (whole / "video.cameras.json").read_bytes()
    assert json.loads((tmp_path / "report.json").read_text())["wall_s"] == wall_s


def test_kill_loses_one_block_at_most(
    files: Path,
    whole: Path,
    tmp_path: Path,
    written: dict[Path, dict[int, torch.Tensor]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    save = CameraStream.save

    def killed(self: CameraStream, folder: Path) -> Path:
        if self.blocks == 2:  # its frames are in the video, its state is not on disk
            os.kill(os.getpid(), signal.SIGKILL)
        return save(self, folder)

    with monkeypatch.context() as patched:
        patched.setattr(CameraStream, "save", killed)
        child = get_context("fork").Process(target=main, args=(arguments(files, tmp_path),))  # with the same sums
        child.start()
        child.join(timeout=120)
    assert child.exitcode == -signal.SIGKILL
    assert read_first_frames(tmp_path / "video.mp4", 1)[1] == 21
    with (tmp_path / "video.mp4").open("ab") as file:  # a third fragment that was cut off
        file.write((whole / "video.mp4").read_bytes()[fragment_ends(whole / "video.mp4")[1] :][:-5])
    assert main(arguments(files, tmp_path, resume=True)) == 0  # the same words once more
    assert read_first_frames(tmp_path / "video.mp4", 1)[1] == FRAMES
    torch.testing.assert_close(load_file(tmp_path / STATE), load_file(whole / STATE))
    assert (all_frames(written, tmp_path).int() - all_frames(written, whole)[9:].int()).abs().max() <= 1


def test_a_drive_that_was_stopped_before_its_first_state_is_to_be_deleted(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "report.json").write_text("{}")
    assert main(arguments(files, tmp_path)) == 2
    assert "with report.json; delete what is in it, or choose another folder" in capsys.readouterr().err


def test_a_pose_file_begins_with_the_cameras_of_the_prefix(files: Path, tmp_path: Path) -> None:
    options = {"keys": None, "trajectory": files / "bend.json", "fov": None, "prefix": files / "street.mp4"}
    assert main(arguments(files, tmp_path / "a", **options)) == 0
    cameras = formats.read(tmp_path / "a" / "video.cameras.json")
    given = formats.read(files / "bend.json")
    torch.testing.assert_close(cameras.world_from_camera, given.world_from_camera)
    append_frames(tmp_path / "prefix.mp4", read_video(files / "street.mp4", list(range(9)), HEIGHT, WIDTH), 0, 12.0)
    begins = (tmp_path / "prefix.mp4").read_bytes()
    made = (tmp_path / "a" / "video.mp4").read_bytes()
    assert made.startswith(begins)
    assert [row["frames"] for row in json.loads((tmp_path / "a" / "report.json").read_text())["blocks"]] == [12, 3]


def test_keys_go_on_from_the_last_camera_of_a_folder_of_images(files: Path, tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    for k, frame in enumerate(video(9)):
        Image.fromarray(frame.numpy()).save(tmp_path / "images" / f"{k:03}.png")
    options = {"prefix": tmp_path / "images", "prefix_poses": files / "bend.json", "keys": "w*12"}
    assert main(arguments(files, tmp_path / "out", fov=None, **options)) == 0
    cameras = formats.read(tmp_path / "out" / "video.cameras.json")
    before = formats.read(files / "bend.json").world_from_camera[:9]
    after = before[-1] @ poses_from_keys("w*12", 12.0)[1:]
    torch.testing.assert_close(cameras.world_from_camera, torch.cat((before, after)))
    assert isinstance(cameras.lens, Pinhole)
    assert torch.equal(cameras.lens.fx, LENS.fx)


def test_a_street_of_the_world(files: Path, tmp_path: Path) -> None:
    """Size, rate and steps are those of the model's clips."""
    line = ["drive", "--model", str(files / "model"), "--world", "4", "--out", str(tmp_path)]
    assert main([*line, "--keys", "w*12"]) == 0
    frames, count = read_first_frames(tmp_path / "video.mp4", 9)
    assert count == 21
    assert frames.float().std() > 10
    assert json.loads((tmp_path / "report.json").read_text())["fps"] == 16.0


def test_size_and_rate_are_those_of_the_models_clips(files: Path, tmp_path: Path) -> None:
    clips = json.loads((files / "model" / "clips.json").read_text())
    assert main(arguments(files, tmp_path, keys="w*11", size=None, fps=None)) == 0
    frames, _ = read_first_frames(tmp_path / "video.mp4", 1)
    assert list(frames.shape[1:3]) == [clips["height"], clips["width"]] != [288, 512]
    assert json.loads((tmp_path / "report.json").read_text())["fps"] == clips["frame_rate_hz"] != 12.0


def test_a_model_without_a_branch_and_a_jump(files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A jump of 50 m is said, and driven if it is meant."""
    poses = curved_drive(9, step_m=0.4)
    poses[5:, 2, 3] += 50.0
    formats.write(path_of(poses, lens=LENS), tmp_path / "jump.json")
    options = {"branch": "none", "keys": None, "trajectory": tmp_path / "jump.json", "fov": None}
    assert main(arguments(files, tmp_path / "out", **options)) == 0
    assert "1 jumps in position or orientation, between frames 4→5" in capsys.readouterr().err


def bad_poses(folder: Path) -> Path:
    document = json.loads((folder / "bend.json").read_text())
    document["frames"][3]["world_from_camera"][0][3] = float("nan")
    (folder / "nan.json").write_text(json.dumps(document))
    return folder / "nan.json"


def test_a_place_is_recalled_and_the_past_is_noisy_also_after_a_stop(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward and back again, with a window that forgets the way there."""
    recalled: list[tuple[int, ...]] = []
    driven = CameraStream.drive

    def drive(self: CameraStream, *args: object, **options: object) -> torch.Tensor:
        assert self.settings.past_noise == 0.2
        frames = driven(self, *args, **options)  # type: ignore[arg-type]
        recalled.append(self.recalled)
        return frames

    monkeypatch.setattr(CameraStream, "drive", drive)
    back = {"keys": "w*40 s*40", "window": 3, "sink": 0, "recall": 3, "past_noise": 0.2}
    with monkeypatch.context() as patched:
        stop_in_block(4, press_ctrl_c, patched)
        assert main(arguments(files, tmp_path, **back)) == 130
    assert main(arguments(files, tmp_path, resume=True, **back)) == 0
    assert len(recalled) == 7
    assert recalled[0] == ()
    assert all(recalled[-2:])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"keys": "w*4 q*3"}, "keys must be w, a, s, d or a full stop"),
        ({"keys": None}, "--trajectory or --keys must be given, one of them, got none"),
        ({"keys": None, "trajectory": "nan.json"}, "frames[3].world_from_camera"),
        ({"keys": None, "trajectory": "gone.json"}, "--trajectory must be a file or folder that exists"),
        ({"fps": 0.0}, "fps must be positive"),
        ({"fps": 24.0, "prefix": "street.mp4", "prefix_poses": "bend.json"}, "at least 24 frames per second"),
        ({"fov": None}, "pass --fov DEGREES"),
        ({"window": 2}, "window"),
        ({"recall": 4}, "recall must be an int from 0 to 3"),
        ({"recall": 3, "branch": "none"}, "--recall must be used with a camera branch"),
        ({"past_noise": 1.0}, "past_noise must be a noise level from 0 to below 1"),
        ({"seed": -1}, "--seed must be at least 0"),
        ({"prefix": "street.mp4"}, "--prefix-poses must be given for keys after a prefix"),
        ({"prefix": "street.mp4", "prefix_poses": "bend.json", "fps": 1.0}, "street.mp4 must be at least 97 frames"),
        ({"prefix_poses": "bend.json"}, "--prefix-poses must be used with --prefix"),
        ({"prefix": "street.mp4", "prefix_poses": "bend.json", "prefix_frames": 10}, "prefix must be 9, 21, 33, …"),
        ({"prefix": "street.mp4", "prefix_poses": "bend.json", "prefix_frames": 0}, "--prefix-frames must be at least"),
        ({"prefix": "model", "prefix_poses": "bend.json", "prefix_frames": 0}, "--prefix-frames must be at least 1"),
        ({"world": 4, "keys": None, "trajectory": "bend.json", "prefix_frames": 0}, "--prefix-frames must be at least"),
        ({"world": 4, "keys": None, "trajectory": "one.json"}, "more than the 9 frames of the prefix, got 1 at 12 fps"),
        ({"keys": None, "trajectory": "bend.json", "prefix_poses": "bend.json"}, "must be used with --keys"),
        ({"model": "model/vae"}, "model must be a folder with model_index.json"),
        ({"model": None}, "--model must be given"),
        ({"prompt": "a street"}, "--prompt must be left out"),
        ({"world": 10**6}, "--world must be from 0 to"),
        ({"world": 4, "keys": None, "trajectory": "three.json"}, "--trajectory must be of more than the 9 frames"),
        ({"resume": True}, "--resume must be used with the folder of a drive"),
    ],
)
def test_bad_input_is_refused_before_weights_are_read(
    files: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, object],
    message: str,
) -> None:
    bad_poses(files)
    monkeypatch.setattr("merope.generate.drive_command.load_pipeline", pytest.fail)
    named = ("trajectory", "prefix", "prefix_poses", "model")
    given = {name: files / value if name in named and value else value for name, value in changes.items()}
    assert main(arguments(files, tmp_path / "out", **given)) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_folder_in_use_or_with_a_drive_is_left_alone(
    files: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(files, whole)) == 2
    assert "add --resume to go on with that drive" in capsys.readouterr().err
    with FileLock(tmp_path / LOCK):
        assert main(arguments(files, tmp_path)) == 2
    assert "--out must be a folder that no other drive uses" in capsys.readouterr().err
    assert main(arguments(files, whole, resume=True, window=6)) == 2
    assert "--window must be 12 as when the drive began, got 6" in capsys.readouterr().err


def test_a_video_that_was_changed_is_not_gone_on_with(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stop_in_block(1, press_ctrl_c, monkeypatch)
    assert main(arguments(files, tmp_path)) == 130
    (tmp_path / "video.mp4").write_bytes(b"")
    assert main(["drive", "--out", str(tmp_path), "--resume"]) == 2
    assert "must be the drive's video of 1 parts, got 0" in capsys.readouterr().err
