// The street from above, in metres: x to the right, z ahead. Tiles of the street lie below the paths.

const TILE_M = 100;
const LEAST_M = 50; // that the picture is wide
const MARGIN_M = 10;
const GRID_M = 10; // between lines, where no street is known

export class BirdsEye {
  constructor(canvas) {
    this.canvas = canvas;
    this.world = undefined; // its number; null where no street is known
    this.tiles = new Map();
    this.layers = []; // {rows, colour, dotted}
    this.camera = undefined; // {row, fovDeg}
    this.points = []; // that can be dragged
    this.middle = [0, 20];
    this.width = LEAST_M;
    new ResizeObserver(() => this.draw()).observe(canvas);
  }

  setWorld(world) {
    if (world === this.world) return;
    this.world = world;
    this.tiles.clear();
    this.draw();
  }

  // Show all of these rows, and a little around them.
  fit(rows) {
    const rights = rows.map((row) => row[1]), aheads = rows.map((row) => row[2]);
    const shape = this.canvas.clientWidth / Math.max(this.canvas.clientHeight, 1) || 1;
    const low = [Math.min(...rights), Math.min(...aheads)], high = [Math.max(...rights), Math.max(...aheads)];
    this.middle = [(low[0] + high[0]) / 2, (low[1] + high[1]) / 2];
    this.width = Math.max(LEAST_M, high[0] - low[0] + 2 * MARGIN_M, (high[1] - low[1] + 2 * MARGIN_M) * shape);
  }

  get scale() {
    return this.canvas.clientWidth / this.width; // pixels of a metre
  }

  pixel(right, ahead) {
    return [
      this.canvas.clientWidth / 2 + (right - this.middle[0]) * this.scale,
      this.canvas.clientHeight / 2 - (ahead - this.middle[1]) * this.scale,
    ];
  }

  metres(x, y) {
    return [
      this.middle[0] + (x - this.canvas.clientWidth / 2) / this.scale,
      this.middle[1] - (y - this.canvas.clientHeight / 2) / this.scale,
    ];
  }

  draw() {
    const ratio = window.devicePixelRatio || 1;
    const wide = Math.round(this.canvas.clientWidth * ratio), high = Math.round(this.canvas.clientHeight * ratio);
    if (wide === 0) return;
    if (this.canvas.width !== wide || this.canvas.height !== high) {
      this.canvas.width = wide;
      this.canvas.height = high;
    }
    const pen = this.canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, wide, high);
    if (this.world === null) this.drawGrid(pen);
    else this.drawTiles(pen);
    for (const layer of this.layers) this.drawPath(pen, layer);
    for (const point of this.points) this.drawPoint(pen, point);
    if (this.camera !== undefined) this.drawCamera(pen, this.camera);
    this.drawScale(pen);
  }

  drawTiles(pen) {
    if (this.world === undefined) return;
    const [left, top] = this.metres(0, 0);
    const [right, bottom] = this.metres(this.canvas.clientWidth, this.canvas.clientHeight);
    for (let x = Math.floor(left / TILE_M); x <= Math.floor(right / TILE_M); x += 1) {
      for (let z = Math.floor(bottom / TILE_M); z <= Math.floor(top / TILE_M); z += 1) {
        const picture = this.tile(x, z);
        if (!picture.complete || picture.naturalWidth === 0) continue;
        const [px, py] = this.pixel(x * TILE_M, (z + 1) * TILE_M);
        pen.drawImage(picture, px, py, TILE_M * this.scale + 0.5, TILE_M * this.scale + 0.5);
      }
    }
  }

  drawGrid(pen) {
    const { clientWidth: wide, clientHeight: high } = this.canvas;
    const [left, top] = this.metres(0, 0), [right, bottom] = this.metres(wide, high);
    pen.strokeStyle = "rgba(255, 255, 255, .16)";
    pen.lineWidth = 1;
    pen.beginPath();
    for (let x = Math.ceil(left / GRID_M) * GRID_M; x <= right; x += GRID_M) {
      pen.moveTo(this.pixel(x, 0)[0], 0);
      pen.lineTo(this.pixel(x, 0)[0], high);
    }
    for (let z = Math.ceil(bottom / GRID_M) * GRID_M; z <= top; z += GRID_M) {
      pen.moveTo(0, this.pixel(0, z)[1]);
      pen.lineTo(wide, this.pixel(0, z)[1]);
    }
    pen.stroke();
  }

  tile(x, z) {
    const name = `${x},${z}`;
    if (!this.tiles.has(name)) {
      const picture = new Image();
      picture.addEventListener("load", () => this.draw());
      picture.src = `/map?world=${this.world}&x=${x}&z=${z}`;
      this.tiles.set(name, picture);
    }
    return this.tiles.get(name);
  }

  drawPath(pen, { rows, colour, dotted, thin }) {
    if (rows.length === 0) return;
    const pixels = rows.map((row) => this.pixel(row[1], row[2]));
    pen.lineJoin = "round";
    pen.lineCap = "round";
    for (const [style, width] of [["rgba(0, 0, 0, .55)", thin ? 4 : 6], [colour, thin ? 2 : 3]]) {
      pen.strokeStyle = style;
      pen.fillStyle = style;
      pen.lineWidth = width;
      pen.beginPath();
      if (dotted) {
        for (const [x, y] of pixels) {
          pen.moveTo(x + width / 2 + 0.7, y);
          pen.arc(x, y, width / 2 + 0.7, 0, 7);
        }
        pen.fill();
      } else {
        for (const [x, y] of pixels) pen.lineTo(x, y);
        pen.stroke();
      }
    }
  }

  drawPoint(pen, { right, ahead, label, chosen }) {
    const [x, y] = this.pixel(right, ahead);
    this.drawDot(pen, x, y, 8, chosen ? "#ffffff" : "#ffb020");
    this.drawWords(pen, label, x + 13, y + 4);
  }

  // Where the camera is, where it looks, and how wide.
  drawCamera(pen, { row, fovDeg }) {
    const [x, y] = this.pixel(row[1], row[2]);
    const half = (Math.min(fovDeg, 170) * Math.PI) / 360, ahead = (row[3] * Math.PI) / 180 - Math.PI / 2;
    const reach = 46;
    pen.fillStyle = "rgba(255, 255, 255, .35)";
    pen.beginPath();
    pen.moveTo(x, y);
    pen.arc(x, y, reach, ahead - half, ahead + half);
    pen.fill();
    this.drawDot(pen, x, y, 6, "#ffffff");
  }

  drawDot(pen, x, y, radius, colour) {
    pen.fillStyle = colour;
    pen.strokeStyle = "rgba(0, 0, 0, .8)";
    pen.lineWidth = 2;
    pen.beginPath();
    pen.arc(x, y, radius, 0, 7);
    pen.fill();
    pen.stroke();
  }

  drawScale(pen) {
    const metres = [5, 10, 20, 50, 100, 200].find((one) => one * this.scale > 50) ?? 500;
    const y = this.canvas.clientHeight - 14;
    for (const [style, width] of [["rgba(0, 0, 0, .7)", 5], ["#ffffff", 2]]) {
      pen.strokeStyle = style;
      pen.lineWidth = width;
      pen.beginPath();
      pen.moveTo(14, y);
      pen.lineTo(14 + metres * this.scale, y);
      pen.stroke();
    }
    this.drawWords(pen, `${metres} m`, 20 + metres * this.scale, y + 4);
  }

  drawWords(pen, words, x, y) {
    pen.font = "600 13px system-ui, sans-serif";
    pen.lineWidth = 3;
    pen.strokeStyle = "rgba(0, 0, 0, .75)";
    pen.strokeText(words, x, y);
    pen.fillStyle = "#ffffff";
    pen.fillText(words, x, y);
  }
}
