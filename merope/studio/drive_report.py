"""What a page saves besides video and cameras: the report of `merope evaluate`, of one drive or of one take."""

from dataclasses import replace

import torch

from merope.demo.drive import recovered_record
from merope.errors import invalid
from merope.evaluate.discover import ClipName, printable
from merope.evaluate.record import THUMBNAILS, Record, Thumbnail, thumbnails
from merope.evaluate.report import report_html
from merope.evaluate.results import measure
from merope.evaluate.run import versions
from merope.formats.video import read_video
from merope.studio.street_drive import Beginning, StreetDrive
from merope.studio.street_take import Take
from merope.studio.studio_model import Sampling, StudioModel


def take_report(take: Take) -> str:
    """The page of a take that was measured."""
    if take.verdict is None:
        raise invalid("report", "asked for when the take is measured", "too early, or no street", "wait for its errors")
    score = take.verdict.score
    clip, poses = _clip(take.beginning, take.video.stem), take.world_from_camera
    record = recovered_record(clip, poses, score.recovered, score.valid, thumbnails(take.frames))
    left = take.verdict.left_frame
    when = "never" if left is None else f"at {left / take.model.clips.frame_rate_hz:.2f} s"
    found = {"PSNR against the true view": f"{score.psnr_db:.1f} dB", "left the path by 1 m": when}
    return _page(record, _settings(take.model, take.beginning, take.sampling) | found)


def drive_report(drive: StreetDrive) -> str:
    """The page of a drive: one pose for each latent frame that was looked at, after the last given one."""
    if not drive.sights:
        raise invalid("report", "asked for after a block was measured", "nothing measured yet", "drive in a street")
    start = drive.given.world_from_camera[-1:]
    sights = list(drive.sights)
    commanded = torch.cat([start, *(sight.commanded for sight in sights)])
    recovered = torch.cat([start, *(sight.recovered for sight in sights)])
    valid = torch.cat([torch.ones(1, dtype=torch.bool), *(sight.valid for sight in sights)])
    record = recovered_record(_clip(drive.beginning, "drive"), commanded, recovered, valid, _pictures_of(drive))
    frames = {"frames": drive.recording.frames, "poses": "one for each latent frame"}
    return _page(record, _settings(drive.model, drive.beginning, drive.sampling) | frames)


def _pictures_of(drive: StreetDrive) -> tuple[Thumbnail, ...]:
    """From the video as it is saved."""
    last, clips = drive.recording.frames - 1, drive.model.clips
    numbers = [round(k * last / (THUMBNAILS - 1)) for k in range(THUMBNAILS)]
    frames = read_video(drive.recording.video, numbers, clips.height, clips.width)
    return tuple(replace(one, frame=number) for one, number in zip(thumbnails(frames), numbers, strict=True))


def _clip(beginning: Beginning, name: str) -> ClipName:
    return ClipName(beginning.title.replace(" ", "-"), name)


def _settings(model: StudioModel, beginning: Beginning, sampling: Sampling) -> dict[str, object]:
    lens = f"{beginning.choice.fov_deg:g}° {beginning.choice.kind}"
    return {
        "made in": "merope studio",
        "model": model.name,
        "begins in": beginning.title,
        "lens": lens,
        "steps": sampling.steps,
        "seed": model.seed,
        "prompt": sampling.prompt,
    }


def _page(record: Record, settings: dict[str, object]) -> str:
    return printable(report_html(measure([record], [], settings, versions())))
