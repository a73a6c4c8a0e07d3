// Draw: points in the view from above, or a pose file, and the path that a car can drive along them.

import { element } from "/page/element.js";
import { upload } from "/page/upload.js";

const $ = (id) => document.getElementById(id);
const GRAB_PX = 16; // around a point
const TRACE_MS = 80; // between two questions while a point is dragged
const SPEED_M_S = 8;
const STEP_M = 5; // from a point to one that is added without a mouse

export class Draw {
  // ask: sends a message; setting: what a take begins with; changed: something on the map is new
  constructor(map, ask, setting, changed) {
    Object.assign(this, { map, ask, setting, changed });
    this.points = []; // [right, ahead, speed]
    this.path = []; // as the car would drive it
    this.dropped = undefined; // the pose file that is driven instead of points
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
    $("path-notes").textContent = "";
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
    this.edited();
  }

  edited() {
    this.dropped = undefined;
    this.list();
    this.retrace();
  }

  get hasPath() {
    return this.dropped !== undefined || this.points.length > 0;
  }

  get route() {
    return { ...this.setting.value, ...(this.dropped === undefined ? { points: this.points } : { dropped: true }) };
  }

  // Ask what a car would drive. The answer comes as `traced` or `refused`.
  retrace() {
    clearTimeout(this.asking);
    if (this.dropped !== undefined && this.readFor !== this.setting.number) this.drop(this.dropped); // for another model
    else if (this.hasPath) this.asking = setTimeout(() => this.askAlong("trace"), TRACE_MS);
    else {
      this.path = [];
      this.told("No path yet.", false);
    }
    this.changed();
  }

  list() {
    const rows = this.points.map((point, k) => {
      const cells = ["metres to the right", "metres ahead", "metres per second"].map((words, place) => {
        const input = element("input", { type: "number", step: place === 2 ? 1 : 0.5, value: point[place] });
        input.setAttribute("aria-label", `Point ${k + 1}, ${words}`);
        input.addEventListener("change", () => {
          point[place] = input.valueAsNumber;
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
    const name = this.dropped === undefined ? "" : `${this.dropped.name}: `;
    const cut = whole > seconds + 1e-6 ? `; the path lasts ${whole.toFixed(1)} s, its beginning is driven` : "";
    this.told(`${name}${metres.toFixed(1)} m in ${seconds.toFixed(2)} s${cut}.`, true);
    if (this.isNew) this.map.fit([...path, [0, 0, -5], [0, 0, 45]]);
    this.isNew = false;
    this.changed();
  }

  refused(text) {
    this.path = [];
    this.told(text, false);
    this.changed();
  }

  // A pose file. What is odd about it stays on the page below the path.
  async drop(file) {
    if (file === undefined) return;
    this.readFor = this.setting.number;
    const { problem, notes } = await upload(this.session, "path", file, this.setting.number, $("metric").checked);
    $("pose-file").value = "";
    $("path-notes").textContent = (notes ?? []).join("\n");
    this.points = [];
    this.list();
    this.dropped = problem === undefined ? file : undefined;
    this.isNew = true;
    if (problem === undefined) this.retrace();
    else this.refused(problem);
  }

  generate() {
    this.askAlong("take");
  }

  askAlong(what) {
    const { problem } = this.setting;
    if (problem === undefined) this.ask({ do: what, ...this.route });
    else this.refused(problem);
  }

  // What the map shows.
  handles() {
    return this.points.map(([right, ahead, speed], k) => ({ right, ahead, label: `${k + 1}: ${speed} m/s`, chosen: k === this.chosen }));
  }
}
