"""What a stream remembers: undo, blocks that are stopped, frames that are shown early, save and resume."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_pipelines import HEIGHT, SIZE, WIDTH, tiny_pipeline
from torch import Tensor
from torch.testing import assert_close

from merope.formats import writing
from merope.generate.camera_video import CameraVideoPipeline
from merope.geometry.cameras import Cameras
from merope.geometry.lenses import Pinhole
from tests.generate.tiny_streams import ANY_SIZE, PREFIX, begun, model, next_poses, path


@pytest.fixture(scope="module")
def pipe() -> CameraVideoPipeline:
    return model()


class TestUndo:
    def test_takes_back_the_first_block(self, pipe: CameraVideoPipeline) -> None:
        stream = begun(pipe)
        poses = next_poses(stream)
        first = stream.drive(poses)
        stream.undo()
        assert stream.frames == PREFIX
        assert torch.equal(stream.drive(poses), first)

    def test_another_way_is_as_if_it_had_been_the_first(self, pipe: CameraVideoPipeline) -> None:
        straight, both = begun(pipe), begun(pipe)
        for stream in (straight, both):
            stream.drive(next_poses(stream))
        both.drive(path(12, PREFIX + 40))
        both.undo()
        assert torch.equal(both.drive(next_poses(both)), straight.drive(next_poses(straight)))

    def test_twice_or_too_early_is_refused(self, pipe: CameraVideoPipeline) -> None:
        stream = begun(pipe)
        with pytest.raises(ValueError, match="undo must be called after drive, got nothing driven yet; drive first"):
            stream.undo()
        stream.drive(next_poses(stream))
        stream.undo()
        stream.drive(next_poses(stream))
        stream.drive(next_poses(stream))
        stream.undo()
        with pytest.raises(ValueError, match="undo must be called after drive, got the last block is gone"):
            stream.undo()


def test_a_block_that_its_steps_stop_was_never_driven(pipe: CameraVideoPipeline) -> None:
    stream, done = begun(pipe), []
    poses = next_poses(stream)

    def stop(step: int) -> None:
        raise InterruptedError(step)

    with pytest.raises(InterruptedError, match="1"):
        stream.drive(poses, on_step=stop)
    assert (stream.frames, stream.blocks) == (PREFIX, 0)
    assert torch.equal(stream.drive(poses, on_step=done.append), begun(pipe).drive(poses))
    assert done == [1, 2]


@pytest.mark.parametrize("options", [{}, {"prefix": None, "cameras": None, **SIZE}])
def test_frames_are_shown_as_they_are_decoded(pipe: CameraVideoPipeline, options: dict[str, Any]) -> None:
    usual, watched, shown = begun(pipe, **options), begun(pipe, **options), list[Tensor]()
    first = [1, 4, 4] if options else [4, 4, 4]
    for counts in (first, [4, 4, 4]):
        poses, seen = next_poses(usual), len(shown)
        whole, frames = usual.drive(poses), watched.drive(poses, on_frames=shown.append)
        assert [len(part) for part in shown[seen:]] == counts
        assert torch.equal(torch.cat(shown[seen:]), frames)
        assert (frames.int() - whole.int()).abs().max() <= 1  # convolutions of other shapes round otherwise
        assert_close(watched.latents, usual.latents, **ANY_SIZE)


def test_a_block_whose_frames_nobody_takes_was_never_driven(pipe: CameraVideoPipeline) -> None:
    stream = begun(pipe)

    def stop(frames: Tensor) -> None:
        raise InterruptedError(len(frames))

    with pytest.raises(InterruptedError, match="4"):
        stream.drive(next_poses(stream), on_frames=stop)
    assert (stream.frames, stream.blocks) == (PREFIX, 0)
    assert torch.equal(stream.drive(next_poses(stream)), begun(pipe).drive(next_poses(begun(pipe))))


class TestSaving:
    def test_a_resumed_stream_goes_on_to_the_last_bit(self, tmp_path: Path) -> None:
        guided = tiny_pipeline()
        zoom = Cameras(path(PREFIX), Pinhole(torch.linspace(50, 60, PREFIX), 50.0, WIDTH / 2, 16.0, WIDTH, HEIGHT))
        stream = begun(guided, prompt="a street", cameras=zoom, guidance_scale=2.0, seed=5)
        stream.drive(next_poses(stream))
        file = stream.save(tmp_path)
        resumed = tiny_pipeline().resume_stream(tmp_path)
        assert file.parent == tmp_path
        assert (resumed.frames, resumed.settings) == (stream.frames, stream.settings)
        for _ in range(2):
            assert torch.equal(resumed.drive(next_poses(resumed)), stream.drive(next_poses(stream)))

    def test_goes_on_with_a_vae_of_another_precision(self, tmp_path: Path) -> None:
        pipe = model()
        stream = begun(pipe)
        stream.drive(next_poses(stream))
        stream.save(tmp_path)
        usual = stream.drive(next_poses(stream))
        pipe.vae.to(torch.bfloat16)
        resumed = pipe.resume_stream(tmp_path)
        assert (resumed.drive(next_poses(resumed)).int() - usual.int()).abs().float().mean() < 1.0

    def test_a_save_that_fails_leaves_the_one_before(
        self, pipe: CameraVideoPipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stream = begun(pipe)
        file = stream.save(tmp_path)
        before = file.read_bytes()
        stream.drive(next_poses(stream))

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(writing, "save_file", full)
        with pytest.raises(OSError, match="free some space"):
            stream.save(tmp_path)
        assert [each.read_bytes() for each in tmp_path.iterdir()] == [before]

    def test_another_model_or_file_is_refused(self, pipe: CameraVideoPipeline, tmp_path: Path) -> None:
        begun(pipe).save(tmp_path)
        with pytest.raises(ValueError, match=r"the pipeline's scheduler must be .*FlowMatchEuler.*got .*UniPC"):
            tiny_pipeline(with_text=False, transformer=pipe.transformer).resume_stream(tmp_path)
        with pytest.raises(ValueError, match="the pipeline's branch must be"):
            model(with_branch=False).resume_stream(tmp_path)
        with pytest.raises(ValueError, match=r"folder must be one with a stream\.safetensors"):
            pipe.resume_stream(tmp_path / "nothing")
        (tmp_path / "stream.safetensors").write_bytes(b"half a file")
        with pytest.raises(ValueError, match=r"must be a whole stream as stream\.save writes it"):
            pipe.resume_stream(tmp_path)
