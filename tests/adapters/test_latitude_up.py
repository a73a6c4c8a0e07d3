"""A parallel branch that is told which way is up, as GTA and PRoPE are on PanShot."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from scenes import curved_drive, random_poses
from torch import Tensor
from wan_models import LATENTS, WAN21_1_3B, cameras, meta_wan, perturb, run, tiny_config, tiny_inputs, tiny_wan

from merope import Cameras, LatitudeUp, attend
from merope.adapters.attachment import attach, detach
from merope.adapters.branch_config import CameraBranchConfig
from merope.adapters.camera_branch import CameraBranch
from merope.adapters.saving import read_branch
from merope.geometry.poses import rigid
from merope.train.config import TrainConfig
from merope.train.toml_config import read_config

GTA = {"encoding": "gta", "encoding_options": {}, "latitude_up": True, "blocks": [0]}


def told(**changes: Any) -> tuple[Any, CameraBranch]:
    transformer = tiny_wan(torch.float64)
    return transformer, attach(transformer, tiny_config(**GTA | changes))


def test_the_map_is_added_to_what_the_branch_projects() -> None:
    transformer, branch = told()
    base = run(tiny_wan(torch.float64))
    assert torch.equal(run(transformer, cameras()), base)  # a fresh branch changes nothing
    perturb(branch)
    seen: dict[str, Tensor] = {}
    attn = transformer.blocks[0].attn1
    attn.register_forward_hook(lambda _, args, out: seen.update(x=args[0], out=out, rotary=args[3].native))
    run(transformer, cameras())
    processor, plan = attn.processor, branch.prepare(cameras(), tiny_inputs(torch.float64)["hidden_states"]).plan
    assert plan is not None
    up = LatitudeUp().features(cameras(), (2, 3)) @ processor.cam_map.weight.T + processor.cam_map.bias
    q, k, v = (y.unflatten(2, (1, 24)).transpose(1, 2) for y in processor.cam_qkv(seen["x"] + up).split(24, dim=-1))
    added = processor.cam_out(attend(q, k, v, plan, backend="reference").transpose(1, 2).flatten(2))
    own = processor.base(attn, seen["x"], None, None, seen["rotary"])
    torch.testing.assert_close(seen["out"], own + added, rtol=0, atol=1e-12)


def test_the_world_may_turn_about_the_vertical_but_not_tilt() -> None:
    transformer, branch = told()
    perturb(branch)
    path, lens = curved_drive(3), cameras().lens
    c, s = math.cos(1.0), math.sin(1.0)
    turn = torch.tensor([[c, 0.0, s], [0.0, 1.0, 0.0], [-s, 0.0, c]], dtype=torch.float64)
    about_y = rigid(turn, torch.tensor([5.0, 2.0, -9.0], dtype=torch.float64))
    here, turned, tilted = (
        run(transformer, Cameras(world @ path, lens)) for world in (torch.eye(4).double(), about_y, random_poses(1))
    )
    torch.testing.assert_close(here, turned, rtol=0, atol=1e-9)
    assert float((here - tilted).detach().abs().max()) > 1e-4


def test_blocks_of_a_stream_are_told_of_their_own_frames() -> None:
    _, branch = told()
    latents = torch.zeros(1, *LATENTS[1:], dtype=torch.float64)[:, :, :1]
    block = branch.prepare_block(cameras().at(slice(2, 3)), latents, cameras().at(slice(2)), torch.arange(3.0))
    torch.testing.assert_close(block.features, LatitudeUp().features(cameras(), (2, 3))[:, 12:])


def test_it_is_saved_with_the_branch_and_costs_what_ucpes_code_costs(tmp_path: Path) -> None:
    transformer, branch = told()
    perturb(branch)
    detach(transformer).save_pretrained(tmp_path)
    again = read_branch(tmp_path, transformer)
    assert again.config["latitude_up"]
    assert torch.equal(
        again.state_dict()["camera_blocks.0.cam_map.weight"], branch.state_dict()["camera_blocks.0.cam_map.weight"]
    )
    sizes = {}
    for latitude_up in (False, True):
        config = CameraBranchConfig("gta", compression=8, blocks="every", latitude_up=latitude_up)
        sizes[latitude_up] = sum(p.numel() for p in attach(meta_wan(WAN21_1_3B), config).parameters())
    assert sizes == {False: 30 * 1_181_760, True: 30 * (1_181_760 + 4 * 1536)}


@pytest.mark.parametrize("change", [{"integration": "rerope"}, {"encoding": "raynova"}])
def test_it_is_refused_where_there_is_nobody_to_tell(change: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="latitude_up must be False but for a parallel branch of relative poses"):
        CameraBranchConfig(latitude_up=True, **change)


def test_the_rows_of_panshot_have_it_where_the_paper_has_it() -> None:
    folder = Path(__file__).parents[2] / "configs" / "panshot"
    rows = {file.stem: read_config(TrainConfig, file).branch for file in folder.glob("*.toml")}
    told_up = {name for name, branch in rows.items() if not isinstance(branch, str) and branch.latitude_up}
    assert told_up == {"a-gta", "a-prope", "b-gta", "b-prope"}
