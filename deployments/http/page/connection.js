/** Tells whether the server answers, at the top of the page. */

const ASKED_MS = 5000, AWAY_MS = 1500;

/** Asks whether the server is ready, more often while it is not. */
export class Connection {
  /**
   * @param {HTMLElement} place
   * @param {() => void} onBack Called when the server answers again.
   */
  constructor(place, onBack) {
    this._place = place;
    this._onBack = onBack;
  }

  /** Ask now and from now on. */
  async watch() {
    clearTimeout(this._timer);
    if (!document.hidden) this.tell(await reasonNotReady());
    this._timer = setTimeout(() => this.watch(), this._place.hidden ? ASKED_MS : AWAY_MS);
  }

  /** @param {string|null} reason Why the server does not serve; null if it does. */
  tell(reason) {
    const wasAway = !this._place.hidden;
    this._place.hidden = reason === null;
    if (this._place.textContent !== (reason ?? "")) this._place.textContent = reason ?? "";
    if (wasAway && reason === null) this._onBack();
  }
}

async function reasonNotReady() {
  try {
    const response = await fetch("health/ready", { cache: "no-store" });
    if (response.ok) return null;
    const { reason, error } = await response.json();
    return `The server is not ready: ${reason ?? error?.message ?? response.status}`;
  } catch {
    return "The server does not answer. The page tries again and goes on as soon as it does.";
  }
}
