/** The parts of the server's state. Each takes figures of the API and returns elements. */

import { el } from "./dom.js";
import { bytes, count, plural, seconds, share } from "./words.js";

const ACCOUNTS = {
  weights: "weights", row: "rows", prefill: "prompts in progress", transient: "work of a step",
  prefix_cache: "prefix cache", image_cache: "images", unaccounted: "unaccounted", free: "free",
};

const PROPOSERS = { mtp: "MTP head" };

const MAX_SHORT = 16, MAX_MISSES = 5;

/** @param {string} title @param {...Node} content @returns {HTMLElement} */
export const card = (title, ...content) => el("section.card", {}, el("h2", {}, title), ...content);

/** @param {string[]} head @param {string[][]} rows @returns {HTMLElement} */
export function table(head, rows) {
  const cells = (tag, row) => el("tr", {}, ...row.map((cell) => (
    el(cell.length <= MAX_SHORT ? `${tag}.short` : tag, tag === "th" ? { scope: "col" } : {}, cell))));
  return el("div.scroll", { tabIndex: 0, role: "group", "aria-label": head.join(", ") },
    el("table", {}, el("thead", {}, cells("th", head)), el("tbody", {}, ...rows.map((row) => cells("td", row)))));
}

const quiet = (text) => el("p.quiet", {}, text);

/** @param {object[]} engines The section of the status. @returns {HTMLElement[]} A card for each node. */
export function nodes(engines) {
  if (!engines.length) return [card("Nodes", quiet("No engine answers: the model is being loaded, or its node is lost."))];
  return engines.map(({ engine_id: id, engine }, i) => card(
    engines.length > 1 || id ? `Node ${(id ?? String(i + 1)).replace(/^([^:]{8})[^:]*/, "$1")}` : "Node",
    el("p", {}, stateOf(engine)),
    el("p", {}, `${count(engine.num_running)} of ${plural(engine.max_running, "row")} running, ` +
      `${count(engine.num_waiting)} of ${count(engine.max_queue)} places in the queue taken`),
    ...memory(engine.admission)));
}

function stateOf({ state, load_progress: progress, work, unavailable, error }) {
  if (error || unavailable) return error ?? unavailable;
  if (state !== "ready") return `${state}, ${share(progress, 1)} done`;
  if (!work) return "ready, idle";
  const name = work.name ? `: ${work.name}` : "";
  return `ready, the device works${name}${work.is_late ? ` (late: ${seconds(work.seconds)})` : ""}`;
}

function memory(admission) {
  if (!admission?.limit_bytes) return [];
  const parts = Object.entries(ACCOUNTS).map(([name, words]) => ({ name, words, num: admission[`${name}_bytes`] ?? 0 }));
  const shown = parts.filter(({ num }) => num > 0);
  const told = ({ words, num }) => `${words} ${bytes(num)}`;
  return [
    el("div.bar", { role: "img", "aria-label": `Memory: ${shown.map(told).join(", ")}` },
      ...shown.map(({ name, num }) => el(`span.mem-${name}`, { style: { flexGrow: String(num) } }))),
    el("ul.legend", {}, ...shown.map((part) => el("li", {}, el(`span.mark.mem-${part.name}`), told(part))),
      el("li.quiet", {}, `limit ${bytes(admission.limit_bytes)}`)),
  ];
}

/** @param {object} status @returns {HTMLElement} The queued requests with positions and waits. */
export function queue({ engines, num_waiting: numWaiting, is_administrative: isAdministrative }) {
  const queued = engines.flatMap(({ engine }) => engine.queue ?? []);
  const expected = engines.map(({ engine }) => engine.expected_wait_s).filter((one) => one !== null && one !== undefined);
  const wait = numWaiting && expected.length ? ` A new one is expected to wait ${seconds(Math.min(...expected))}.` : "";
  const rows = queued.map((one) => [count(one.position), one.request_id, count(one.num_rows), bytes(one.num_bytes),
    seconds(one.waited_s), one.expected_wait_s === null ? "unknown" : seconds(one.expected_wait_s),
    one.preempted ? "preempted" : ""]);
  const lines = numWaiting ? `${plural(numWaiting, "request waits", "requests wait")}.${wait}` : "No request waits.";
  return card("Queue", el("p", {}, lines),
    ...(rows.length ? [table(["position", "request", "rows", "memory", "waited", "will wait", ""], rows)] : []),
    ...(numWaiting && !isAdministrative ? [quiet("Only an administrative key sees them one by one.")] : []));
}

/** @param {object} cache The body of /v1/cache. @returns {HTMLElement} */
export function cache({ totals, engines }) {
  const asked = totals.hits + totals.misses;
  const reasons = Object.entries(totals.misses_by_reason).filter(([, num]) => num).map(([why, num]) => `${why} ${count(num)}`);
  const misses = [...new Set(engines.flatMap(({ recent_misses: found = [] }) => found.map(({ explanation }) => explanation)))];
  const off = engines.map(({ off: reason }) => reason).find(Boolean);
  return card("Prefix cache",
    ...(off ? [el("p", {}, `Off: ${off}.`)] : []),
    el("p", {}, `${share(totals.hits, asked)} of ${plural(asked, "prompt")} had a cached prefix; ` +
      `${plural(totals.cached_tokens, "token")} were not computed again.`),
    el("p", {}, `${plural(totals.entries, "snapshot")}, ${bytes(totals.bytes)} of ${bytes(totals.max_bytes)}; ` +
      `${count(totals.evicted)} evicted.`),
    ...(reasons.length ? [el("p", {}, `Misses by reason: ${reasons.join(", ")}.`)] : []),
    ...(misses.length ? [el("h3", {}, "Last misses"),
      el("ul", {}, ...misses.slice(0, MAX_MISSES).map((sentence) => el("li", {}, sentence)))] : []));
}

/** @param {object[]} engines The section of the status. @returns {HTMLElement} */
export function drafts(engines) {
  const rows = engines.flatMap(({ engine: { speculation } }) => Object.entries(speculation ?? {})
    .filter(([, found]) => found?.num_drafted !== undefined)
    .map(([name, found]) => {
      const now = speculation.proposer === name ? `${plural(speculation.num_draft_tokens, "token")} a step` : "";
      return [PROPOSERS[name] ?? name.replaceAll("_", " "), found.reason ?? (now || found.mode || "–"), count(found.num_drafted), count(found.num_accepted),
        share(found.num_accepted, found.num_drafted)];
    }));
  return card("Drafts", rows.length ? table(["proposer", "now", "drafted", "accepted", "share"], rows)
    : quiet("Nothing is drafted by this model."));
}

/** @param {object} status @returns {HTMLElement} Keys, refusals and errors of the node that answers. */
export function use({ answers, is_administrative: isAdministrative }) {
  const keys = Object.entries(answers.keys).map(([name, used]) => [name === "none" ? "no key" : name,
    count(used.num_answers), count(used.num_prompt_tokens), count(used.num_cached_tokens), count(used.num_completion_tokens)]);
  const told = (found) => Object.entries(found).map(([name, num]) => `${name} ${count(num)}`).join(", ") || "none";
  return card("Use of this node",
    keys.length ? table(["key", "answers", "prompt tokens", "cached", "generated"], keys) : quiet("No answer yet."),
    ...(isAdministrative || !answers.keys.all ? [] : [quiet("Only an administrative key sees the keys by name.")]),
    el("p", {}, `Refusals by limit: ${told(answers.refusals)}.`),
    el("p", {}, `Errors: ${told(answers.errors)}.`));
}

/** @param {object[]} found The slowest requests. @returns {HTMLElement} */
export function slowest(found) {
  const rows = found.map((one) => [seconds(one.seconds), one.first_token_s === null ? "–" : seconds(one.first_token_s),
    one.outcome, one.key || "–", one.why]);
  const shown = card("Slowest of the last requests",
    rows.length ? table(["in all", "first token", "outcome", "key", "why"], rows) : quiet("No request has ended yet."));
  shown.classList.add("wide");
  return shown;
}
