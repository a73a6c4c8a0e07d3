"""`merope analyse`: a short sampling of a model with a branch, to numbers and pictures."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters.wan_models import perturb, tiny_config, tiny_wan
from diffusers import WanPipeline
from PIL import Image
from scenes import curved_drive
from tiny_pipelines import HEIGHT, LENS, WIDTH, tiny_pipeline

from merope import formats
from merope.adapters.attachment import attach, detach
from merope.cli import main
from merope.formats.trajectory import Trajectory
from merope.world.clips import WorldClips
from merope.world.clips_file import write_clips


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, a branch and a path of 20 frames."""
    root = tmp_path_factory.mktemp("analyse")
    pipe = tiny_pipeline(with_branch=False)
    WanPipeline(**pipe.components, expand_timesteps=True).save_pretrained(root / "model")
    perturb(attach(pipe.transformer, tiny_config(blocks="every")))
    detach(pipe.transformer).save_pretrained(root / "branch")
    path = Trajectory(curved_drive(20, step_m=0.4), is_metric=True, convention="a test", lens=LENS)
    formats.write(path, root / "bend.json")
    return root


class TestCommand:
    def line(self, files: Path, out: Path, **changes: object) -> list[str]:
        options = {name: files / name for name in ("model", "branch")}
        options |= {"trajectory": files / "bend.json", "frames": 17, "steps": 2, "out": out, **changes}
        size = ["--size", str(HEIGHT), str(WIDTH)]
        return ["analyse", *size, *(part for name, value in options.items() for part in (f"--{name}", str(value)))]

    def test_numbers_and_pictures(self, files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(self.line(files, tmp_path)) == 0
        table = json.loads((tmp_path / "analysis.json").read_text())
        assert table["forwards"] == 2
        assert table["blocks"] == [0, 1]
        assert all(value > 0 for value in table["amplitude"].values())
        assert math.isclose(sum(table["share"].values()), 1.0, rel_tol=1e-5)
        mass = torch.tensor(table["branch_mass"])
        assert mass.shape == (2, 5, 5)
        for name in ("amplitude", "attention-mass"):
            with Image.open(tmp_path / f"{name}.png") as picture:
                assert len(set(picture.convert("RGB").resize((60, 40)).get_flattened_data())) > 20
        assert "block   0  amplitude " in capsys.readouterr().out
        said = {name: table[name] for name in ("trajectory", "frames", "fps", "height", "width", "seed", "dtype")}
        shape = {"frames": 17, "fps": 12.0, "height": HEIGHT, "width": WIDTH}
        assert said == {"trajectory": str(files / "bend.json"), **shape, "seed": 0, "dtype": "float32"}
        assert table["versions"]["torch"] == torch.__version__

    def test_a_model_says_what_its_clips_are_like(self, files: Path, tmp_path: Path) -> None:
        model = tmp_path / "model"
        shutil.copytree(files / "model", model)
        write_clips(model, WorldClips(frames=13, height=HEIGHT, width=WIDTH, frame_rate_hz=6.0, prefix_frames=5), 4)
        line = ["analyse", "--model", model, "--branch", files / "branch", "--trajectory", files / "bend.json"]
        for out, more in (("a", []), ("b", ["--frames", "9", "--steps", "1"])):
            assert main([*map(str, line), "--out", str(tmp_path / out), *more]) == 0
        tables = [json.loads((tmp_path / name / "analysis.json").read_text()) for name in "ab"]
        assert [(table["frames"], table["fps"], table["height"], table["steps"]) for table in tables] == [
            (13, 6.0, HEIGHT, 8),
            (9, 6.0, HEIGHT, 1),
        ]

    def test_the_same_seed_gives_the_same_numbers(self, files: Path, tmp_path: Path) -> None:
        tables = []
        for name, seed in (("a", 0), ("b", 0), ("c", 1)):
            assert main(self.line(files, tmp_path / name, steps=1, seed=seed)) == 0
            tables.append(json.loads((tmp_path / name / "analysis.json").read_text()))
        assert tables[0] == tables[1]
        assert tables[0]["amplitude"] != tables[2]["amplitude"]

    def test_a_trained_transformer_takes_the_place_of_the_models(self, files: Path, tmp_path: Path) -> None:
        tiny_wan(num_layers=2, seed=1).save_pretrained(tmp_path / "trained")
        amplitudes = []
        for name, place in (("own", files / "model" / "transformer"), ("other", tmp_path / "trained")):
            assert main(self.line(files, tmp_path / name, steps=1, transformer=place)) == 0
            table = json.loads((tmp_path / name / "analysis.json").read_text())
            assert table["transformer"] == str(place)
            amplitudes.append(table["amplitude"])
        assert main(self.line(files, tmp_path / "default", steps=1)) == 0
        assert json.loads((tmp_path / "default" / "analysis.json").read_text())["amplitude"] == amplitudes[0]
        assert amplitudes[0] != amplitudes[1]

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"frames": 16}, "4k + 1"),
            ({"frames": 41}, "longer path"),
            ({"frames": 0}, "frames must be at least 1, got 0"),
            ({"fps": 0}, "fps must be positive and at most 1000, got 0"),
            ({"steps": 0}, "steps must be at least 1, got 0"),
            ({"model": "missing/"}, "model"),
            ({"branch": "/nowhere"}, "nowhere"),
            ({"device": "abacus"}, "device must be one of torch's"),
        ],
    )
    def test_mistakes_are_named_and_nothing_is_written(
        self, files: Path, tmp_path: Path, changes: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(self.line(files, tmp_path / "out", **changes)) == 2
        assert message in capsys.readouterr().err
        assert not (tmp_path / "out").exists()
