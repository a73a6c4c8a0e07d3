// Draw: points in the view from above, a path that a car can drive past them, and takes of several paths side by side.

import { Reel, Screen } from "/page/reel.js";

const $ = (id) => document.getElementById(id);
export const TAKE_COLOURS = ["#ff7ac6", "#7ee081", "#b59bff", "#ff9b6a"];
const GRAB_PX = 16; // around a point
const TRACE_MS = 80; // between two questions while a point is dragged
const SPEED_M_S = 8;
const STEP_M = 5; // from a point to one that is added without a mouse

const element = (tag, fields = {}, ...children) => {
  const made = Object.assign(document.createElement(tag), fields);
  made.append(...children);
  return made;
};

export class Draw {
  // ask: sends a message; setting: world and lens; changed: something on the map is new
  constructor(map, ask, setting, changed) {
    Object.assign(this, { map, ask, setting, changed });
    this.points = []; // [right, ahead, speed]
    this.path = []; // as the car would drive it
    this.isDropped = false;
    this.takes = new Map(); // by reel
    this.chosen = -1;
    const canvas = map.canvas;
    canvas.addEventListener("pointerdown", (event) => this.grab(event));
    canvas.addEventListener("pointermove", (event) => this.move(event));
    for (const end of ["pointerup", "pointercancel"]) canvas.addEventListener(end, () => (this.chosen = -1));
    $("add-point").addEventListener("click", () => this.addNext());
    $("clear-points").addEventListener("click", () => this.clear());
    $("generate").addEventListener("click", () => this.generate());
    $("stop").addEventListener("click", () => this.ask({ do: "stop" }));
    $("pose-file").addEventListener("change", () => this.drop($("pose-file").files[0]));
    window.addEventListener("dragover", (event) => {
      event.preventDefault();
      document.body.classList.add("dropping");
    });
    window.addEventListener("dragleave", () => document.body.classList.remove("dropping"));
    window.addEventListener("drop", (event) => {
      event.preventDefault();
      document.body.classList.remove("dropping");
      this.drop(event.dataTransfer.files[0]);
    });
  }

  place(event) {
    const box = this.map.canvas.getBoundingClientRect();
    return this.map.metres(event.clientX - box.left, event.clientY - box.top).map((value) => Math.round(value * 10) / 10);
  }

  grab(event) {
    if (!this.isShown || event.button !== 0) return;
    const [right, ahead] = this.place(event);
    const near = (point) => Math.hypot(point[0] - right, point[1] - ahead) * this.map.scale < GRAB_PX;
    this.chosen = this.points.findIndex(near);
    if (this.chosen < 0) {
      this.chosen = this.points.length;
      this.points.push([right, ahead, this.points.at(-1)?.[2] ?? SPEED_M_S]);
    }
    this.map.canvas.setPointerCapture(event.pointerId);
    this.edited();
  }

  move(event) {
    if (this.chosen < 0) return;
    this.points[this.chosen].splice(0, 2, ...this.place(event));
    this.edited();
  }

  addNext() {
    const last = this.points.at(-1) ?? [0, 0, SPEED_M_S];
    this.points.push([last[0], last[1] + STEP_M, last[2]]);
    this.edited();
  }

  clear() {
    this.points = [];
    this.path = [];
    this.isDropped = false;
    this.edited();
  }

  edited() {
    this.list();
    this.retrace();
  }

  retrace() {
    this.isDropped = false;
    if (this.points.length === 0) this.told("No path yet.", false);
    else {
      clearTimeout(this.asking);
      this.asking = setTimeout(() => this.ask({ do: "trace", points: this.points }), TRACE_MS);
    }
    this.changed();
  }

  list() {
    const rows = this.points.map((point, k) => {
      const cells = ["metres to the right", "metres ahead", "metres per second"].map((words, place) => {
        const input = element("input", { type: "number", step: place === 2 ? 1 : 0.5, value: point[place] });
        input.setAttribute("aria-label", `Point ${k + 1}, ${words}`);
        input.addEventListener("change", () => {
          point[place] = Number(input.value);
          this.retrace();
        });
        return element("td", {}, input);
      });
      const remove = element("button", { type: "button", textContent: "×" });
      remove.setAttribute("aria-label", `Remove point ${k + 1}`);
      remove.addEventListener("click", () => {
        this.points.splice(k, 1);
        this.edited();
      });
      return element("tr", {}, element("td", { textContent: k + 1 }), ...cells, element("td", {}, remove));
    });
    $("points").replaceChildren(...rows);
  }

  told(words, can) {
    $("traced").textContent = words;
    $("generate").disabled = !can;
  }

  traced({ path, seconds, whole_s: whole, metres }) {
    this.path = path;
    const cut = whole > seconds + 1e-6 ? `; the path lasts ${whole.toFixed(1)} s, its beginning is driven` : "";
    this.told(`${metres.toFixed(1)} m in ${seconds.toFixed(2)} s${cut}.`, true);
    this.changed();
  }

  refused(text) {
    this.path = [];
    this.told(text, false);
    this.changed();
  }

  async drop(file) {
    if (file === undefined) return;
    const words = new URLSearchParams({ name: file.name, metric: $("metric").checked ? "1" : "0" });
    const answer = await fetch(`/sessions/${this.session}/path?${words}`, { method: "POST", body: file });
    $("pose-file").value = "";
    if (!answer.ok) {
      this.refused(await answer.text());
      return;
    }
    this.points = [];
    this.list();
    this.isDropped = true;
    this.traced(await answer.json());
    $("traced").textContent = `${file.name}: ${$("traced").textContent}`;
    this.map.fit(this.path);
    this.changed();
  }

  generate() {
    this.ask({ do: "take", ...this.setting(), ...(this.isDropped ? { dropped: true } : { points: this.points }) });
  }

  // Takes.

  begin({ reel, path, given, world, lens }, fps) {
    const take = new Reel(fps);
    Object.assign(take, { path, given, number: reel, verdict: undefined });
    const colour = TAKE_COLOURS[reel - 1];
    const canvases = ["generated", "what the camera would truly see"].map((words) => {
      const canvas = element("canvas", { width: 256, height: 144 });
      canvas.setAttribute("role", "img");
      canvas.setAttribute("aria-label", `Take ${reel}: ${words}`);
      return element("figure", {}, canvas, element("figcaption", { textContent: words }));
    });
    take.screens = canvases.map((figure) => new Screen(figure.firstElementChild));
    take.numbers = element("dl", { className: "numbers" });
    const links = ["mp4", "json", "tum"].map((kind) =>
      element("a", { href: `/sessions/${this.session}/take-${reel}.${kind}`, download: `take-${reel}.${kind}`, textContent: kind }));
    const title = element("h2", { textContent: `Take ${reel}: world ${world}, ${lens.fov_deg}° ${lens.kind}` });
    take.card = element("article", { className: "screen take", id: `take-${reel}` }, title,
      element("div", { className: "pair" }, ...canvases), take.numbers, element("p", { className: "links" }, "Save", ...links));
    take.card.style.setProperty("--take", colour);
    this.takes.get(reel)?.card.remove();
    this.takes.set(reel, take);
    $("takes").querySelector(".empty")?.remove();
    $("takes").append(take.card);
    this.showNumbers(take, 0);
    return take;
  }

  judged(message) {
    const take = this.takes.get(message.reel);
    take.found = message.found;
    take.verdict = message;
  }

  show(cursor) {
    for (const take of this.takes.values()) {
      const frame = Math.min(cursor, take.length - 1);
      take.screens[0].show(take.made[frame]);
      take.screens[1].show(take.truth(frame));
      this.showNumbers(take, frame);
    }
  }

  showNumbers(take, frame) {
    const { verdict } = take, of = (value, digits, unit) => (value === null || value === undefined ? "–" : `${value.toFixed(digits)}${unit}`);
    const here = verdict?.off_m[frame], left = verdict?.left_frame;
    const values = {
      rot: of(verdict?.rot_deg, 2, "°"),
      "metric tr": of(verdict?.metric_tr_percent, 1, " %"),
      "off here": verdict === undefined ? "–" : here === undefined ? "no pose" : `${here.toFixed(2)} m`,
      "left the path": verdict === undefined ? "measuring …" : left === null ? "never" : `at ${(left / take.fps).toFixed(2)} s`,
    };
    const rows = Object.entries(values).map(([name, value]) =>
      element("div", {}, element("dt", { textContent: name }), element("dd", { textContent: value })));
    take.numbers.replaceChildren(...rows);
  }

  get longest() {
    return Math.max(0, ...[...this.takes.values()].map((take) => take.length));
  }

  // What the map shows.
  layers(cursor, colour) {
    const layers = [{ rows: this.path, colour }];
    for (const take of this.takes.values()) {
      layers.push({ rows: take.path, colour: TAKE_COLOURS[take.number - 1], thin: true });
      layers.push({ rows: take.found.filter((row) => row[0] <= cursor), colour: TAKE_COLOURS[take.number - 1], dotted: true });
    }
    return layers;
  }

  handles() {
    return this.points.map(([right, ahead, speed], k) => ({ right, ahead, label: `${k + 1}: ${speed} m/s`, chosen: k === this.chosen }));
  }
}
