// What a driver holds down: arrow keys, WASD, or the buttons of the pad. Several at once are added up.

const KEYS = {
  ArrowUp: "up", ArrowDown: "down", ArrowLeft: "left", ArrowRight: "right", w: "up", s: "down", a: "left", d: "right",
};

export class Pad {
  constructor(group, changed) {
    this.held = new Set();
    this.changed = changed;
    this.buttons = [...group.querySelectorAll("[data-key]")];
    for (const button of this.buttons) {
      const name = button.dataset.key;
      button.addEventListener("pointerdown", (event) => {
        button.setPointerCapture(event.pointerId);
        this.press(name);
      });
      for (const end of ["pointerup", "pointercancel", "lostpointercapture"]) {
        button.addEventListener(end, () => this.release(name));
      }
      // A click without a pointer comes from the keyboard or a screen reader: one block.
      button.addEventListener("click", (event) => {
        if (event.detail === 0) {
          this.press(name);
          this.release(name);
        }
      });
      button.addEventListener("contextmenu", (event) => event.preventDefault());
    }
    window.addEventListener("keydown", (event) => this.key(event, true));
    window.addEventListener("keyup", (event) => this.key(event, false));
    window.addEventListener("blur", () => this.releaseAll());
  }

  key(event, down) {
    const name = KEYS[event.key.length === 1 ? event.key.toLowerCase() : event.key];
    if (name === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
    if (down && event.target.matches("input, select, textarea")) return;
    if (down) event.preventDefault();
    if (down) this.press(name);
    else this.release(name);
  }

  press(name) {
    if (this.held.has(name)) return;
    this.held.add(name);
    this.tell(true);
  }

  release(name) {
    if (this.held.delete(name)) this.tell(false);
  }

  releaseAll() {
    if (this.held.size === 0) return;
    this.held.clear();
    this.tell(false);
  }

  tell(pressed) {
    for (const button of this.buttons) button.classList.toggle("held", this.held.has(button.dataset.key));
    this.changed(pressed);
  }

  // 1, 0 or −1 ahead, and the same to the right. A car does not turn on the spot: a turn alone goes ahead.
  get direction() {
    const side = (this.held.has("right") ? 1 : 0) - (this.held.has("left") ? 1 : 0);
    const ahead = (this.held.has("up") ? 1 : 0) - (this.held.has("down") ? 1 : 0);
    return [ahead === 0 && side !== 0 && !this.held.has("up") ? 1 : ahead, side];
  }
}
