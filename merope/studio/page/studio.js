import { Draw } from "/page/draw.js";
import { Link } from "/page/link.js";
import { BirdsEye } from "/page/map.js";
import { Pad } from "/page/pad.js";
import { Reel, Screen } from "/page/reel.js";

const $ = (id) => document.getElementById(id);
const TRUE = 1; // kind of picture
const RELEASED = { do: "steer", speed_m_s: 0, yaw_rate_deg_s: 0 };

const made = new Screen($("made"));
const truth = new Screen($("true"));
const map = new BirdsEye($("map"));
const drive = new Reel(12);
let about; // what the server says of its model
let session;
let current; // {world, lens} of the drive
let cursor = 0; // frame that is shown
let isLive = true; // the cursor goes on to the newest frame
let isPaused = false;
let blockSeconds;
let offPath;
let fitted = 0;
let isDrawing = false; // Draw is shown, not Drive

// What is shown.

function setState(state, words) {
  $("state").dataset.state = state;
  if ($("state").textContent !== words) $("state").textContent = words;
}

function say(words) {
  $("notice").textContent = words;
  $("notice").hidden = words === "";
}

function setProgress(share) {
  $("progress").hidden = share === undefined;
  $("progress").firstElementChild.style.width = `${100 * (share ?? 0)}%`;
}

function length() {
  return isDrawing ? draw.longest : drive.length;
}

function show() {
  const count = length();
  cursor = Math.min(cursor, Math.max(count - 1, 0));
  $("cursor").max = Math.max(count - 1, 0);
  $("cursor").value = cursor;
  $("cursor").disabled = count === 0;
  const seconds = cursor / drive.fps;
  $("time").textContent = `${seconds.toFixed(2)} s`;
  $("cursor").setAttribute("aria-valuetext", `${seconds.toFixed(2)} seconds`);
  if (isDrawing) showTakes();
  else if (count > 0) showDrive(seconds);
}

function showTakes() {
  draw.show(cursor);
  map.layers = draw.layers(cursor, style("--commanded"));
  map.points = draw.handles();
  map.camera = { row: draw.path[cursor] ?? [0, 0, 0, 0], fovDeg: setting().lens.fov_deg };
  map.draw();
  $("map").setAttribute("aria-label", `The street from above with ${draw.points.length} points and ${draw.takes.size} takes`);
}

function showDrive(seconds) {
  const [speed, yaw] = drive.held[cursor] ?? [0, 0];
  made.show(drive.made[cursor]);
  truth.show(drive.truth(cursor));
  const kind = cursor < drive.given ? "given" : "generated";
  $("made-caption").textContent = `${kind}, frame ${cursor + 1} of ${drive.length}`;
  $("made").setAttribute("aria-label", `Video, ${kind}: frame ${cursor + 1} of ${drive.length}, ${seconds.toFixed(2)} s`);
  $("true").setAttribute("aria-label", `What the camera would truly see at ${seconds.toFixed(2)} s`);
  showNumbers(speed, yaw);
  showMap();
}

function style(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function showNumbers(speed, yaw) {
  const metres = drive.metresUntil(cursor);
  $("speed").textContent = Math.abs(speed).toFixed(1);
  $("speed-words").textContent = `${speed.toFixed(1)} metres per second`;
  $("gauge-value").style.strokeDasharray = `${(100 * Math.abs(speed)) / about.most.speed_m_s} 200`;
  $("yaw").textContent = `${yaw.toFixed(0)} °/s`;
  $("driven").textContent = `${metres.toFixed(1)} m`;
  $("seconds").textContent = blockSeconds === undefined ? "–" : `${blockSeconds.toFixed(1)} s`;
  $("off").textContent = offPath === undefined ? "–" : offPath === null ? "not found" : `${offPath.toFixed(2)} m`;
}

function showMap() {
  map.points = [];
  map.layers = [
    { rows: drive.path, colour: style("--commanded") },
    { rows: drive.found.filter((row) => row[0] <= cursor), colour: style("--driven"), dotted: true },
  ];
  const row = drive.path[cursor];
  map.camera = row === undefined ? undefined : { row, fovDeg: current.lens.fov_deg };
  if (fitted !== drive.path.length && drive.path.length > 0) {
    fitted = drive.path.length;
    map.fit([...drive.path.slice(-400), [0, row[1], row[2] + 15]]);
  }
  map.draw();
  const last = drive.path.at(-1);
  $("map").setAttribute("aria-label", `Paths from above: ${last[2].toFixed(1)} m ahead of the start, `
    + `${Math.abs(last[1]).toFixed(1)} m to the ${last[1] < 0 ? "left" : "right"}, heading ${last[3].toFixed(0)}°; `
    + `${drive.found.length} poses recovered from the video`);
}

// The cursor goes on in real time.

let before = performance.now();

function tick(now) {
  const frames = Math.floor(((now - before) / 1000) * drive.fps);
  if (frames > 0) {
    before = now;
    if (isLive && cursor < length() - 1) {
      cursor = Math.min(cursor + frames, length() - 1);
      show();
    }
  }
  requestAnimationFrame(tick);
}

requestAnimationFrame(tick);

function setLive(live) {
  isLive = live;
  $("live").setAttribute("aria-pressed", String(live));
}

function seek(frame) {
  setLive(false);
  cursor = Math.min(Math.max(frame, 0), Math.max(length() - 1, 0));
  show();
}

$("cursor").addEventListener("input", () => seek(Number($("cursor").value)));
$("live").addEventListener("click", () => setLive(!isLive));
$("play").addEventListener("click", () => {
  cursor = 0;
  setLive(true);
  show();
});

// What the server says.

const WORDS = {
  ready: () => (isDrawing ? "Ready" : "Ready: hold ↑ to drive"),
  paused: () => "Paused",
  working: () => "Working …",
  waiting: ({ before: ahead }) => `Waiting: ${ahead === 1 ? "another page is" : `${ahead} other pages are`} before you`,
};

const HEARD = {
  hello(message) {
    const isFirst = about === undefined;
    about = message;
    session = draw.session = message.session;
    drive.fps = message.fps;
    describe();
    if (isFirst) {
      $("lens").value = message.lens.kind;
      setFovRange(message.lens.fov_deg);
      begin();
    } else {
      say("Connected again. The drive before ended with the connection; its frames can still be watched. Restart begins anew.");
      current = undefined;
      setSaving(false);
      setState("ready", "Connected: restart to drive");
    }
  },
  state(message) {
    setState(message.state, WORDS[message.state](message));
    if (message.state !== "working") setProgress(undefined);
  },
  step({ done, of }) {
    setProgress(done / of);
    setState("working", `Working: step ${done} of ${of}`);
  },
  begun({ world, notes }) {
    drive.clear();
    made.clear();
    truth.clear();
    cursor = fitted = 0;
    blockSeconds = offPath = undefined;
    setLive(true);
    map.setWorld(world);
    say(notes.join("\n"));
    setSaving(true);
  },
  block({ first, path, held, seconds, undo }) {
    if (first === 0) drive.given = path.length;
    else blockSeconds = seconds;
    path.forEach((row, k) => {
      drive.path[first + k] = row;
      drive.held[first + k] = held[k];
    });
    $("undo").disabled = !undo;
  },
  seen({ found, lost, off_m: off }) {
    drive.found.push(...found);
    for (const frame of lost) drive.lost.add(frame);
    offPath = off;
    show();
  },
  undone({ frames }) {
    drive.cut(frames);
    $("undo").disabled = true;
    offPath = undefined;
    setLive(true);
    cursor = frames - 1;
    show();
  },
  traced: (message) => draw.traced(message),
  take(message) {
    draw.begin(message, drive.fps);
    say(message.notes.join("\n"));
    cursor = 0;
    setLive(true);
  },
  judged(message) {
    draw.judged(message);
    show();
  },
  stopped: () => setProgress(undefined),
  refused: ({ text }) => (isDrawing ? draw.refused(text) : say(text)),
  failed: ({ text }) => say(`Something went wrong in the server: ${text}`),
};

const link = new Link(
  (message) => HEARD[message.say](message),
  (kind, reel, frame, picture) => {
    const of = reel === 0 ? drive : draw.takes.get(reel);
    if (kind === TRUE) of.seen.set(frame, picture);
    else of.add(frame, picture);
    if (frame === cursor || of.length === 1) show();
    else $("cursor").max = Math.max(length() - 1, 0);
  },
  (reason) => {
    setState("lost", reason === "" ? "The connection is lost; trying again …" : `Not connected: ${reason}`);
    setProgress(undefined);
    pad.releaseAll();
  },
);

function describe() {
  const facts = [about.model, `${about.width}×${about.height}`, `${about.fps} frames/s`, `${about.steps} steps`];
  const items = facts.map((fact) => Object.assign(document.createElement("li"), { textContent: fact }));
  if (!about.causal) {
    const text = "this model was not trained to stream";
    items.push(Object.assign(document.createElement("li"), { className: "warn", textContent: text }));
  }
  $("facts").replaceChildren(...items);
  $("world").max = about.worlds - 1;
  $("set-speed").max = about.most.speed_m_s;
  $("set-yaw").max = about.most.yaw_rate_deg_s;
  for (const canvas of [$("made"), $("true")]) canvas.style.aspectRatio = `${about.width} / ${about.height}`;
}

function setSaving(can) {
  for (const [id, kind] of [["save-video", "mp4"], ["save-path", "json"], ["save-tum", "tum"]]) {
    $(id).setAttribute("aria-disabled", String(!can));
    if (can) $(id).href = `/sessions/${session}/drive.${kind}`;
    else $(id).removeAttribute("href");
  }
}

// What the driver asks for.

function setting() {
  return { world: Number($("world").value), lens: { kind: $("lens").value, fov_deg: Number($("fov").value) } };
}

function begin() {
  current = setting();
  isPaused = false;
  $("pause").setAttribute("aria-pressed", "false");
  link.send({ do: "pause", paused: false });
  link.send({ do: "begin", ...current });
}

function steer(pressed) {
  if (isDrawing) return;
  const [ahead, side] = pad.direction;
  if (ahead === 0 && side === 0) {
    link.send(RELEASED);
    return;
  }
  if (current === undefined) begin();
  if (isPaused) setPaused(false);
  setLive(true);
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
  begin();
});

const draw = new Draw(map, (message) => link.send(message), setting, show);
$("takes").append(Object.assign(document.createElement("p"), { className: "empty", textContent: "No takes yet: draw a path and generate." }));

function setDrawing(drawing) {
  isDrawing = draw.isShown = drawing;
  for (const id of ["takes", "draw-panel"]) $(id).hidden = !drawing;
  for (const id of ["made-screen", "true-screen", "drive-panel", "apply"]) $(id).hidden = drawing;
  $("to-drive").setAttribute("aria-pressed", String(!drawing));
  $("to-draw").setAttribute("aria-pressed", String(drawing));
  cursor = fitted = 0;
  if (drawing) map.fit([...draw.path, [0, 0, -5], [0, 0, 45]]);
  map.setWorld(drawing ? setting().world : current?.world);
  if ($("state").dataset.state === "ready") setState("ready", WORDS.ready());
  show();
}

$("to-drive").addEventListener("click", () => setDrawing(false));
$("to-draw").addEventListener("click", () => setDrawing(true));

const SHORTCUTS = {
  " ": () => setPaused(!isPaused), u: () => $("undo").click(), r: () => $("restart").click(),
  ",": () => seek(cursor - 1), ".": () => seek(cursor + 1),
};

window.addEventListener("keydown", (event) => {
  const does = SHORTCUTS[event.key.toLowerCase()];
  if (does === undefined || (isDrawing && !",.".includes(event.key)) || event.repeat || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.matches("input, select, textarea, button, a")) return;
  event.preventDefault();
  does();
});

for (const [id, unit] of [["set-speed", "m/s"], ["set-yaw", "°/s"]]) {
  $(id).addEventListener("input", () => ($(`${id}-out`).textContent = `${$(id).value} ${unit}`));
  $(id).addEventListener("pointerup", () => $(id).blur()); // so that the arrow keys drive again
}

// The lens, and what it sees before anything is made.

let previewing;

function setFovRange(degrees) {
  const [low, high] = about.fovs_deg[$("lens").value];
  $("fov").min = low;
  $("fov").max = high;
  $("fov").value = degrees;
  preview();
}

function preview() {
  $("fov-out").textContent = `${$("fov").value}°`;
  clearTimeout(previewing);
  previewing = setTimeout(() => {
    const { world, lens } = setting();
    const picture = $("preview"), address = `/preview?world=${world}&lens=${lens.kind}&fov=${lens.fov_deg}`;
    if ($("world").checkValidity()) picture.src = address;
  }, 150);
}

$("lens").addEventListener("change", () => setFovRange($("lens").value === "fisheye" ? 140 : 70));
$("fov").addEventListener("input", preview);
$("fov").addEventListener("pointerup", () => $("fov").blur());
$("world").addEventListener("change", () => {
  preview();
  if (isDrawing && $("world").checkValidity()) map.setWorld(setting().world);
});
