"""A held key drives as fast as the page plays, however fast the model is."""

import time

import pytest
from studio.studio_browser import Person
from studio.studio_server import AHEAD, RELEASED, Page

from merope.studio.playback import Playback

RATE_HZ, FIRST, BLOCK = 16.0, 9, 12


def test_frames_are_played_one_after_the_other_and_none_while_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, playback = 100.0, Playback(RATE_HZ)
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    assert playback.left_s == 0.0
    playback.add(8)
    playback.add(4)
    assert playback.left_s == 0.75
    now_s = 100.5
    assert playback.left_s == 0.25
    now_s = 200.0
    playback.add(8)
    assert playback.left_s == 0.5  # it stood in between
    playback.skip()
    assert playback.left_s == 0.0


def test_blocks_are_not_made_long_before_they_are_played(page: Page) -> None:
    began_s, blocks = time.monotonic(), 4
    page.begin()
    page.send(AHEAD)
    for _ in range(blocks):
        page.block()
    page.send(RELEASED)
    page.until("state", state="ready")
    played_before_last_s = (FIRST + BLOCK * (blocks - 2)) / RATE_HZ  # one block is left when the last one is begun
    assert time.monotonic() - began_s > played_before_last_s


def test_a_key_that_is_pressed_while_the_page_plays_steers_the_next_block(
    page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    page.begin()
    with monkeypatch.context() as patched:
        patched.setattr(Playback, "left_s", 100.0)
        page.send(AHEAD, {"do": "answer"})
        page.until("refused")  # the answer to what the server does not know
        page.send(AHEAD | {"yaw_rate_deg_s": -15}, {"do": "answer"})
        page.until("refused")
        assert page.count("made") == 0
    page.send(RELEASED)  # the tap is not forgotten
    assert page.block()["held"][-1][1] == -15.0
    page.until("state", state="ready")
    assert page.count("made") == 1
    with monkeypatch.context() as patched:
        patched.setattr(Playback, "left_s", 100.0)
        page.send(AHEAD, {"do": "undo"})  # nothing else waits
        assert page.until("undone")["frames"] == FIRST


def test_the_page_plays_at_the_rate_of_the_video_whatever_that_of_the_screen(person: Person) -> None:
    script = """
        const done = arguments[0];
        import("/page/watch.js").then(({ Watch }) => {
          const watch = { before: 0, cursor: 0, isLive: true, reel: () => ({ length: 1000, fps: 16 }), show() {} };
          for (let now = 0; now <= 10_000; now += 1000 / 60) Watch.prototype.tick.call(watch, now);
          done(watch.cursor);
        });
    """
    assert person.driver.execute_async_script(script) in (159, 160)
