// A reel: the frames of one video with all that belongs to each of them. Reel 0 is the drive.

const MOST_PICTURES = 4000; // that a page keeps; the oldest are let go of

export class Reel {
  constructor(fps) {
    this.fps = fps;
    this.clear();
  }

  clear() {
    this.made = []; // Blob of each frame
    this.seen = new Map(); // Blob by frame: what the camera would truly see
    this.path = []; // [frame, right, ahead, heading] as commanded
    this.held = []; // [speed, yaw rate] at each frame
    this.found = []; // like path, as recovered from the video
    this.lost = new Set(); // frames in which no pose was found
    this.given = 0; // first frames that were given to the model
  }

  get length() {
    return this.made.length;
  }

  add(frame, blob) {
    this.made[frame] = blob;
    if (frame >= MOST_PICTURES) this.made[frame - MOST_PICTURES] = undefined;
  }

  cut(frames) {
    this.made.length = frames;
    this.path.length = frames;
    this.held.length = frames;
    this.found = this.found.filter((row) => row[0] < frames);
    for (const frame of [...this.seen.keys()]) if (frame >= frames) this.seen.delete(frame);
    for (const frame of [...this.lost]) if (frame >= frames) this.lost.delete(frame);
  }

  // What the camera would truly see: frames that were given are true themselves.
  truth(frame) {
    if (frame < this.given) return this.made[frame];
    for (let at = frame; at >= this.given; at -= 1) if (this.seen.has(at)) return this.seen.get(at);
    return this.made[this.given - 1];
  }

  metresUntil(frame) {
    let metres = 0;
    for (let k = Math.max(this.given, 1); k <= frame && k < this.path.length; k += 1) {
      metres += Math.hypot(this.path[k][1] - this.path[k - 1][1], this.path[k][2] - this.path[k - 1][2]);
    }
    return metres;
  }
}

// Pictures that come in quick succession: only the last one that was asked for is drawn.
export class Screen {
  constructor(canvas) {
    this.canvas = canvas;
    this.asked = 0;
    this.shown = undefined;
  }

  async show(blob) {
    if (blob === this.shown || blob === undefined) return;
    this.shown = blob;
    this.asked += 1;
    const mine = this.asked;
    const picture = await createImageBitmap(blob);
    if (mine === this.asked) {
      if (this.canvas.width !== picture.width || this.canvas.height !== picture.height) {
        this.canvas.width = picture.width;
        this.canvas.height = picture.height;
      }
      this.canvas.getContext("2d").drawImage(picture, 0, 0);
    }
    picture.close();
  }

  clear() {
    this.asked += 1;
    this.shown = undefined;
    this.canvas.getContext("2d").clearRect(0, 0, this.canvas.width, this.canvas.height);
  }
}
