"""Streams whose passes are recorded; on a CPU a recording is the call itself, run again on the memory that it read."""

from collections.abc import Callable

import pytest
import torch
from tiny_pipelines import video
from torch import Tensor
from torch.testing import assert_close

from merope.adapters import key_cache, recorded_passes
from merope.adapters.key_cache import KeyReader
from merope.adapters.recorded_passes import Passes, RecordedPasses, is_bound_by_launches
from merope.attention.plan import AttentionPlan
from merope.generate.camera_video import CameraVideoPipeline
from merope.generate.stream import CameraStream
from tests.generate.tiny_streams import ANY_SIZE, begun, model, next_poses, path

BLOCKS, WINDOW = 7, 6


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often each recording was replayed."""
    replays: list[int] = []

    def record(call: Callable[[], Tensor], device: torch.device) -> tuple[Callable[[], None], Tensor]:
        result, number = call().clone(), len(replays)
        assert not result.requires_grad
        replays.append(0)

        def replay() -> None:
            replays[number] += 1
            result.copy_(call())

        return replay, result

    monkeypatch.setattr(recorded_passes, "_record", record)
    monkeypatch.setattr(key_cache, "can_keep", lambda q, plan: False)  # as on a GPU
    return replays


def recorded(stream: CameraStream) -> CameraStream:
    """The stream as `cuda_graphs=True` makes it, which needs a GPU."""
    stream._passes = [RecordedPasses(passes.transformer) for passes in stream._passes]
    return stream


@pytest.mark.parametrize("with_branch", [True, False])
def test_a_recorded_stream_is_the_same(with_branch: bool, recordings: list[int]) -> None:
    pipe = model(with_branch)
    given = {} if with_branch else {"cameras": None, "lens": None}
    plain, graphed = (begun(pipe, window=WINDOW, sink=3, **given) for _ in range(2))
    recorded(graphed)
    for _ in range(BLOCKS):
        poses = next_poses(plain) if with_branch else None
        assert_close(graphed.drive(poses), plain.drive(poses), atol=1, rtol=0)
        assert_close(graphed.latents, plain.latents, **ANY_SIZE)
    # The window (6, of which 3 are the block's, and 3 first ones) is full from the second block on; the third is like
    # it and is recorded. Two steps and one commit for each block from there.
    assert recordings == [3 * (BLOCKS - 2)]


def test_guidance_has_a_recording_for_each_text(recordings: list[int]) -> None:
    pipe = model()
    texts = {"prompt_embeds": torch.randn(1, 3, 8), "negative_prompt_embeds": torch.randn(1, 3, 8)}
    options = {"window": WINDOW, "guidance_scale": 3.0, **texts}
    plain, graphed = begun(pipe, **options), recorded(begun(pipe, **options))
    for _ in range(5):
        poses = next_poses(plain)
        plain.drive(poses), graphed.drive(poses)
        assert_close(graphed.latents, plain.latents, **ANY_SIZE)
    assert len(recordings) == 2


def test_undo_recall_and_moved_weights_are_noticed(recordings: list[int]) -> None:
    pipe = model()
    plain, graphed = (begun(pipe, window=3, remember=100) for _ in range(2))
    recorded(graphed)
    made, poses = [], path(12, 9)  # a car that drives to and fro
    for number in range(11):
        if number == 4:  # as if it had not been driven
            graphed.drive(poses.flip(0))
            graphed.undo()
        if number == 9:
            for weight in pipe.transformer.parameters():
                weight.data = weight.data.clone()
        recall = 3 if number == 5 else 0
        plain.drive(poses, recall=recall), graphed.drive(poses, recall=recall)
        assert plain.recalled == graphed.recalled
        assert bool(graphed.recalled) == bool(recall)
        assert_close(graphed.latents, plain.latents, **ANY_SIZE)
        poses = poses.flip(0)
        made.append(len(recordings))
    # Two blocks alike, then one with recalled views, two alike again, and two after the weights were moved.
    assert made == [0, 1, 1, 1, 1, 1, 1, 2, 2, 2, 3]


def test_a_long_prefix_and_a_pass_that_cannot_be_recorded(
    recordings: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("merope.generate.stream.Passes", RecordedPasses)
    long = {"prefix": video(45), "cameras": path(45), "window": WINDOW}
    begun(model(), **long)
    assert len(recordings) == 1, "the prefix has two blocks alike"

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(recorded_passes, "_record", fail)
    stream = begun(model(), **long)
    stream.drive(next_poses(stream))
    assert stream._passes[0]._failed  # type: ignore[attr-defined]


def test_what_a_pass_makes_of_a_plan_is_not_recorded(recordings: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    attended = KeyReader.attended

    def keep_something(self: KeyReader, layer: str, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan) -> Tensor:
        plan.kept.setdefault("made late", k[:1].clone())
        return attended(self, layer, q, k, v, plan)

    monkeypatch.setattr(KeyReader, "attended", keep_something)
    graphed = recorded(begun(model(), window=WINDOW))
    for _ in range(5):
        graphed.drive(next_poses(graphed))
    assert recordings
    assert not any(recordings)


def test_graphs_are_refused_without_a_gpu_and_not_chosen() -> None:
    pipe: CameraVideoPipeline = model()
    with pytest.raises(
        ValueError, match=r"cuda_graphs must be False for this model, got True for a transformer on cpu"
    ):
        begun(pipe, cuda_graphs=True)
    assert not is_bound_by_launches(pipe.transformer)
    assert all(type(passes) is Passes for passes in begun(pipe)._passes)
