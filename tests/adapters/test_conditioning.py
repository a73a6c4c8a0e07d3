"""The plan is made once per clip, and never a stale one."""

import copy
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from accelerate.utils import send_to_device
from scenes import PINHOLE, curved_drive
from torch import Tensor
from wan_models import cameras, perturb, run, tiny_config, tiny_inputs, tiny_wan

from merope.adapters.attachment import attach, detach
from merope.adapters.camera_branch import CameraBranch
from merope.adapters.conditioning import CameraRotary
from merope.encodings.protocol import Encoding
from merope.geometry.cameras import Cameras
from merope.geometry.lenses import Equirectangular, Pinhole
from merope.geometry.poses import rigid


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Encoding]:
    """Grows by one with every plan."""
    plans: list[Encoding] = []
    plan = Encoding.plan

    def counted(self: Encoding, *args: object, **options: object) -> object:
        plans.append(self)
        return plan(self, *args, **options)

    monkeypatch.setattr(Encoding, "plan", counted)
    return plans


def test_blocks_steps_and_guidance_passes_share_one_plan(made: list[Encoding]) -> None:
    transformer = tiny_wan()
    attach(transformer, tiny_config(blocks="every"))
    first, second = cameras(), cameras(seed=1)
    for step in (900, 500, 100):
        for text in (0, 1):
            run(
                transformer,
                first,
                timestep=torch.tensor([step, step]),
                encoder_hidden_states=torch.randn(2, 5 + text, 8),
            )
    assert len(made) == 1
    run(transformer, second)
    assert len(made) == 2


def test_guidance_between_two_sets_of_cameras_makes_them_ready_itself(made: list[Encoding]) -> None:
    """Only the last cameras are kept: a loop that alternates passes what `branch.prepare` made."""
    transformer = tiny_wan()
    branch = perturb(attach(transformer, tiny_config()))
    clips = cameras(), cameras(seed=1)
    expected = [run(transformer, clip) for clip in clips]
    made.clear()
    ready = [branch.prepare(clip, tiny_inputs()["hidden_states"]) for clip in clips]
    for _ in range(3):
        for condition, output in zip(ready, expected, strict=True):
            assert torch.equal(run(transformer, condition), output)
    assert len(made) == 2


@pytest.mark.parametrize("change", ["latents", "precision", "times", "inference", "object"])
def test_another_situation_gets_its_own_plan(made: list[Encoding], change: str) -> None:
    transformer = tiny_wan(torch.float64)
    attach(transformer, tiny_config())
    clip = cameras()
    run(transformer, clip)
    if change == "latents":
        run(transformer, clip, hidden_states=torch.randn(2, 4, 3, 8, 6).double())
    elif change == "precision":
        transformer.float()
        run(transformer, clip, **tiny_inputs())
    elif change == "times":
        transformer(**tiny_inputs(torch.float64), attention_kwargs={"cameras": clip, "times": [0.0, 1.0, 9.0]})
    elif change == "inference":
        with torch.inference_mode():
            run(transformer, clip)
    else:
        run(transformer, cameras())
    assert len(made) == 2


def test_editing_cameras_in_place_is_seen() -> None:
    transformer = tiny_wan()
    perturb(attach(transformer, tiny_config()))
    lens = Pinhole(torch.full((3,), 120.0), 120.0, 128.0, 72.0, 256, 144)
    clip = Cameras(curved_drive(3), lens)
    before = run(transformer, clip)
    clip.world_from_camera[2, 0, 3] += 2.0
    moved = run(transformer, clip)
    assert (moved - before).abs().max() > 1e-3
    lens.fx[1] = 60.0
    assert (run(transformer, clip) - moved).abs().max() > 1e-3


def test_cameras_of_inference_mode_are_never_kept(made: list[Encoding]) -> None:
    """Their tensors have no version counter, so that nothing tells of an edit; made ready, they are shared."""
    transformer = tiny_wan()
    branch = perturb(attach(transformer, tiny_config()))
    with torch.inference_mode():
        clip = cameras()
        before = run(transformer, clip)
        clip.world_from_camera[2, 0, 3] += 2.0
        assert (run(transformer, clip) - before).abs().max() > 1e-3
        made.clear()
        ready = branch.prepare(clip, tiny_inputs()["hidden_states"])
        for _ in range(3):
            run(transformer, ready)
        assert len(made) == 1


def test_threads_that_share_a_transformer_have_their_own_cameras() -> None:
    """As servers run several requests on one model: both have handed in their cameras before either block runs."""
    transformer = tiny_wan(num_layers=2)
    perturb(attach(transformer, tiny_config()))
    clips = cameras(), cameras(seed=3)
    expected = [run(transformer, clip) for clip in clips]
    both = threading.Barrier(2)

    def wait(module: object, args: object) -> None:
        both.wait(timeout=30)

    transformer.register_forward_pre_hook(wait)
    with ThreadPoolExecutor(2) as pool:
        outputs = list(pool.map(lambda clip: run(transformer, clip), clips))
    assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))


def test_a_transformer_with_a_branch_can_be_pickled() -> None:
    transformer = tiny_wan(num_layers=2)
    perturb(attach(transformer, tiny_config()))
    twin = pickle.loads(pickle.dumps(transformer))
    assert torch.equal(run(twin, cameras()), run(transformer, cameras()))
    detach(twin)


def test_every_thread_keeps_the_plan_of_its_own_cameras(made: list[Encoding]) -> None:
    transformer = tiny_wan(num_layers=2)
    attach(transformer, tiny_config())
    clips = cameras(), cameras(seed=3)
    step = threading.Barrier(2)

    def denoise(clip: Cameras) -> None:
        for _ in range(3):
            step.wait(timeout=30)
            run(transformer, clip)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(denoise, clips))
    assert len(made) == 2


def test_a_branch_is_not_detached_under_a_running_forward() -> None:
    """Its last blocks would run without cameras. Afterwards, also after an error, it comes off."""
    transformer = tiny_wan(num_layers=2)
    perturb(attach(transformer, tiny_config()))
    clip = cameras()
    expected = run(transformer, clip)
    inside, go_on = threading.Event(), threading.Event()

    def wait(module: object, args: object) -> None:
        inside.set()
        go_on.wait(timeout=30)

    hook = transformer.blocks[0].register_forward_pre_hook(wait)
    with ThreadPoolExecutor(1) as pool:
        output = pool.submit(run, transformer, clip)
        assert inside.wait(timeout=30)
        with pytest.raises(ValueError, match="transformer must be at rest while its branch is detached, got a forward"):
            detach(transformer)
        go_on.set()
        assert torch.equal(output.result(timeout=30), expected)
        hook.remove()
        with pytest.raises(RuntimeError):
            pool.submit(run, transformer, clip, encoder_hidden_states=torch.zeros(2, 5, 3)).result(timeout=30)
        detach(transformer)


def test_a_branch_attached_under_a_running_forward_is_noticed() -> None:
    transformer = tiny_wan(num_layers=2)
    transformer.blocks[0].register_forward_pre_hook(lambda module, args: attach(transformer, tiny_config()) and None)
    with pytest.raises(ValueError, match="attach no branch while it runs"):
        run(transformer)


def test_of_two_attachments_at_once_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    transformer, both = tiny_wan(num_layers=2), threading.Barrier(2)
    make = CameraBranch.for_transformer

    def together(*args: object) -> CameraBranch:
        both.wait(timeout=30)
        return make(*args)

    monkeypatch.setattr(CameraBranch, "for_transformer", together)
    with ThreadPoolExecutor(2) as pool:
        tries = [pool.submit(attach, transformer, tiny_config()) for _ in range(2)]
        errors = [attempt.exception(timeout=30) for attempt in tries]
    assert sum(error is None for error in errors) == 1
    assert "without a camera branch" in str(next(error for error in errors if error is not None))
    detach(transformer)
    assert not transformer._forward_pre_hooks


@pytest.mark.parametrize("shape", [(2, 4, 3, 6, 4), (2, 4, 6, 2, 6)])
def test_cameras_made_ready_for_another_shape_of_as_many_tokens_are_refused(shape: tuple[int, ...]) -> None:
    """Portrait for landscape, or other frames: rows would be taken for columns in silence."""
    transformer = tiny_wan(num_layers=2)
    branch = attach(transformer, tiny_config())
    ready = branch.prepare(cameras(), tiny_inputs()["hidden_states"])
    run(transformer, ready)
    with pytest.raises(ValueError, match="cameras made ready must be for tokens"):
        run(transformer, ready, **tiny_inputs(shape=shape))


def test_cameras_made_ready_by_another_branch_are_refused() -> None:
    transformer, latents = tiny_wan(num_layers=2), tiny_inputs()["hidden_states"]
    branch = perturb(attach(transformer, tiny_config()))
    twin = attach(tiny_wan(num_layers=2, seed=3), tiny_config())
    assert torch.equal(run(transformer, twin.prepare(cameras(), latents)), run(transformer, cameras()))
    for encoding in ("gta", "rayrope"):
        other = attach(tiny_wan(num_layers=2), tiny_config(encoding=encoding, encoding_options={}))
        with pytest.raises(ValueError, match=r"must be for encoding MeRoPE\(.*, got encoding (GTA|RayRoPE)\("):
            run(transformer, other.prepare(cameras(), latents))
    told = attach(tiny_wan(), tiny_config(integration="additive", encoding="plucker", encoding_options={}))
    with pytest.raises(ValueError, match=r"must be for encoding MeRoPE\(.*, got encoding RayFeatures\("):
        run(transformer, told.prepare(cameras(), latents))
    upright = attach(tiny_wan(num_layers=2), tiny_config(latitude_up=True))
    with pytest.raises(ValueError, match="must be for latitude_up False, got latitude_up True"):
        run(transformer, upright.prepare(cameras(), latents))
    assert branch.prepare(cameras(), latents).made_by == branch.makes


def test_cameras_made_ready_for_a_batch_serve_no_other() -> None:
    transformer, latents = tiny_wan(num_layers=2), tiny_inputs()["hidden_states"]
    told = {"integration": "recammaster", "encoding": "extrinsics", "encoding_options": {}}
    branch = attach(transformer, tiny_config(**told))
    for shape in ((1, *latents.shape[1:]), (4, *latents.shape[1:])):
        inputs = tiny_inputs(shape=shape)
        run(transformer, branch.prepare(cameras(), latents), **inputs)  # of one clip
        with pytest.raises(ValueError, match=f"cameras made ready must be for a batch of {shape[0]}, got 2"):
            run(transformer, branch.prepare(cameras(batch=2), latents), **inputs)
        with pytest.raises(ValueError, match=f"cameras made ready must be for a batch of {shape[0]}, got 2"):
            run(transformer, branch.prepare(cameras(), latents, times=torch.tensor([[0, 1, 2], [0, 2, 4]])), **inputs)


def test_gradients_reach_the_poses_in_every_backward(made: list[Encoding]) -> None:
    """Optimising a path through the model: a plan with a graph belongs to one backward pass and is not kept."""
    transformer = tiny_wan(torch.float64)
    perturb(attach(transformer, tiny_config()))

    def loss(clip: Cameras) -> Tensor:
        return run(transformer, clip).square().sum()

    def shifted(shift_m: Tensor) -> Cameras:
        poses = curved_drive(3)
        centre = poses[1, :3, 3] + shift_m
        return Cameras(torch.stack((poses[0], rigid(poses[1, :3, :3], centre), poses[2])), PINHOLE)

    shift_m = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    clip = shifted(shift_m)
    gradients = [torch.autograd.grad(loss(clip), shift_m, retain_graph=True)[0] for _ in range(2)]
    assert len(made) == 2
    with torch.no_grad():  # Wan's norms run in float32: no finer step
        numeric = torch.stack([(loss(shifted(h)) - loss(shifted(-h))) / 2e-4 for h in 1e-4 * torch.eye(3).double()])
    for gradient in gradients:
        assert (gradient - numeric).abs().max() < 1e-2 * numeric.abs().max()


def test_gradients_reach_times_in_every_backward() -> None:
    transformer, times = tiny_wan(num_layers=2), torch.arange(3.0, requires_grad=True)
    perturb(attach(transformer, tiny_config()))
    clip = cameras()
    for _ in range(2):
        kwargs = {"cameras": clip, "times": times}
        loss = transformer(**tiny_inputs(), attention_kwargs=kwargs)[0].square().sum()
        assert torch.autograd.grad(loss, times)[0].abs().min() > 0


def test_a_rank_with_some_frames_attends_to_the_keys_of_all() -> None:
    """`gather` brings the keys and values of the other ranks; queries stay those of the own frames."""
    transformer = tiny_wan(torch.float64)
    branch = perturb(attach(transformer, tiny_config(blocks=[0])))
    processor, clip = branch.processors()[0], cameras()
    hidden = torch.randn(2, 18, 48, dtype=torch.float64)
    latents = tiny_inputs(torch.float64)["hidden_states"]
    whole = processor.camera_output(hidden, branch.prepare(clip, latents))
    keys_and_values = iter(processor.cam_qkv(hidden).split(24, dim=-1)[1:])
    tokens = slice(6, 12)  # of the second of three frames

    class Middle:
        own = slice(1, 2)

        def gather(self, x: Tensor, dim: int) -> Tensor:
            full = next(keys_and_values).unflatten(2, (1, 24)).transpose(1, 2)
            torch.testing.assert_close(x, full.narrow(dim, tokens.start, 6), rtol=0, atol=1e-12)
            return full

    branch.frame_share = lambda frames: Middle()
    local = processor.camera_output(hidden[:, tokens], branch.prepare(clip, latents))
    torch.testing.assert_close(local, whole[:, tokens], rtol=0, atol=1e-12)


def test_tables_are_made_ready_for_every_precision_of_the_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiled block can only find them."""
    made_for: list[torch.dtype] = []
    monkeypatch.setattr("merope.adapters.camera_branch.make_ready", lambda _, dtype: made_for.append(dtype))
    transformer, clip = tiny_wan(num_layers=2), cameras()
    attach(transformer, tiny_config())
    for enabled in (False, False, True, True, False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            run(transformer, clip)
    assert made_for == [torch.float32, torch.bfloat16, torch.float32, torch.bfloat16]


def test_accelerate_moves_what_blocks_are_given() -> None:
    """Models spread over devices send a block's arguments to its device; plans must go along."""
    transformer = tiny_wan()
    branch = attach(transformer, tiny_config())
    panoramas = Cameras(curved_drive(3), Equirectangular(256, 128))
    ready = branch.prepare(panoramas, tiny_inputs()["hidden_states"])
    rotary = CameraRotary((torch.ones(1, 18, 1, 24), torch.zeros(1, 18, 1, 24)), ready)
    assert send_to_device(rotary, torch.device("cpu")).condition is ready
    moved = send_to_device(rotary, torch.device("meta"))
    assert isinstance(moved, CameraRotary)
    tensors = [*moved, moved.condition.cameras.world_from_camera, *moved.condition.plan.tensors().values()]
    assert all(x.is_meta for x in tensors)
    assert send_to_device(rotary, torch.device("meta")).condition is moved.condition
    with torch.no_grad():  # its copy has no graph
        assert send_to_device(rotary, torch.device("meta")).condition is not moved.condition
    other = replace(ready, grid=(1, 1)).to("meta")
    assert other.grid == (1, 1)


def test_what_blocks_are_given_can_be_copied_and_pickled() -> None:
    """As calibration tools do, which keep the inputs of a block."""
    ready = attach(tiny_wan(), tiny_config()).prepare(cameras(), tiny_inputs()["hidden_states"])
    rotary = CameraRotary((torch.rand(1, 18, 1, 24), torch.rand(1, 18, 1, 24)), ready, torch.rand(2, 6, 48))
    for twin in (copy.copy(rotary), copy.deepcopy(rotary), pickle.loads(pickle.dumps(rotary))):
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(twin, rotary, strict=True))
        assert torch.equal(twin.references, rotary.references)
        assert torch.equal(twin.condition.cameras.world_from_camera, ready.cameras.world_from_camera)
