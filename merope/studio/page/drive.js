// The drive: its frames, what is beside them, its paths from above, and its numbers.

import { Reel, Screen } from "/page/reel.js";

const $ = (id) => document.getElementById(id);
const SAVES = { "save-video": "mp4", "save-path": "json", "save-tum": "tum", "save-report": "html" };
const FITTED = 400; // last rows of the path that the map shows
const AHEAD_M = 15; // of the camera, too

export class Drive {
  constructor(map) {
    this.map = map;
    this.reel = new Reel(12);
    this.made = new Screen($("made"));
    this.truth = new Screen($("true"));
    this.world = undefined; // its number; null after a video
    this.fitted = 0;
    this.topSpeed = 20;
  }

  get hasStreet() {
    return this.world !== null;
  }

  begun({ world, given }, { fps, width, height }, fovDeg) {
    this.reel.clear();
    this.made.clear();
    this.truth.clear();
    Object.assign(this, { world, fovDeg, fitted: 0, blockSeconds: undefined, offPath: undefined });
    Object.assign(this.reel, { fps, given });
    for (const canvas of [$("made"), $("true")]) canvas.style.aspectRatio = `${width} / ${height}`;
    $("undo").disabled = true;
    this.map.setWorld(world);
  }

  frames({ first, path, held }) {
    path.forEach((row, k) => {
      this.reel.path[first + k] = row;
      this.reel.held[first + k] = held[k];
    });
  }

  finished({ seconds, undo }) {
    this.blockSeconds = seconds;
    $("undo").disabled = !undo;
  }

  seen({ found, lost, off_m: off }, session) {
    this.reel.found.push(...found);
    for (const frame of lost) this.reel.lost.add(frame);
    this.offPath = off;
    this.setSaving("save-report", session);
  }

  undone({ frames, undo }) {
    this.reel.cut(frames);
    $("undo").disabled = !undo;
    this.offPath = undefined;
    if (this.reel.found.length === 0) this.setSaving("save-report", undefined);
  }

  // What can be saved: everything but the report, which needs something measured.
  begunSaving(session) {
    for (const id of Object.keys(SAVES)) this.setSaving(id, id === "save-report" ? undefined : session);
  }

  endSaving() {
    for (const id of Object.keys(SAVES)) this.setSaving(id, undefined);
  }

  setSaving(id, session) {
    $(id).setAttribute("aria-disabled", String(session === undefined));
    if (session === undefined) $(id).removeAttribute("href");
    else $(id).href = `/sessions/${session}/drive.${SAVES[id]}`;
  }

  show(cursor, style) {
    const { reel } = this, seconds = (cursor / reel.fps).toFixed(2), kind = cursor < reel.given ? "given" : "generated";
    this.made.show(reel.made[cursor]);
    this.truth.show(reel.truth(cursor));
    $("made-caption").textContent = `${kind}, frame ${cursor + 1} of ${reel.length}`;
    $("made").setAttribute("aria-label", `Video, ${kind}: frame ${cursor + 1} of ${reel.length}, ${seconds} s`);
    $("true").setAttribute("aria-label", `What the camera would truly see at ${seconds} s`);
    this.showNumbers(cursor);
    this.showMap(cursor, style);
  }

  showNumbers(cursor) {
    const [speed, yaw] = this.reel.held[cursor] ?? [0, 0], { blockSeconds, offPath } = this;
    $("speed").textContent = Math.abs(speed).toFixed(1);
    $("speed-words").textContent = `${speed.toFixed(1)} metres per second`;
    $("gauge-value").style.strokeDasharray = `${(100 * Math.abs(speed)) / this.topSpeed} 200`;
    $("yaw").textContent = `${yaw.toFixed(0)} °/s`;
    $("driven").textContent = `${this.reel.metresUntil(cursor).toFixed(1)} m`;
    $("seconds").textContent = blockSeconds === undefined ? "–" : `${blockSeconds.toFixed(1)} s`;
    $("off").textContent = offPath === undefined ? "–" : offPath === null ? "not found" : `${offPath.toFixed(2)} m`;
  }

  showMap(cursor, style) {
    const { reel, map } = this, row = reel.path[cursor], last = reel.path.at(-1);
    map.points = [];
    map.layers = [
      { rows: reel.path, colour: style("--commanded") },
      { rows: reel.found.filter((found) => found[0] <= cursor), colour: style("--driven"), dotted: true },
    ];
    map.camera = row === undefined ? undefined : { row, fovDeg: this.fovDeg };
    if (this.fitted !== reel.path.length && row !== undefined) {
      this.fitted = reel.path.length;
      map.fit([...reel.path.slice(-FITTED), [0, row[1], row[2] + AHEAD_M]]);
    }
    map.draw();
    if (last === undefined) return;
    const recovered = this.hasStreet ? `; ${reel.found.length} poses recovered from the video` : "";
    $("map").setAttribute("aria-label", `Paths from above: ${last[2].toFixed(1)} m ahead of the start, `
      + `${Math.abs(last[1]).toFixed(1)} m to the ${last[1] < 0 ? "left" : "right"}, heading ${last[3].toFixed(0)}°${recovered}`);
  }
}
