"""`merope analyse` of other base models: two experts, joint text, tokens of two latent frames."""

import json
from pathlib import Path

import pytest
from adapters.wan_models import perturb, tiny_config
from family_folders import FOLDERS, write_folder
from scenes import curved_drive
from tiny_pipelines import HEIGHT, LENS, WIDTH

import merope
from merope import formats
from merope.cli import main
from merope.formats.trajectory import Trajectory


@pytest.mark.parametrize(("name", "places"), [("a14b", ("transformer", "transformer_2")), ("cog_15", (".",))])
def test_numbers_of_every_transformer(
    name: str, places: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe = FOLDERS[name]()
    for branch in merope.attach(pipe, tiny_config(blocks="every")).values():
        perturb(branch)
    branches = merope.detach(pipe)
    (branches if len(branches) > 1 else branches["transformer"]).save_pretrained(tmp_path / "branch")
    path = Trajectory(curved_drive(20, step_m=0.4), is_metric=True, convention="a test", lens=LENS)
    formats.write(path, tmp_path / "bend.json")
    line = ["analyse", "--model", write_folder(tmp_path, name), "--branch", tmp_path / "branch", "--steps", 8]
    line += ["--trajectory", tmp_path / "bend.json", "--frames", 9, "--size", HEIGHT, WIDTH, "--out", tmp_path / "out"]
    assert main([str(word) for word in line]) == 0
    assert capsys.readouterr().out.count("block ") == 2 * len(places)
    forwards = 0
    for place in places:
        table = json.loads((tmp_path / "out" / place / "analysis.json").read_text())
        assert list(table["amplitude"]) == ["0", "1"]
        assert all(value > 0 for value in table["amplitude"].values())
        forwards += table["forwards"]
    assert forwards == 8
