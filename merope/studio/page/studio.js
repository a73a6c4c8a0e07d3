// The page: what the server says goes to the drive, the takes and the map; what a person does goes to the server.

import { Draw } from "/page/draw.js";
import { Drive } from "/page/drive.js";
import { Link } from "/page/link.js";
import { BirdsEye } from "/page/map.js";
import { Pad } from "/page/pad.js";
import { Setting } from "/page/setting.js";
import { Takes } from "/page/takes.js";
import { Watch } from "/page/watch.js";

const $ = (id) => document.getElementById(id);
const TRUE = 1; // kind of picture
const RELEASED = { do: "steer", speed_m_s: 0, yaw_rate_deg_s: 0 };

const map = new BirdsEye($("map"));
const drive = new Drive(map);
const takes = new Takes();
const setting = new Setting(settingChanged);
const draw = new Draw(map, (message) => link.send(message), setting, show);
const watch = new Watch(() => (isDrawing() ? { length: takes.longest, fps: takes.fps } : drive.reel), show);
let session;
let hasDrive = false; // on the server, not only its frames here
let isPaused = false;

// What is shown.

function isDrawing() {
  return document.body.dataset.mode === "draw";
}

function setState(state, words) {
  $("state").dataset.state = state;
  if ($("state").textContent !== words) $("state").textContent = words;
}

function say(words) {
  $("notice").textContent = words;
  $("notice").hidden = words === "";
}

function setProgress(done, of) {
  const bar = $("progress");
  bar.hidden = done === undefined;
  bar.setAttribute("aria-valuemax", of ?? 0);
  bar.setAttribute("aria-valuenow", done ?? 0);
  $("step").textContent = done === undefined ? "" : `step ${done} of ${of}`;
  bar.firstElementChild.style.width = `${(100 * (done ?? 0)) / (of ?? 1)}%`;
}

function style(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function show() {
  watch.draw();
  document.body.dataset.street = (isDrawing() ? setting.isStreet : drive.hasStreet) ? "known" : "none";
  if (isDrawing()) showTakes();
  else if (drive.reel.length > 0) drive.show(watch.cursor, style);
}

function showTakes() {
  takes.show(watch.cursor);
  map.layers = [{ rows: draw.path, colour: style("--commanded") }, ...takes.layers(watch.cursor)];
  map.points = draw.handles();
  map.camera = { row: draw.path[watch.cursor] ?? [0, 0, 0, 0], fovDeg: setting.fovDeg };
  map.draw();
  $("map").setAttribute("aria-label", `From above: ${draw.points.length} points and ${takes.reels.size} takes`);
}

// What the server says.

const WORDS = {
  ready: () => (isDrawing() ? "Ready" : "Ready: hold ↑ to drive"),
  paused: () => "Paused",
  working: () => "Working …",
  waiting: ({ before: ahead }) => `Waiting: ${ahead === 1 ? "another page is" : `${ahead} other pages are`} before you`,
};

const HEARD = {
  hello(message) {
    const isFirst = session === undefined;
    session = draw.session = message.session;
    drive.topSpeed = message.most.speed_m_s;
    $("set-speed").max = message.most.speed_m_s;
    $("set-yaw").max = message.most.yaw_rate_deg_s;
    setting.connected(message);
    if (isFirst) begin();
    else {
      say("Connected again. The drive before ended with the connection; its frames can still be watched. Restart begins anew.");
      hasDrive = false;
      drive.endSaving();
      takes.endSaving();
      setState("ready", "Connected: restart to drive");
    }
  },
  state(message) {
    setState(message.state, WORDS[message.state](message));
    if (message.state !== "working") setProgress(undefined);
  },
  step: ({ done, of }) => setProgress(done, of),
  begun(message) {
    drive.begun(message, setting.models[message.model], setting.fovDeg);
    drive.begunSaving(session);
    hasDrive = true;
    watch.setLive(true);
    watch.goTo(0);
    say(message.notes.join("\n"));
  },
  frames: (message) => drive.frames(message),
  made(message) {
    drive.finished(message);
    show();
  },
  seen(message) {
    drive.seen(message, session);
    show();
  },
  undone(message) {
    drive.undone(message);
    watch.setLive(true);
    watch.goTo(message.frames - 1);
  },
  traced: (message) => draw.traced(message),
  take(message) {
    takes.begin(message, session);
    say(message.notes.join("\n"));
    watch.play();
  },
  judged(message) {
    takes.judged(message);
    show();
  },
  stopped: () => setProgress(undefined),
  refused: ({ text }) => (isDrawing() ? draw.refused(text) : say(text)),
  failed: ({ text }) => say(`Something went wrong in the server: ${text}`),
};

const link = new Link(
  (message) => HEARD[message.say](message),
  (kind, number, frame, picture) => {
    const reel = number === 0 ? drive.reel : takes.reels.get(number);
    if (kind === TRUE) reel.seen.set(frame, picture);
    else reel.add(frame, picture);
    if (frame === watch.cursor || reel.length === 1) show();
    else watch.grow();
  },
  (reason) => {
    setState("lost", reason === "" ? "The connection is lost; trying again …" : `Not connected: ${reason}`);
    setProgress(undefined);
    pad.releaseAll();
  },
);

// What the driver asks for.

function begin() {
  if (setting.problem !== undefined) {
    say(setting.problem);
    return;
  }
  setPaused(false);
  link.send({ do: "begin", ...setting.value });
}

function steer(pressed) {
  if (isDrawing()) return;
  const [ahead, side] = pad.direction;
  if (ahead === 0 && side === 0) {
    link.send(RELEASED);
    return;
  }
  if (!hasDrive) begin();
  if (isPaused) setPaused(false);
  watch.setLive(true);
  const speed = ahead * Number($("set-speed").value), yaw = side * Number($("set-yaw").value);
  link.send({ do: "steer", speed_m_s: speed, yaw_rate_deg_s: yaw, pressed });
}

function setPaused(paused) {
  isPaused = paused;
  $("pause").setAttribute("aria-pressed", String(paused));
  link.send({ do: "pause", paused });
}

const pad = new Pad(document.querySelector(".pad"), steer);
$("pause").addEventListener("click", () => setPaused(!isPaused));
$("undo").addEventListener("click", () => link.send({ do: "undo" }));
$("restart").addEventListener("click", begin);
$("setting").addEventListener("submit", (event) => {
  event.preventDefault();
  if (!isDrawing()) begin(); // Enter in a field sends the form also where its button is hidden
});

for (const [id, unit] of [["set-speed", "m/s"], ["set-yaw", "°/s"]]) {
  $(id).addEventListener("input", () => ($(`${id}-out`).textContent = `${$(id).value} ${unit}`));
  $(id).addEventListener("pointerup", () => $(id).blur()); // so that the arrow keys drive again
}

// Drive or draw.

function setMode(mode) {
  document.body.dataset.mode = mode;
  setting.setDrawing(mode === "draw");
  draw.isShown = mode === "draw";
  $("to-drive").setAttribute("aria-pressed", String(mode === "drive"));
  $("to-draw").setAttribute("aria-pressed", String(mode === "draw"));
  drive.fitted = watch.cursor = 0;
  if (mode === "draw") map.fit([...draw.path, [0, 0, -5], [0, 0, 45]]);
  map.setWorld(mode === "draw" ? setting.world : drive.world);
  if (mode === "draw" && draw.hasPath) draw.retrace();
  if ($("state").dataset.state === "ready") setState("ready", WORDS.ready());
  show();
}

function settingChanged() {
  if (!isDrawing()) return;
  map.setWorld(setting.world);
  draw.retrace();
}

$("to-drive").addEventListener("click", () => setMode("drive"));
$("to-draw").addEventListener("click", () => setMode("draw"));

// A file that is dropped anywhere: a video to begin with, or a path to drive.

window.addEventListener("dragover", (event) => {
  event.preventDefault();
  document.body.classList.add("dropping");
});
window.addEventListener("dragleave", () => document.body.classList.remove("dropping"));
window.addEventListener("drop", (event) => {
  event.preventDefault();
  document.body.classList.remove("dropping");
  const { files } = event.dataTransfer;
  if (files.length === 0) return;
  if (files[0].type.startsWith("video/")) setting.take(files);
  else {
    setMode("draw");
    draw.drop(files[0]);
  }
});

const SHORTCUTS = {
  " ": () => setPaused(!isPaused), u: () => $("undo").click(), r: () => $("restart").click(),
  ",": () => watch.seek(watch.cursor - 1), ".": () => watch.seek(watch.cursor + 1),
};

// A button that was clicked keeps no focus: Space would press it again.
window.addEventListener("click", ({ target, detail }) => {
  if (detail > 0) target.closest("button, a")?.blur();
});

window.addEventListener("keydown", (event) => {
  const does = SHORTCUTS[event.key.toLowerCase()];
  if (does === undefined || (isDrawing() && !",.".includes(event.key)) || event.repeat || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.matches("input, select, textarea, button, a")) return;
  event.preventDefault();
  does();
});
