// The cursor that goes through frames: in real time behind the newest, or where somebody puts it.

const $ = (id) => document.getElementById(id);

export class Watch {
  // reel: {length, fps} of what is watched; show: draws the frame of the cursor
  constructor(reel, show) {
    Object.assign(this, { reel, show });
    this.cursor = 0;
    this.isLive = true;
    this.before = performance.now();
    $("cursor").addEventListener("input", () => this.seek(Number($("cursor").value)));
    $("cursor").addEventListener("pointerup", () => $("cursor").blur()); // so that the arrow keys drive again
    $("live").addEventListener("click", () => this.setLive(!this.isLive));
    $("play").addEventListener("click", () => this.play());
    const tick = (now) => {
      this.tick(now);
      requestAnimationFrame(tick);
    };
    requestAnimationFrame(tick);
  }

  get seconds() {
    return this.cursor / this.reel().fps;
  }

  tick(now) {
    const { length, fps } = this.reel();
    const frames = Math.floor(((now - this.before) / 1000) * fps);
    if (frames <= 0) return;
    this.before += (1000 * frames) / fps; // not now: the rest of a frame counts for the next one
    if (this.isLive && this.cursor < length - 1) {
      this.cursor = Math.min(this.cursor + frames, length - 1);
      this.show();
    }
  }

  setLive(live) {
    this.isLive = live;
    $("live").setAttribute("aria-pressed", String(live));
  }

  play() {
    this.cursor = 0;
    this.setLive(true);
    this.show();
  }

  goTo(frame) {
    this.cursor = Math.min(Math.max(frame, 0), Math.max(this.reel().length - 1, 0));
    this.show();
  }

  seek(frame) {
    this.setLive(false);
    this.goTo(frame);
  }

  // The slider and the time beside it.
  draw() {
    const { length } = this.reel();
    this.cursor = Math.min(this.cursor, Math.max(length - 1, 0));
    this.grow();
    $("cursor").value = this.cursor;
    $("time").textContent = `${this.seconds.toFixed(2)} s`;
    $("cursor").setAttribute("aria-valuetext", `${this.seconds.toFixed(2)} seconds`);
  }

  grow() {
    const { length } = this.reel();
    $("cursor").max = Math.max(length - 1, 0);
    $("cursor").disabled = length === 0;
  }
}
