"""The README's code runs as it stands, and its first screen is true."""

import re
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_code_blocks_run() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) >= 2
    names: dict[str, object] = {}
    for block in blocks:
        exec(block, names)
    out, v, u = names["out"], names["v"], names["u"]
    assert isinstance(out, torch.Tensor)
    assert isinstance(v, torch.Tensor)
    assert isinstance(u, torch.Tensor)
    assert out.shape == v.shape
    assert (u.mT @ u - torch.eye(128)).abs().max() < 1e-6


def test_commands_and_pictures_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", README, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    for page in pages:
        for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"
