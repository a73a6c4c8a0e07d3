"""The demo from the command line, with a small untrained model of the shipped one's kind: files, numbers, refusals."""

import json
import shutil
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from scenes import straight_drive
from selenium import webdriver

import merope.demo.drive
from merope import formats
from merope.cli import main
from merope.demo.drive import SHIPPED_MODEL, DemoConfig, Drive, generated, loaded, measured, run, table
from merope.demo.pictures import Film, film_frames
from merope.evaluate.discover import read_commanded
from merope.formats.trajectory import Trajectory
from merope.formats.video import read_image, read_video
from merope.geometry.lenses import UnifiedCamera
from merope.train.config import TrainConfig
from merope.train.export import export
from merope.train.model import build_model
from merope.train.toml_config import read_config
from merope.world.clips import WorldClips
from merope.world.clips_file import read_clips, write_clips
from merope.world.commanded import MANOEUVRES, WorldTest, clips_of_world
from tests.evaluate.test_report_browser import browser, select  # noqa: F401

CONFIGS = Path(__file__).parents[2] / "configs"
SHIPPED_CONFIG, PIXEL_CONFIG = CONFIGS / "miniature.toml", CONFIGS / "world" / "merope.toml"
SMALL = (
    "model.architecture.num_attention_heads=1",
    "model.architecture.attention_head_dim=48",
    "model.architecture.ffn_dim=32",
    "model.architecture.num_layers=2",
    "branch.encoding_options={partition=[12,12,12,12], native_split=[4,4,4], fractions=[0.0,1.0]}",
)
FILM_SIZE = (28 + 4 * 72, 2 * 4 * 128 + 4 * 72 + 2 * 8)
CPU = torch.device("cpu")
TRAINED = WorldClips()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline folder as training writes it, with few and random weights."""
    folder = tmp_path_factory.mktemp("model")
    config = read_config(TrainConfig, PIXEL_CONFIG, SMALL)
    export(build_model(config, CPU, sharded=False), config, {}, folder)
    return folder


@pytest.fixture(scope="module")
def drives(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Drive]]:
    """The three paths, and the folder that holds what was written about them."""
    out = tmp_path_factory.mktemp("demo") / "new" / "folder"
    return out, run(DemoConfig(out=out, model=model, world=7, steps=1, device="cpu"))


def test_every_file_is_there_and_nothing_else(drives: tuple[Path, list[Drive]]) -> None:
    expected = {"demo.mp4", "demo.webp", "poster.png", "report.html", "results.json"}
    expected |= {f"{name}.mp4" for name in MANOEUVRES}
    expected |= {f"clips/{name}{suffix}" for name in MANOEUVRES for suffix in (".mp4", ".cameras.json")}
    assert {str(file.relative_to(drives[0])) for file in drives[0].rglob("*") if file.is_file()} == expected


def test_its_report_plays_the_bare_clips(drives: tuple[Path, list[Drive]]) -> None:
    page = (drives[0] / "report.html").read_text()
    assert {f'src="clips/{name}.mp4"' in page for name in MANOEUVRES} == {True}


def test_its_bare_clips_can_be_evaluated(drives: tuple[Path, list[Drive]]) -> None:
    commanded = read_commanded(drives[0] / "clips")
    assert [str(one.clip) for one in commanded] == sorted(MANOEUVRES)
    for drive in drives[1]:
        made = read_video(drives[0] / "clips" / f"{drive.name}.mp4", list(range(TRAINED.prefix_frames)), 72, 128)
        assert (made.float() - drive.video[: len(made)].float()).abs().mean() < 4.0  # of 255: what the codec loses


def test_videos_have_the_frames_and_panels_of_the_clips(drives: tuple[Path, list[Drive]]) -> None:
    import av

    heights = dict.fromkeys(MANOEUVRES, FILM_SIZE[0]) | {"demo": 3 * FILM_SIZE[0]}
    for name, height in heights.items():
        with av.open(str(drives[0] / f"{name}.mp4")) as container:
            stream = container.streams.video[0]
            assert (stream.height, stream.width, float(stream.average_rate)) == (height, FILM_SIZE[1], 4.0)
            assert sum(1 for _ in container.decode(video=0)) == 13
    left = drives[1][1]
    frame = read_video(drives[0] / "left.mp4", [12], *FILM_SIZE)[0].float()
    true = frame[28:, :512].unflatten(0, (72, 4)).unflatten(2, (128, 4)).mean(dim=(1, 3))
    assert (true - left.clip.true[12].float()).abs().mean() < 4  # Lanczos and H.264


def test_the_picture_shows_every_path(drives: tuple[Path, list[Drive]]) -> None:
    sheet = read_image(drives[0] / "poster.png", 1000, 1346)
    rows = [sheet[60 + k * 330 : 190 + k * 330, 790:1040].float() for k in range(3)]  # the last true frames
    assert all((a - b).abs().mean() > 10 for a, b in zip(rows, [*rows[1:], rows[0]], strict=True))


def test_results_are_those_of_the_table(drives: tuple[Path, list[Drive]]) -> None:
    document = json.loads((drives[0] / "results.json").read_text())
    assert list(document["paths"]) == list(MANOEUVRES)
    assert document["settings"]["world"] == 7
    for drive in drives[1]:
        numbers = document["paths"][drive.name]
        assert numbers["psnr_db"] == pytest.approx(drive.psnr_db)
        assert numbers["frames_without_pose"] == 13 - drive.metrics.valid_frames
        assert numbers["floor"]["rot_deg"] < 0.3
        assert numbers["floor"]["metric_tr_percent"] < 1
    rows = table(drives[1]).splitlines()[3:6]
    assert [row.split()[0] for row in rows] == list(MANOEUVRES)


def test_the_page_opens_and_shows_every_path(
    drives: tuple[Path, list[Drive]],
    browser: webdriver.Chrome,  # noqa: F811
) -> None:
    browser.get((drives[0] / "report.html").as_uri())
    assert {body.get_attribute("data-manoeuvre") for body in select(browser, "tbody.clip")} == set(MANOEUVRES)
    browser.execute_script("document.querySelectorAll('button.open').forEach((button) => button.click())")
    assert len(select(browser, "svg.birdseye")) == 3
    assert len(select(browser, "tr.detail img")) == 3 * 4
    assert [line for line in browser.get_log("browser") if line["level"] in ("SEVERE", "WARNING")] == []
    loaded_from = browser.execute_script("return performance.getEntriesByType('resource').map((entry) => entry.name)")
    assert [url for url in loaded_from if not url.startswith(("data:", "file:"))] == []


def test_the_prefix_is_kept_and_the_rest_is_generated(drives: tuple[Path, list[Drive]]) -> None:
    original, left, _ = drives[1]
    assert torch.equal(original.video[:3], original.clip.true[:3])
    assert torch.equal(left.video[:3], original.video[:3])
    assert not torch.equal(left.video[3:], left.clip.true[3:])


def test_a_clip_that_obeys_is_measured_so_and_one_that_does_not_is_not(
    drives: tuple[Path, list[Drive]], monkeypatch: pytest.MonkeyPatch
) -> None:
    original, left = (drive.clip for drive in drives[1][:2])
    monkeypatch.setattr(merope.demo.drive, "score_floor", lambda *_: drives[1][1].floor)
    good, bad = measured(left, left.true, TRAINED), measured(left, original.true, TRAINED)
    assert good.metrics.rot_deg < 0.01
    assert good.metrics.metric_tr_percent is not None
    assert good.metrics.metric_tr_percent < 0.01
    assert good.record.problems == ()
    assert not bad.metrics.rot_deg < 5
    noise = torch.randint(0, 255, left.true.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    lost = measured(left, torch.cat((left.true[:3], noise[3:])), TRAINED)
    assert lost.metrics.valid_frames == 0  # the prefix alone is nothing
    assert [problem.kind for problem in lost.record.problems] == ["recovery failed"]
    assert table([lost]).splitlines()[3].split()[:4] == ["left", "–", "–", "–"]
    reason = "frames of 72×128 are too small for it, or the model is too little trained"
    assert table([lost]).splitlines()[5] == f"Too few frames have a pose to measure a path: {reason}."
    assert "too few" not in table([lost, good]).lower()


def test_the_command_and_the_seed_decide(model: Path, drives: tuple[Path, list[Drive]]) -> None:
    pipeline = loaded(model, CPU)
    for parameter in pipeline.transformer.parameters():  # branches start at zero, which no camera can move
        torch.nn.init.normal_(parameter, std=0.2, generator=torch.Generator().manual_seed(parameter.numel()))
    original, left = (drive.clip for drive in drives[1][:2])
    config = DemoConfig(out=Path("unused"), model=model, steps=1)
    first, again, other_path = (generated(pipeline, clip, config, "1 of 1") for clip in (original, original, left))
    other_seed = generated(pipeline, original, replace(config, seed=1), "1 of 1")
    assert torch.equal(first, again)
    assert not torch.equal(first, other_path)
    assert not torch.equal(first, other_seed)


def test_written_cameras_can_be_driven_again(
    drives: tuple[Path, list[Drive]], model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = drives[0] / "clips" / "right.cameras.json"
    arguments = ["demo", "--model", str(model), "--steps", "1", "--trajectory", str(file), "--lens", "fisheye"]
    assert main([*arguments, "--out", str(tmp_path)]) == 0
    assert {"trajectory.mp4", "demo.mp4", "report.html"} <= {file.name for file in tmp_path.iterdir()}
    shown = capsys.readouterr()
    assert shown.out.splitlines()[3].startswith("trajectory")
    assert "driving trajectory (1 of 1): step 1 of 1" in shown.err
    again, before = formats.read(tmp_path / "clips" / "trajectory.cameras.json"), formats.read(file)
    assert isinstance(again.lens, UnifiedCamera)
    assert (again.world_from_camera - before.world_from_camera).abs().max() < 1e-9


def test_ctrl_c_leaves_nothing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(merope.demo.drive, "clips_of_world", interrupted)
    assert main(["demo", "--model", str(model), "--out", str(tmp_path / "out")]) == 130
    assert "nothing was written" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_an_interruption_while_writing_leaves_no_half(
    model: Path, drives: tuple[Path, list[Drive]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(merope.demo.drive, "write_report", interrupted)
    with pytest.raises(KeyboardInterrupt):
        merope.demo.drive.write(DemoConfig(out=tmp_path / "out", model=model), drives[1][:1], [], {})
    assert list((tmp_path / "out").iterdir()) == []


def test_only_recovered_frames_are_drawn() -> None:
    valid = torch.tensor([True, True, False, True])
    path, video = straight_drive(4), torch.zeros(4, 36, 64, 3, dtype=torch.uint8)
    film = Film("left", video, video, path, path, valid, 1, 4.0)
    assert [len(film.paths(t)["recovered"]) for t in range(4)] == [1, 2, 2, 3]
    assert ["no pose" in film.above_caption(t) for t in range(4)] == [False, False, True, False]
    assert "recovered" not in replace(film, valid=~torch.ones(4, dtype=torch.bool)).paths(3)
    assert film_frames(film).shape == (4, 28 + 288, 2 * 512 + 288 + 16, 3)


def refusals(model: Path, scratch: Path) -> Mapping[str, tuple[list[str], str]]:
    """Bad command lines, and what the message must say."""
    formats.write(Trajectory(straight_drive(12), True, "test"), scratch / "short.json")
    formats.write(Trajectory(straight_drive(13), False, "test"), scratch / "unit.json")
    down = straight_drive(13)
    down[:, 1, 3] = torch.linspace(0, 3, 13)
    formats.write(Trajectory(down, True, "test"), scratch / "down.json")
    (scratch / "words.txt").write_text("not a path\n")
    shutil.copytree(model / "transformer", scratch / "no_branch" / "transformer")
    shutil.copy(model / "model_index.json", scratch / "no_branch")
    trajectory = ["--trajectory"]
    return {
        "too short": (
            [*trajectory, f"{scratch}/short.json"],
            "13 frames long at 4 fps, got 12 (12 poses in the file); use a longer path, of 3 s or more\n",
        ),
        "not metric": ([*trajectory, f"{scratch}/unit.json"], "--assume-metric"),
        "below the road": ([*trajectory, f"{scratch}/down.json"], "3.00 m lower"),
        "no path": ([*trajectory, f"{scratch}/words.txt"], "words.txt"),
        "missing path": ([*trajectory, f"{scratch}/nowhere.json"], "nowhere.json"),
        "world below": (["--world", "-1"], "world must be from 0"),
        "world of training": (["--world", str(1 << 32)], "kept out of training"),
        "steps": (["--steps", "0"], "steps must be at least 1"),
        "missing model": (["--model", f"{scratch}/nowhere"], "--model must be a file or folder that exists"),
        "missing branch": (["--model", f"{scratch}/no_branch"], "branch folder"),
        "device": (["--device", "toaster"], "toaster"),
        "device that cannot run it": (["--device", "meta"], "meta"),
        "device that is not here": (["--device", "cuda:99"], "cuda:99"),
        "out": (["--out", f"{scratch}/words.txt"], "can be written to"),
        "out that cannot be made": (["--out", "/proc/nope"], "can be written to"),
    }


def test_the_command_drives_what_the_config_says_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """The picture and the numbers in the docs are those of a plain `merope demo`."""
    given: list[DemoConfig] = []
    monkeypatch.setattr(merope.demo.drive, "run", lambda config: given.append(config) or [])
    assert main(["demo"]) == 0
    assert given == [DemoConfig(out=Path("outputs/demo"))]


def test_bad_input_is_refused_before_weights_are_read(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def heavy(*_: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(merope.demo.drive, "loaded", heavy)
    for name, (arguments, message) in refusals(model, tmp_path).items():
        given = [] if "--model" in arguments else ["--model", str(model)]
        given += [] if "--out" in arguments else ["--out", str(tmp_path / "out")]
        assert main(["demo", *given, *arguments]) == 2, name
        assert message in capsys.readouterr().err, name
    assert not (tmp_path / "out").exists()


def test_a_missing_package_is_named_before_weights_are_read(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "cv2", None)
    monkeypatch.setattr(merope.demo.drive, "loaded", None)  # calling it would be another error
    assert main(["demo", "--model", str(model), "--out", str(tmp_path / "out")]) == 2
    assert "cv2 is not installed: pip install 'merope[eval]'" in capsys.readouterr().err


def test_help_and_documentation_name_the_street_that_is_driven(capsys: pytest.CaptureFixture[str]) -> None:
    world = DemoConfig(out=Path()).world
    with pytest.raises(SystemExit):
        main(["demo", "--help"])
    assert f"trained on ({world})" in " ".join(capsys.readouterr().out.split())
    assert f"FIRST_TEST_SEED + {world}" in (Path(__file__).parents[2] / "docs" / "demo.md").read_text()
    assert f"number {world}." in (SHIPPED_MODEL / "README.md").read_text()


def test_the_shipped_model_is_that_of_its_config() -> None:
    config = read_config(TrainConfig, SHIPPED_CONFIG, [])
    pipeline = loaded(SHIPPED_MODEL, CPU)
    wanted = config.model.architecture or {}
    have = {name: pipeline.transformer.config[name] for name in wanted}
    assert have == wanted | {"patch_size": have["patch_size"]}
    assert list(have["patch_size"]) == list(wanted["patch_size"])
    branch, blocks = json.loads((SHIPPED_MODEL / "branch" / "config.json").read_text()), have["num_layers"]
    assert (branch["encoding"], branch["compression"]) == ("merope", 1)
    assert branch["blocks"] == list(range(1, blocks, 2))
    assert sum(file.stat().st_size for file in SHIPPED_MODEL.rglob("*.safetensors")) <= 60e6
    assert (SHIPPED_MODEL / "README.md").is_file()
    assert [file for file in SHIPPED_MODEL.rglob("*.json") if "_name_or_path" in file.read_text()] == []


def test_the_shipped_model_turns_where_it_is_told(tmp_path: Path) -> None:
    """One block after the prefix and one denoising step are enough to see it: each turn is nearest to its command."""
    folder = tmp_path / "model"
    shutil.copytree(SHIPPED_MODEL, folder)
    write_clips(folder, replace(read_clips(SHIPPED_MODEL)[0], frames=21), steps=1)
    config = DemoConfig(out=Path(), model=folder)
    pipeline = loaded(config.model, CPU)
    clips = clips_of_world(WorldTest().paths(config.clips, config.world_seed), config.clips, config.world_seed, CPU)
    turns = [clip for clip in clips if clip.manoeuvre != "original"]
    videos = [generated(pipeline, clip, config, clip.manoeuvre).float() for clip in turns]
    errors = torch.stack([torch.stack([(v - c.true)[-len(v) // 3 :].square().mean() for c in clips]) for v in videos])
    assert errors.argmin(dim=1).tolist() == [clips.index(clip) for clip in turns]
