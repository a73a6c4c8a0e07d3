// The connection to the server: messages as JSON, pictures as bytes. A connection that is lost is tried again.

const HEAD = 6; // bytes before a JPEG: kind, reel, frame
const RETRY_MS = 1500;

export class Link {
  constructor(hear, see, lose) {
    Object.assign(this, { hear, see, lose });
    this.connect();
  }

  connect() {
    const kind = location.protocol === "https:" ? "wss" : "ws";
    this.socket = new WebSocket(`${kind}://${location.host}/drive`);
    this.socket.binaryType = "arraybuffer";
    this.socket.addEventListener("message", ({ data }) => {
      if (typeof data === "string") this.hear(JSON.parse(data));
      else this.take(data);
    });
    this.socket.addEventListener("close", ({ reason }) => {
      this.lose(reason);
      setTimeout(() => this.connect(), RETRY_MS);
    });
  }

  take(data) {
    const head = new DataView(data, 0, HEAD);
    const picture = new Blob([new Uint8Array(data, HEAD)], { type: "image/jpeg" });
    this.see(head.getUint8(0), head.getUint8(1), head.getUint32(2), picture);
  }

  get isOpen() {
    return this.socket.readyState === WebSocket.OPEN;
  }

  send(message) {
    if (this.isOpen) this.socket.send(JSON.stringify(message));
  }
}
