/** Where the seconds of a request went, from GET /v1/requests/{id}. */

import { ApiError, getJson } from "./api.js";
import { el } from "./dom.js";
import { plural, seconds, share } from "./words.js";

const TRIES = 4, PAUSE_MS = 250;

/** Phases with a smaller share of the request's time are shown together. */
const LEAST_SHARE = 0.01;

const NAMES = {
  proxy: "in the HTTP proxy", body: "its body arrived", parse: "its body was read", place: "a place on a node was reserved",
  plan: "the prompt was prepared", engine: "the engine had it", handover: "it went to the engine",
  grammar: "the grammar was compiled", queue: "it waited in the queue", prefill: "the prompt was computed",
  decode: "the answer was generated", preempted: "it waited again after it had been preempted",
  return: "the tokens came back", send: "the rest was sent",
  rest: "everything else",
};

/**
 * Fetch a timeline; it is there when the answer has ended, which the client may see a moment sooner.
 * @param {string} requestId
 * @returns {Promise<object>}
 * @throws {ApiError}
 */
export async function fetchTimeline(requestId) {
  for (let left = TRIES; ; left -= 1) {
    try {
      return await getJson(`v1/requests/${encodeURIComponent(requestId)}`);
    } catch (error) {
      if (!(error instanceof ApiError) || error.status !== 404 || left === 1) throw error;
      await new Promise((resolve) => { setTimeout(resolve, PAUSE_MS); });
    }
  }
}

/** @param {object} timeline @returns {HTMLElement} Its sentence, and a bar for each phase. */
export function timelineView(timeline) {
  const isShown = (phase) => phase.seconds >= LEAST_SHARE * timeline.seconds;
  const shown = timeline.phases.filter(isShown);
  const rest = timeline.phases.filter((phase) => !isShown(phase)).reduce((sum, phase) => sum + phase.seconds, 0);
  const rows = [...shown, ...(rest ? [{ name: "rest", seconds: rest }] : [])].map((phase) => (
    el("tr", {},
      el("td", {}, NAMES[phase.name] ?? phase.name, facts(phase) && el("span.quiet", {}, `, ${facts(phase)}`)),
      el("td.number", {}, seconds(phase.seconds)),
      el("td", {}, el("span.length", { style: { width: share(phase.seconds, timeline.seconds).replace(" ", "") } })))));
  return el("div.timeline", {},
    el("p", {}, `${timeline.why}.`),
    el("table", {}, el("caption.hidden", {}, "Phases of the request"),
      el("tbody", {}, ...rows)));
}

function facts(phase) {
  switch (phase.name) {
    case "queue": case "preempted": return phase.num_ahead ? `${phase.num_ahead} before it` : "";
    case "prefill": return [plural(phase.num_tokens, "token"), phase.num_cached && `${phase.num_cached} cached`, phase.miss]
      .filter(Boolean).join(", ");
    case "decode": return [plural(phase.num_tokens, "token"), plural(phase.num_steps, "step"),
      phase.num_drafted && `${phase.num_accepted} of ${phase.num_drafted} drafts accepted`,
      phase.stalled_s && `${seconds(phase.stalled_s)} for prompts of others`].filter(Boolean).join(", ");
    case "plan": return phase.num_tokens ? plural(phase.num_tokens, "token") : "";
    default: return "";
  }
}
