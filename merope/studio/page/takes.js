// Takes: videos of several paths side by side, with their errors.

import { element } from "/page/element.js";
import { Reel, Screen } from "/page/reel.js";

const $ = (id) => document.getElementById(id);
const COLOURS = ["#ff7ac6", "#7ee081", "#b59bff", "#ff9b6a"];
const VIEWS = { made: "generated", true: "what the camera would truly see" };

export class Takes {
  constructor() {
    this.reels = new Map(); // by number
    $("takes").append(element("p", { className: "empty", textContent: "No takes yet: draw a path and generate." }));
  }

  get longest() {
    return Math.max(0, ...[...this.reels.values()].map((take) => take.length));
  }

  get fps() {
    return Math.max(1, ...[...this.reels.values()].map((take) => take.fps));
  }

  begin({ reel, path, given, fps, title, street }, session) {
    const take = new Reel(fps);
    const figures = Object.keys(VIEWS).filter((view) => street || view === "made").map((view) => this.figure(reel, VIEWS[view]));
    Object.assign(take, { path, given, number: reel, street, verdict: undefined });
    take.screens = figures.map((figure) => new Screen(figure.firstElementChild));
    take.numbers = element("dl", { className: "numbers" });
    const link = (kind) => element("a", { href: `/sessions/${session}/take-${reel}.${kind}`, download: `take-${reel}.${kind}`, textContent: kind });
    take.report = Object.assign(link("html"), { textContent: "report", hidden: true });
    take.card = element("article", { className: "screen take", id: `take-${reel}` },
      element("h2", { textContent: `Take ${reel}: ${title}` }),
      element("div", { className: street ? "pair" : "single" }, ...figures),
      take.numbers,
      element("p", { className: "links" }, "Save", ...["mp4", "json", "tum"].map(link), take.report));
    take.card.style.setProperty("--take", COLOURS[reel - 1]);
    this.reels.get(reel)?.card.remove();
    this.reels.set(reel, take);
    $("takes").querySelector(".empty")?.remove();
    $("takes").append(take.card);
    this.showNumbers(take, 0);
  }

  figure(reel, words) {
    const canvas = element("canvas", { width: 256, height: 144 });
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", `Take ${reel}: ${words}`);
    return element("figure", {}, canvas, element("figcaption", { textContent: words }));
  }

  judged(message) {
    const take = this.reels.get(message.reel);
    take.found = message.found;
    take.verdict = message;
    take.report.hidden = false;
  }

  // Their files ended with the connection.
  endSaving() {
    for (const link of $("takes").querySelectorAll(".links a")) {
      link.setAttribute("aria-disabled", "true");
      link.removeAttribute("href");
    }
  }

  show(cursor) {
    for (const take of this.reels.values()) {
      const frame = Math.min(cursor, take.length - 1);
      take.screens[0].show(take.made[frame]);
      take.screens[1]?.show(take.truth(frame));
      this.showNumbers(take, frame);
    }
  }

  showNumbers(take, frame) {
    const { verdict } = take, of = (value, digits, unit) => (value === null || value === undefined ? "–" : `${value.toFixed(digits)}${unit}`);
    if (!take.street) {
      take.numbers.hidden = true; // there is no true street to measure against
      return;
    }
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

  // What the map shows.
  layers(cursor) {
    return [...this.reels.values()].flatMap((take) => {
      const colour = COLOURS[take.number - 1];
      const found = take.found.filter((row) => row[0] <= cursor);
      return [{ rows: take.path, colour, thin: true }, { rows: found, colour, dotted: true }];
    });
  }
}
