/** An error below an answer, with what can be done: the seconds to wait, a new try, the settings. */

import { advice } from "./advice.js";
import { el } from "./dom.js";

/**
 * @param {object} error An ApiError, or its fields as they were kept.
 * @param {{retry: () => void, openSettings: () => void}} actions
 * @returns {HTMLElement}
 */
export function errorView(error, { retry, openSettings }) {
  const { text, opensSettings, canRetry } = advice(error);
  const wait = el("p.quiet", { role: "timer" });
  if (error.retryAfter) countDown(wait, error.until ?? Date.now() + 1000 * error.retryAfter);
  return el("div.error", { role: "alert" },
    el("p", {}, error.message),
    text && el("p", {}, text),
    wait,
    el("div.row", {},
      canRetry && el("button", { type: "button", on: { click: retry } }, "Try again"),
      opensSettings && el("button", { type: "button", on: { click: openSettings } }, "Open the settings")));
}

function countDown(place, until) {
  const tell = () => {
    const left = Math.ceil((until - Date.now()) / 1000);
    place.textContent = left > 0 ? `The server expects to have room in ${left} s.` : "You can try again now.";
    if (left > 0) setTimeout(tell, 250);
  };
  tell();
}
