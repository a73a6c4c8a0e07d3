"""`merope fidelity`: distances of folders of videos with scripted stand-in detectors, and their way into the report."""

import hashlib
import json
import re
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import scipy.linalg
import torch
from scenes import PINHOLE, curved_drive
from torch import Tensor, nn

from merope import formats
from merope.cli import main
from merope.evaluate import fidelity as fidelity_module
from merope.evaluate.detectors import InceptionDetector
from merope.evaluate.fidelity import Fidelity, as_text, fidelity, read_fidelity, write_fidelity
from merope.formats.trajectory import Trajectory
from merope.formats.video import read_first_frames, write_video

FRAMES, PREFIX = 7, 4


class FrameStandIn(nn.Module):
    """Colours of an image and of its corner, called like the public Inception file."""

    def forward(self, img: Tensor, return_features: bool = False) -> Tensor:
        x = img.to(torch.float32)
        return torch.cat((x.mean(dim=(2, 3)), x[:, :, 0, 0]), dim=1)


class ClipStandIn(nn.Module):
    """Colours and motion of a video, called like the public I3D file."""

    def forward(self, x: Tensor, rescale: bool = False, resize: bool = False, return_features: bool = False) -> Tensor:
        return torch.cat((x.mean(dim=(2, 3, 4)), (x[:, :, 1:] - x[:, :, :-1]).abs().mean(dim=(2, 3, 4))), dim=1)


@dataclass
class Counting:
    """A detector in Python that counts the videos it sees and may be interrupted."""

    name: str = "counting"
    weights_sha256: str = "ab" * 32
    resize: str = "none"
    is_per_frame: bool = True
    calls: int = 0
    interrupt_at: int | None = None

    def __call__(self, frames: Tensor) -> Tensor:  # uint8 [T, H, W, 3] -> [T or 1, 3]
        self.calls += 1
        if self.calls == self.interrupt_at:
            raise KeyboardInterrupt
        features = frames.double().mean((1, 2))
        return features if self.is_per_frame else features.mean(0, keepdim=True)


def saved(module: nn.Module, path: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.script(module).save(str(path))
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("detectors")
    return {"inception": saved(FrameStandIn(), folder / "a.pt"), "i3d": saved(ClipStandIn(), folder / "b.pt")}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


def write_clip(file: Path, seed: int, frames: int = FRAMES) -> None:
    coarse = torch.rand(frames, 3, 2, 4, generator=torch.Generator().manual_seed(seed))
    video = nn.functional.interpolate(255 * coarse, (16, 32)).permute(0, 2, 3, 1)
    write_video(video.to(torch.uint8), file, 12.0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Six real clips, one of them in a sub-folder, and two methods of five; hidden and other files are no videos."""
    for first_seed, (name, count) in enumerate((("real", 6), ("ours", 5), ("theirs", 5))):
        for number in range(count):
            write_clip(tmp_path / name / ("night/" if number == 0 else "") / f"{number}.mp4", 10 * first_seed + number)
    (tmp_path / "ours/.half.mp4").write_bytes(b"half")
    (tmp_path / "ours/notes.txt").write_text("no video")
    return tmp_path


def methods(folder: Path) -> dict[str, Path]:
    return {name: folder / name for name in ("ours", "theirs")}


def score(folder: Path, *detectors: Counting, out: str = "out", reference: str = "real") -> Fidelity:
    return fidelity(methods(folder), folder / reference, detectors, folder / out, PREFIX)


def command(folder: Path, files: dict[str, Path], *more: str) -> list[str]:
    given = [f"--method={name}={place}" for name, place in methods(folder).items()]
    detectors = [f"--{name}={file}" for name, file in files.items()]
    common = [f"--reference={folder / 'real'}", f"--prefix-frames={PREFIX}", f"--out={folder / 'out'}"]
    return ["fidelity", *given, *detectors, "--allow-code", *common, *more]


def by_hand(module: nn.Module, generated: Path, real: Path, per_frame: bool) -> float:
    """The textbook formula over features of all decoded frames after the prefix."""
    moments = []
    for place in (generated, real):
        features = []
        for file in place.rglob("[0-9]*.mp4"):
            frames = read_first_frames(file, 99)[0][PREFIX:]
            batch = frames.permute(0, 3, 1, 2) if per_frame else frames.permute(3, 0, 1, 2)[None].float()
            features.append(module(batch).double().numpy())
        stacked = np.concatenate(features)
        moments.append((stacked.mean(0), np.cov(stacked, rowvar=False)))
    (mean_a, cov_a), (mean_b, cov_b) = moments
    root = scipy.linalg.sqrtm(cov_a @ cov_b).real
    return float(np.square(mean_a - mean_b).sum() + np.trace(cov_a + cov_b - 2 * root))


def test_command_line_scores_every_method(
    folder: Path, files: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(folder, files)) == 0
    document = json.loads((folder / "out/fidelity.json").read_text())
    printed = capsys.readouterr()
    for name, place in methods(folder).items():
        scores = document["methods"][name]["scores"]
        assert scores["fid"]["distance"] == pytest.approx(by_hand(FrameStandIn(), place, folder / "real", True), 1e-4)
        assert scores["fvd"]["distance"] == pytest.approx(by_hand(ClipStandIn(), place, folder / "real", False), 1e-3)
        assert (scores["fid"]["count"], scores["fid"]["reference_count"]) == (5 * 3, 6 * 3)
        assert (scores["fvd"]["count"], scores["fvd"]["reference_count"]) == (5, 6)
        for kind, detector in (("fid", "inception"), ("fvd", "i3d")):
            source = scores[kind]["source"]
            assert source["weights_sha256"] == hashlib.sha256(files[detector].read_bytes()).hexdigest()
            assert (source["detector"], source["prefix_frames"]) == (detector, PREFIX)
            assert "bilinear" in source["resize"]
        assert f"{name}: FID {scores['fid']['distance']:.3f} (15 against 18 frames)" in printed.out
        assert f"{name}: FVD {scores['fvd']['distance']:.3f} (5 against 6 videos of 3 frames)" in printed.out
    assert "inception: ours: wrote" in printed.err


def test_one_folder_is_named_by_itself_and_equal_sets_are_at_zero(folder: Path, files: dict[str, Path]) -> None:
    given = [f"--videos={folder / 'real'}", f"--reference={folder / 'real'}", f"--inception={files['inception']}"]
    assert main(["fidelity", *given, f"--out={folder / 'out'}", "--prefix-frames=0", "--allow-code"]) == 0
    (only,) = read_fidelity(folder / "out/fidelity.json").methods.items()
    assert (only[0], list(only[1].scores)) == ("real", ["fid"])
    assert only[1].scores["fid"].distance == pytest.approx(0.0, abs=1e-2)


def test_a_video_that_cannot_be_read_is_named_and_counted(
    folder: Path, files: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "ours/3.mp4").write_bytes(b"\0" * 2000)
    (folder / "real/2.mp4").write_bytes(b"")
    for _ in range(2):  # the second time from saved statistics
        assert main(command(folder, files)) == 1
        printed = capsys.readouterr()
        assert "cannot be read, ours: 3.mp4:" in printed.out
        assert "cannot be read, reference: 2.mp4:" in printed.out
        result = read_fidelity(folder / "out/fidelity.json")
        assert list(result.methods["ours"].unreadable) == ["3.mp4"]
        assert list(result.reference_unreadable) == ["2.mp4"]
        fvd = {name: one.scores["fvd"] for name, one in result.methods.items()}
        assert {name: (one.count, one.reference_count) for name, one in fvd.items()} == {
            "ours": (4, 5),
            "theirs": (5, 5),
        }


def test_statistics_are_reused_until_something_changes(folder: Path) -> None:
    first, again = Counting(), Counting()
    before = score(folder, first)
    assert score(folder, again) == before
    assert (first.calls, again.calls) == (16, 0)
    other_weights, as_clips = Counting(weights_sha256="cd" * 32), Counting(name="clips", is_per_frame=False)
    score(folder, other_weights, as_clips)
    assert (other_weights.calls, as_clips.calls) == (16, 16)
    write_clip(folder / "real/1.mp4", 99)
    changed = Counting()
    after = score(folder, changed)
    assert changed.calls == 6
    assert after.methods["ours"].scores["fid"].distance != before.methods["ours"].scores["fid"].distance
    other_prefix = Counting()
    fidelity(methods(folder), folder / "real", [other_prefix], folder / "out", PREFIX - 1)
    assert other_prefix.calls == 16


def test_an_interrupted_run_goes_on_with_the_same_result(folder: Path) -> None:
    score(folder, Counting(), out="whole")
    with pytest.raises(KeyboardInterrupt):
        score(folder, Counting(interrupt_at=9), out="twice")  # in the first method, after the reference's six
    assert not (folder / "twice/fidelity.json").exists()
    rest = Counting()
    score(folder, rest, out="twice")
    assert rest.calls == 10
    assert (folder / "twice/fidelity.json").read_bytes() == (folder / "whole/fidelity.json").read_bytes()


def test_command_line_says_how_to_go_on(
    folder: Path, files: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(InceptionDetector, "__call__", Counting(interrupt_at=1).__call__)
    assert main(command(folder, files)) == 130
    assert "run the same command to go on" in capsys.readouterr().err


def test_one_video_is_in_memory_at_a_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[weakref.ref[Tensor]] = []
    alive_before: list[int] = []

    def watched(video: Path, limit: int) -> tuple[Tensor, int]:
        alive_before.append(sum(one() is not None for one in decoded))
        frames, count = read_first_frames(video, limit)
        decoded.append(weakref.ref(frames))
        return frames, count

    monkeypatch.setattr(fidelity_module, "read_first_frames", watched)
    score(folder, Counting())
    assert len(alive_before) == 2 * 16
    assert max(alive_before) <= 1


def test_saved_statistics_stand_for_the_reference(folder: Path) -> None:
    detector = Counting()
    expected = score(folder, detector)
    real = next(
        file for file in (folder / "out/statistics").iterdir() if np.load(file)["count"] == 6 * (FRAMES - PREFIX)
    )
    given = score(folder, Counting(), out="elsewhere", reference=str(real))
    assert given.methods == expected.methods
    stranger = Counting(weights_sha256="cd" * 32)
    with pytest.raises(ValueError, match="only the detector file that made them"):
        score(folder, stranger, reference=str(real))
    with pytest.raises(ValueError, match="only the detector file that made them"):
        score(folder, Counting(), Counting(name="clips", is_per_frame=False), reference=str(real))
    assert stranger.calls == 0


def test_videos_of_another_length_are_named_before_work(folder: Path) -> None:
    frames, clips = Counting(), Counting(name="clips", is_per_frame=False)
    for number in (1, 2, 3, 4):
        write_clip(folder / f"theirs/{number}.mp4", number, frames=FRAMES + 1)
    with pytest.raises(ValueError, match=r"theirs/night/0\.mp4 must be 8 frames long like 1\.mp4, got 7"):
        score(folder, clips)
    write_clip(folder / "theirs/night/0.mp4", 0, frames=FRAMES + 1)
    with pytest.raises(ValueError, match=r"theirs/1\.mp4 must be 4 \+ 3 frames long like the reference, got 8"):
        score(folder, frames, clips)
    assert (frames.calls, clips.calls) == (0, 0)
    assert score(folder, frames).methods["theirs"].scores["fid"].count == 5 * 4  # frames compare at any length


def test_length_against_saved_statistics(folder: Path) -> None:
    clips = Counting(name="clips", is_per_frame=False)
    score(folder, clips)
    real = next(file for file in (folder / "out/statistics").iterdir() if np.load(file)["count"] == 6)
    with pytest.raises(ValueError, match=r"5 \+ 3 frames long like the reference, got 7"):
        fidelity(methods(folder), real, [clips], folder / "out", PREFIX + 1)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--prefix-frames=7"], "longer than the prefix of 7 frames"),
        (["--prefix-frames=-1"], "0 or more"),
        (["--reference=nowhere"], "--reference must be a file or folder that exists"),
        (["--method=third=nowhere"], "videos of third must be a folder"),
        (["--method=third=empty"], "videos of third must be at least one that can be read"),
        (["--method=third=single"], "third in single must be two videos or more"),
        (["--method=ours=elsewhere"], "name of its own"),
        (["--i3d=nowhere.pt"], "never downloaded"),
    ],
)
def test_wrong_arguments_are_refused_before_work(
    folder: Path,
    files: dict[str, Path],
    more: list[str],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    Path("empty").mkdir()
    write_clip(Path("single/0.mp4"), 0)
    assert main(command(folder, files, *more)) == 2
    assert words in capsys.readouterr().err
    assert not (folder / "out").exists()


def test_a_detector_and_a_method_are_needed(
    folder: Path, files: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(folder, {})) == 2
    message = capsys.readouterr().err
    assert "inception-2015-12-05.pt" in message
    assert "i3d_torchscript.pt" in message
    assert main(["fidelity", f"--reference={folder / 'real'}", f"--i3d={files['i3d']}"]) == 2
    assert "--videos or --method" in capsys.readouterr().err


@pytest.fixture
def evaluation(folder: Path) -> list[str]:
    """Arguments of an evaluation of three methods with recovered paths given."""
    names = ("ours", "theirs", "others")
    for method in names:
        for number in (1, 2):
            place = f"{number}.json"
            path = Trajectory(curved_drive(FRAMES), True, "made by a test", lens=PINHOLE)
            for file in (folder / "commanded" / place, folder / "estimates" / method / place):
                file.parent.mkdir(parents=True, exist_ok=True)
                formats.write(path, file)
    for number in (1, 2):
        write_clip(folder / f"others/{number}.mp4", number)
    given = [f"--method={name}={folder / name}" for name in names]
    common = [f"--commanded={folder / 'commanded'}", "--estimator=precomputed", f"--estimates={folder / 'estimates'}"]
    return ["evaluate", *given, *common, "--workers=1", f"--out={folder / 'report'}"]


def summary_row(page: str, method: str) -> str:
    table = page[page.index("<table") : page.index("</table>")]
    (row,) = (row for row in table.split("<tbody>") if f'<th scope="row">{method}</th>' in row)
    return row


def test_the_report_has_the_distances(folder: Path, evaluation: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    detectors = Counting(), Counting(name="clips", is_per_frame=False)
    result = score(folder, *detectors)
    better, worse = sorted(result.methods, key=lambda name: result.methods[name].scores["fid"].distance)
    (folder / "others/2.mp4").unlink()  # a second table, of the clips in common, which FID and FVD are not of
    assert main([*evaluation, f"--fidelity={folder / 'out/fidelity.json'}"]) == 0
    printed = capsys.readouterr().out
    of_all, of_common = (line for line in printed.splitlines() if "rot° ↓" in line)
    assert re.search(r"CamMC ↓ +FID ↓ +FVD ↓ +measured", of_all)
    assert re.search(r"CamMC ↓ +measured", of_common)
    document = json.loads((folder / "report/results.json").read_text())
    page = (folder / "report/report.html").read_text()
    assert "FID ↓" in page[: page.index("</thead>")]
    assert page.count("FVD ↓</button>") == 1  # neither in the second table nor in that of clips
    for name, tag in ((better, "b"), (worse, "u")):
        distance = result.methods[name].scores["fid"].distance
        assert document["fidelity"]["methods"][name]["scores"]["fid"]["distance"] == distance
        assert f"<{tag}>{distance:.2f}</{tag}><small>n = 15</small>" in summary_row(page, name)
        assert f"{distance:8.3f}" in next(line for line in printed.splitlines() if line.startswith(f"  {name} "))
    assert summary_row(page, "others").count('<td data-v="">–</td>') == 2
    assert document["settings"]["fidelity"] == str(folder / "out/fidelity.json")


def test_without_distances_the_report_has_no_columns_for_them(
    folder: Path, evaluation: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(evaluation) == 0
    assert "FID" not in capsys.readouterr().out + (folder / "report/report.html").read_text()
    assert json.loads((folder / "report/results.json").read_text())["fidelity"] is None


def test_the_report_names_videos_that_have_no_part_in_the_distances(
    folder: Path, evaluation: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "theirs/<3>.mp4").write_bytes(b"no video")
    score(folder, Counting())
    assert main([*evaluation, f"--fidelity={folder / 'out/fidelity.json'}"]) == 0
    assert "not in FID and FVD, theirs: <3>.mp4" in capsys.readouterr().out
    assert "<li>theirs: &lt;3&gt;.mp4: " in (folder / "report/report.html").read_text()


def test_distances_of_other_methods_are_refused(
    folder: Path, evaluation: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    result = score(folder, Counting())
    renamed, strange = folder / "renamed.json", folder / "strange.json"
    write_fidelity(replace(result, methods={"Ours": result.methods["ours"]}), renamed)
    strange.write_text('{"format": "another"}')
    for file, words in ((renamed, "ours, theirs, others, got Ours;"), (strange, "make it with merope fidelity")):
        assert main([*evaluation, f"--fidelity={file}"]) == 2
        assert words in capsys.readouterr().err
    assert not (folder / "report").exists()


def test_the_file_holds_everything(folder: Path) -> None:
    result = score(folder, Counting())
    assert read_fidelity(folder / "out/fidelity.json") == result
    assert as_text(read_fidelity(folder / "out/fidelity.json")) == as_text(result)
