"use strict";

// Tables: one <tbody> per entry, so that an opened clip moves together with its row.

const FIRST_DIRECTION = { text: "ascending", lower: "descending", higher: "ascending", number: "ascending" };

function sortBy(head, direction) {
  const table = head.closest("table");
  const column = head.cellIndex;
  const kind = head.dataset.kind;
  const sign = direction === "ascending" ? 1 : -1;
  // An undefined number is worse than any: first where the worst come first, last otherwise.
  const missing = kind === "higher" ? -Infinity : Infinity;
  const key = (body) => {
    const cell = body.rows[0].cells[column];
    if (kind === "text") return cell.textContent.trim();
    return cell.dataset.v === "" ? missing : Number(cell.dataset.v);
  };
  const compare = kind === "text"
    ? (a, b) => a.key.localeCompare(b.key, "en", { numeric: true })
    : (a, b) => (a.key === b.key ? 0 : a.key < b.key ? -1 : 1);
  const entries = Array.from(table.tBodies, (body) => ({ body, key: key(body) }));
  entries.sort((a, b) => sign * compare(a, b));
  table.append(...entries.map((entry) => entry.body));
  for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", direction);
}

for (const head of document.querySelectorAll("table.sortable thead th")) {
  head.querySelector("button").addEventListener("click", () => {
    const before = head.getAttribute("aria-sort");
    const first = FIRST_DIRECTION[head.dataset.kind];
    const opposite = before === "ascending" ? "descending" : "ascending";
    sortBy(head, before === null ? first : opposite);
  });
}

// Clips: details are text until they are first asked for, so that a page of a thousand videos opens at once.

function setOpen(body, open) {
  const button = body.querySelector("button.open");
  button.setAttribute("aria-expanded", String(open));
  let detail = body.querySelector("tr.detail");
  if (open && detail === null) {
    detail = document.createElement("tr");
    detail.className = "detail";
    detail.id = `${body.id}-detail`;
    button.setAttribute("aria-controls", detail.id);
    const cell = detail.insertCell();
    cell.colSpan = 99;
    const inside = document.createElement("div");
    inside.className = "inside";
    inside.innerHTML = body.querySelector("script").textContent;
    for (const video of inside.querySelectorAll("video")) {
      video.addEventListener("error", () => video.closest("figure").remove()); // the page was moved: frames remain
    }
    cell.append(inside);
    body.append(detail);
  }
  if (detail !== null) detail.hidden = !open;
}

const clips = Array.from(document.querySelectorAll("tbody.clip"));

for (const body of clips) {
  const button = body.querySelector("button.open");
  button.addEventListener("click", () => setOpen(body, button.getAttribute("aria-expanded") === "false"));
}

for (const dot of document.querySelectorAll(".spread circle")) {
  dot.addEventListener("click", () => {
    const body = clips.find((clip) => clip.dataset.name === dot.dataset.clip);
    document.querySelector("form.controls").reset();
    choose();
    setOpen(body, true);
    clips.forEach((clip) => clip.classList.toggle("found", clip === body));
    body.scrollIntoView({ block: "center" });
    body.querySelector("button.open").focus({ preventScroll: true });
  });
}

// Controls.

const control = (id) => document.getElementById(id);

function choose() {
  const part = control("name").value.toLowerCase();
  const manoeuvre = control("manoeuvre")?.value ?? "";
  const onlyProblems = control("only-problems").checked;
  let shown = 0;
  for (const body of clips) {
    body.hidden = !body.dataset.name.toLowerCase().includes(part)
      || (manoeuvre !== "" && body.dataset.manoeuvre !== manoeuvre)
      || (onlyProblems && body.dataset.problems === "0");
    shown += body.hidden ? 0 : 1;
  }
  control("shown").textContent = `${shown} of ${clips.length} clips`;
}

function showMetric() {
  const table = document.querySelector("table.clips");
  const metric = control("metric").value;
  table.dataset.metric = metric;
  for (const cell of table.querySelectorAll(".m")) cell.hidden = !cell.classList.contains(`m-${metric}`);
}

control("name").addEventListener("input", choose);
control("only-problems").addEventListener("change", choose);
control("manoeuvre")?.addEventListener("change", choose);
control("metric")?.addEventListener("change", showMetric);
document.querySelector("form.controls").addEventListener("submit", (event) => event.preventDefault());
choose();
if (control("metric")) showMetric();

// Something to see before the first click: the worst clip that has pictures.
const first = clips.find((body) => body.querySelector("script").textContent.includes("<img"));
if (first !== undefined) setOpen(first, true);
