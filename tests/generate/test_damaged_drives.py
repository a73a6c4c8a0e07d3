"""Damaged files of streams and drives: each is refused in one line that names it, and the video stays as it is."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from latent_folder import write_latent_model
from safetensors import safe_open
from safetensors.torch import save_file
from tiny_pipelines import HEIGHT, WIDTH
from torch import Tensor

from merope.cli import main
from merope.generate.camera_video import CameraVideoPipeline
from merope.generate.stream import CameraStream
from merope.generate.stream_file import FILE
from tests.generate.tiny_streams import begun, model, next_poses

Parts = tuple[dict[str, Any], dict[str, Tensor]]
KEYS, PAST = "keys.0.1.base.0", "vae.decoder.conv_in"


@pytest.fixture(scope="module")
def pipe() -> CameraVideoPipeline:
    return model()


@pytest.fixture(scope="module")
def saved(pipe: CameraVideoPipeline, tmp_path_factory: pytest.TempPathFactory) -> Path:
    stream, folder = begun(pipe, remember=6), tmp_path_factory.mktemp("saved")
    stream.drive(next_poses(stream))
    return stream.save(folder)


def parts(file: Path) -> Parts:
    with safe_open(file, "pt") as stored:
        return json.loads(stored.metadata()["about"]), {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118


def refused(pipe: CameraVideoPipeline, file: Path) -> None:
    with pytest.raises(
        ValueError, match=f"{file} must be a whole stream as stream.save writes it, got .*; put it back"
    ):
        pipe.resume_stream(file.parent)


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: b"",
        lambda raw: raw[:-100],
        lambda raw: raw[:50],
        lambda raw: (2**62).to_bytes(8, "little") + b"{}",
        *(
            lambda raw, about=about: (
                len(head := json.dumps({"__metadata__": {"about": about}}).encode()).to_bytes(8, "little") + head
            )
            for about in ("[" * 100_000, "[]", "{", "3", "{}")
        ),
        lambda raw: (2).to_bytes(8, "little") + b"{}",
    ],
)
def test_bytes_that_are_no_stream(
    pipe: CameraVideoPipeline, saved: Path, tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    (tmp_path / FILE).write_bytes(damage(saved.read_bytes()))
    refused(pipe, tmp_path / FILE)


@pytest.mark.parametrize("value", [None, -5, 1.5, "x", 10**9 + 1])
@pytest.mark.parametrize("name", ["count", "frames", "blocks", "settings", "made_with", "cameras", "past"])
def test_words_of_another_kind(
    pipe: CameraVideoPipeline, saved: Path, tmp_path: Path, name: str, value: object
) -> None:
    about, tensors = parts(saved)
    save_file(tensors, tmp_path / FILE, {"about": json.dumps(about | {name: value})})
    refused(pipe, tmp_path / FILE)


@pytest.mark.parametrize(
    ("group", "name", "value"),
    [
        *((None, "frames", value) for value in (0, 5, 10**9)),
        *(("settings", name, "1") for name in ("height", "window", "block", "steps", "guidance", "seed", "past_noise")),
        *(("settings", "steps", value) for value in (0, -1, True, 2.0, 10**9)),
        ("settings", "height", 10**6),
        ("settings", "guidance", 2.0),
        ("settings", "another", 1),
        ("lens", "model", "X"),
        ("lens", "parameters", ["zz"]),
        ("cameras", "dtype", "torch.float16"),
        ("past", "first", [0, 4]),
    ],
)
def test_words_that_do_not_go_together(
    pipe: CameraVideoPipeline, saved: Path, tmp_path: Path, group: str | None, name: str, value: object
) -> None:
    about, tensors = parts(saved)
    (about if group is None else about[group])[name] = value
    save_file(tensors, tmp_path / FILE, {"about": json.dumps(about)})
    refused(pipe, tmp_path / FILE)


@pytest.mark.parametrize("damage", ["gone", "flat", "integers", "nan"])
@pytest.mark.parametrize(
    "name", [KEYS, "values.0.5.camera.1", "text.0", PAST, "latents", "past.latents", "cameras.world_from_camera"]
)
def test_tensors_of_another_kind(
    pipe: CameraVideoPipeline, saved: Path, tmp_path: Path, name: str, damage: str
) -> None:
    about, tensors = parts(saved)
    value = tensors.pop(name)
    changed = {"flat": value.flatten(), "integers": value.to(torch.int32), "nan": torch.full_like(value, math.nan)}
    tensors |= {} if damage == "gone" else {name: changed[damage]}
    save_file(tensors, tmp_path / FILE, {"about": json.dumps(about)})
    refused(pipe, tmp_path / FILE)


@pytest.mark.parametrize("name", [KEYS, PAST, "text.0"])
def test_one_tensor_of_another_precision(pipe: CameraVideoPipeline, saved: Path, tmp_path: Path, name: str) -> None:
    about, tensors = parts(saved)
    save_file(tensors | {name: tensors[name].half()}, tmp_path / FILE, {"about": json.dumps(about)})
    refused(pipe, tmp_path / FILE)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drive that ended after the first of its three blocks."""
    root = tmp_path_factory.mktemp("drive")
    write_latent_model(root / "model")

    def velocity(self: CameraStream, *args: object) -> Tensor:
        if self.blocks == 1:
            raise KeyboardInterrupt
        return driven(self, *args)  # type: ignore[arg-type]

    driven = CameraStream._velocity
    model = ["--model", str(root / "model"), "--branch", str(root / "model" / "branch"), "--steps", "1"]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(CameraStream, "_velocity", velocity)
        line = ["drive", *model, "--keys", "w*24", "--fov", "70", "--size", str(HEIGHT), str(WIDTH)]
        assert main([*line, "--out", str(root / "out")]) == 130
    return root / "out"


def not_resumed(folder: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = (folder / "video.mp4").read_bytes()
    capsys.readouterr()
    assert main(["drive", "--resume", "--out", str(folder)]) == 2
    said = capsys.readouterr().err
    assert str(folder / name) in said
    assert "put it back as" in said
    assert (folder / "video.mp4").read_bytes() == before


@pytest.mark.parametrize(
    "changes",
    [
        "",
        "[" * 100_000,
        "[]",
        "{}",
        {"blocks": None},
        {"blocks": []},
        {"blocks": ["x"]},
        {"blocks": {"frames": 9}},
        *({"blocks": [{"frames": frames}]} for frames in (-3, 0, 8, 10**9, "9", 9.0)),
        *({"prefix_frames": frames} for frames in ("9", -1, None, 1.5)),
        *({"fps": fps} for fps in (math.nan, "x", -1)),
        *({"wall_s": wall_s} for wall_s in (None, 3, {"load": None}, {"drive": "x"}, {"keep": math.nan}, {"keep": -1})),
        *({"command": command} for command in ("x", [], {}, None)),
    ],
)
def test_reports_that_are_damaged(
    stopped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: str | dict[str, object]
) -> None:
    folder = Path(shutil.copytree(stopped, tmp_path / "out"))
    report = json.loads((folder / "report.json").read_text())
    (folder / "report.json").write_text(changes if isinstance(changes, str) else json.dumps(report | changes))
    not_resumed(folder, "report.json", capsys)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, "x") for name in ("world", "steps", "dtype", "size", "window", "assume_metric", "trajectory_option")),
        *((name, None) for name in ("model", "branch", "window", "seed")),
        *((name, 5) for name in ("model", "keys", "lens", "prompt", "size", "trajectory_option")),
        ("size", [HEIGHT]),
        ("window", True),
        ("trajectory_option", [["camera"]]),
    ],
)
def test_commands_that_nobody_gave(
    stopped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, value: object
) -> None:
    folder = Path(shutil.copytree(stopped, tmp_path / "out"))
    report = json.loads((folder / "report.json").read_text())
    report["command"][name] = value
    (folder / "report.json").write_text(json.dumps(report))
    not_resumed(folder, "report.json", capsys)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"blocks": 0}, "report.json"),
        ({"count": 30, "frames": 12}, FILE),
        ({"window": 13}, FILE),
        ({"steps": 10**9}, FILE),
        ({"blocks": -1}, FILE),
    ],
)
def test_states_of_another_drive(
    stopped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, int], named: str
) -> None:
    folder = Path(shutil.copytree(stopped, tmp_path / "out"))
    about, tensors = parts(folder / FILE)
    for name, value in changes.items():
        (about if name in about else about["settings"])[name] = value
    save_file(tensors, folder / FILE, {"about": json.dumps(about)})
    not_resumed(folder, named, capsys)
