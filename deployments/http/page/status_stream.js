/** The figures of the server, live from GET /v1/status/stream; opened again whenever it ends. */

import { ApiError, lost, request } from "./api.js";
import { events } from "./sse.js";

const LEAST_PAUSE_MS = 1000, MOST_PAUSE_MS = 10000;

/** One stream of figures, which can be switched on and off. */
export class StatusStream {
  /**
   * @param {(status: object) => void} onStatus Called with all figures when some have changed.
   * @param {(error: ApiError) => void} onLost Called when the stream cannot be opened or breaks off.
   */
  constructor(onStatus, onLost) {
    this._onStatus = onStatus;
    this._onLost = onLost;
    this._running = null;
  }

  /** Open the stream, again if it is open, as with another key. */
  open() {
    this.close();
    this._running = new AbortController();
    this._run(this._running.signal);
  }

  close() {
    this._running?.abort();
    this._running = null;
  }

  async _run(signal) {
    for (let pause = LEAST_PAUSE_MS; !signal.aborted; pause = Math.min(2 * pause, MOST_PAUSE_MS)) {
      try {
        await this._read(signal, () => { pause = LEAST_PAUSE_MS / 2; });
      } catch (error) {
        if (signal.aborted) return;
        this._onLost(lost(error));
      }
      await new Promise((resolve) => { setTimeout(resolve, pause); });
    }
  }

  async _read(signal, onEvent) {
    const response = await request("v1/status/stream", { signal });
    let status = {};
    for await (const { event, data } of events(response)) {
      status = event === "status" ? JSON.parse(data) : { ...status, ...JSON.parse(data) };
      onEvent();
      this._onStatus(status);
    }
  }
}
