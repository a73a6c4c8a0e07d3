"""Rendering on a CPU: one thread per block, whatever the number of threads, which stays what it was."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from street_views import DRIVE, PINHOLE

import merope.world.render
from merope.geometry.cameras import Cameras
from merope.world.render import render
from merope.world.scene import World
from merope.world.threads import run_each

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_images_do_not_depend_on_the_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(merope.world.render.RAYS_PER_BLOCK, "cpu", 500)  # several blocks of every frame
    renders = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        renders.append(render(World(3), Cameras(DRIVE, PINHOLE), 36, 64))
    assert torch.equal(renders[0].image, renders[1].image)
    assert torch.equal(renders[0].depth_m, renders[1].depth_m)


def test_blocks_of_rows_and_whole_frames_give_one_image(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = render(World(3), Cameras(DRIVE, PINHOLE), 36, 64)
    monkeypatch.setitem(merope.world.render.RAYS_PER_BLOCK, "cpu", 500)
    torch.testing.assert_close(render(World(3), Cameras(DRIVE, PINHOLE), 36, 64).image, whole.image, rtol=0, atol=1e-4)


def test_operations_on_a_block_stay_in_one_thread() -> None:
    torch.set_num_threads(3)
    seen: list[int] = []
    run_each(lambda _: seen.append(torch.get_num_threads()), [(n,) for n in range(8)], CPU)
    assert seen == [1] * 8


@pytest.mark.parametrize("fails", [False, True])
def test_the_number_of_threads_stays_what_it_was(fails: bool) -> None:
    def work(number: int) -> None:
        if fails and number == 2:
            raise RuntimeError("block 2")

    torch.set_num_threads(3)
    if fails:
        with pytest.raises(RuntimeError, match="block 2"):
            run_each(work, [(n,) for n in range(8)], CPU)
    else:
        run_each(work, [(n,) for n in range(8)], CPU)
    assert torch.get_num_threads() == 3
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(torch.get_num_threads).result() == 3
