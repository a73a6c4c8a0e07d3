// What a drive or a take begins with: the model, a street or a video, the lens, the prompt and the steps.

import { upload } from "/page/upload.js";

const $ = (id) => document.getElementById(id);
const PREVIEW_MS = 150; // after the last change
const FOV_DEG = { pinhole: 70, fisheye: 140 }; // to begin with

export class Setting {
  // changed: something is new that a path or a map depends on
  constructor(changed) {
    this.changed = changed;
    this.isDrawing = false;
    // Why the files of a drive are not on the server, in words; undefined for those that are.
    this.problems = { video: "Choose a video, or drop one on the page.", cameras: "Choose a pose file of the video." };
    this.sendings = 0;
    this.newest = {}; // of them, by kind
    this.pictures = 0;
    $("model").addEventListener("change", () => this.setModel());
    $("source").addEventListener("change", () => this.setSource());
    $("lens").addEventListener("change", () => this.setFov(FOV_DEG[$("lens").value]));
    $("fov").addEventListener("input", () => this.preview());
    $("fov").addEventListener("pointerup", () => $("fov").blur());
    $("steps").addEventListener("change", () => (this.steps[this.mode] = Number($("steps").value)));
    $("video-moves").addEventListener("change", () => this.setSource());
    $("video-speed").addEventListener("change", () => this.changed());
    for (const id of ["video-file", "video-poses"]) {
      $(id).addEventListener("change", () => this.send(id === "video-file" ? "video" : "cameras"));
    }
    $("world").addEventListener("change", () => {
      this.preview();
      this.changed();
    });
  }

  // The server says what there is. Files that it was sent ended with the connection before.
  connected({ session, models, fovs_deg: fovs, most, worlds, no_truth: noTruth }) {
    const isSame = JSON.stringify(models) === JSON.stringify(this.models);
    Object.assign(this, { session, models, fovs, mostBytes: most.video_bytes });
    $("world").max = worlds - 1;
    $("steps").max = most.steps;
    $("prompt").maxLength = most.prompt;
    $("video-speed").max = most.speed_m_s;
    $("no-truth").textContent = `${noTruth[0].toUpperCase()}${noTruth.slice(1)}.`;
    if (isSame) {
      this.sendAgain();
      return;
    }
    $("model").replaceChildren(...models.map(({ name }, k) => new Option(name, k)));
    $("model-field").hidden = models.length === 1;
    this.setModel();
  }

  get number() {
    return Number($("model").value);
  }

  get model() {
    return this.models[this.number];
  }

  get mode() {
    return this.isDrawing ? "draw" : "drive";
  }

  get isStreet() {
    return $("source").value === "world";
  }

  setModel() {
    const { lens, text, prompt, steps, driving_steps: driving } = this.model;
    this.steps = { drive: driving, draw: steps };
    $("steps").value = this.steps[this.mode];
    $("prompt-field").hidden = !text;
    $("no-prompt").hidden = text;
    $("prompt").value = prompt;
    $("lens").value = lens.kind;
    this.describe();
    this.setFov(lens.fov_deg);
    this.sendAgain();
    this.changed();
  }

  setDrawing(drawing) {
    this.isDrawing = drawing;
    $("steps").value = this.steps?.[this.mode] ?? 1;
  }

  describe() {
    const { name, width, height, fps, causal } = this.model;
    const item = (textContent, className = "") => Object.assign(document.createElement("li"), { textContent, className });
    const items = [name, `${width}×${height}`, `${fps} frames/s`].map((fact) => item(fact));
    if (!causal) items.push(item("this model was not trained to stream", "warn"));
    $("facts").replaceChildren(...items);
  }

  setSource() {
    for (const field of document.querySelectorAll(".of-world")) field.hidden = !this.isStreet;
    for (const field of document.querySelectorAll(".of-video")) field.hidden = this.isStreet;
    const isPosed = $("video-moves").value === "file";
    for (const field of document.querySelectorAll(".of-speed")) field.hidden = this.isStreet || isPosed;
    for (const field of document.querySelectorAll(".of-poses")) field.hidden = this.isStreet || !isPosed;
    this.preview();
    this.changed();
  }

  // A video that was dropped on the page.
  take(files) {
    $("video-file").files = files;
    $("source").value = "video";
    this.setSource();
    this.send("video");
  }

  sendAgain() {
    for (const kind of ["video", "cameras"]) this.send(kind);
  }

  async send(kind) {
    const file = $(kind === "video" ? "video-file" : "video-poses").files[0];
    if (file === undefined) return;
    this.sendings += 1;
    const mine = (this.newest[kind] = this.sendings);
    this.problems[kind] = $("video-notes").textContent = `Sending ${file.name} …`;
    const { problem, notes } = file.size > this.mostBytes
      ? { problem: `it is larger than ${this.mostBytes >> 20} MB` }
      : await upload(this.session, kind, file, this.number, $("video-metric").checked);
    if (mine !== this.newest[kind]) return; // another file was chosen meanwhile
    $("video-notes").textContent = `${file.name}: ${problem ?? (notes.join("; ") || "its cameras are read")}.`.replace(/\.+$/, ".");
    this.problems[kind] = problem === undefined ? undefined : $("video-notes").textContent;
    this.preview();
    this.changed();
  }

  // Why nothing can begin with what is chosen: the server may still have a file of before.
  get problem() {
    if (this.isStreet) return undefined;
    return this.problems.video ?? ($("video-moves").value === "file" ? this.problems.cameras : undefined);
  }

  // What a message to the server says.
  get value() {
    const common = {
      model: this.number,
      lens: { kind: $("lens").value, fov_deg: Number($("fov").value) },
      steps: Number($("steps").value),
      prompt: this.model.text ? $("prompt").value : "",
    };
    if (this.isStreet) return { ...common, world: $("world").valueAsNumber };
    const isPosed = $("video-moves").value === "file";
    return { ...common, video: isPosed ? { posed: true } : { speed_m_s: $("video-speed").valueAsNumber } };
  }

  get world() {
    return this.isStreet && $("world").checkValidity() ? $("world").valueAsNumber : null;
  }

  get fovDeg() {
    return Number($("fov").value);
  }

  setFov(degrees) {
    [$("fov").min, $("fov").max] = this.fovs[$("lens").value];
    $("fov").value = degrees;
    this.preview();
  }

  preview() {
    $("fov-out").textContent = `${$("fov").value}°`;
    clearTimeout(this.previewing);
    this.previewing = setTimeout(() => {
      const model = this.number, picture = $("preview");
      if (this.isStreet && this.world !== null) {
        picture.alt = "What this lens sees at the start of the street";
        picture.src = `/preview?model=${model}&world=${this.world}&lens=${$("lens").value}&fov=${this.fovDeg}`;
      } else if (!this.isStreet && this.problems.video === undefined) {
        this.pictures += 1;
        picture.alt = "The first frame of your video, as the model is given it";
        picture.src = `/sessions/${this.session}/video.jpg?model=${model}&again=${this.pictures}`;
      }
    }, PREVIEW_MS);
  }
}
