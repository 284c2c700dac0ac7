/** The tab of the server: nodes, queue, cache, drafts, use and slow requests, live while it is shown. */

import { getJson } from "./api.js";
import { Chart } from "./chart.js";
import { el, show } from "./dom.js";
import * as views from "./server_views.js";
import { StatusStream } from "./status_stream.js";
import { count, plural } from "./words.js";

const SAMPLED_MS = 1000, ASKED_EVERY = 5, NUM_SLOWEST = 8;

/** The tab of the server. */
export class ServerView {
  /**
   * @param {HTMLElement} place
   * @param {(error: object|null) => void} onLost Called with null when the server answers again.
   */
  constructor(place, onLost) {
    this._place = place;
    this._speed = new Chart(["tokens/s generated", "prompt tokens/s"]);
    this._load = new Chart(["rows", "queued requests"]);
    this._cache = this._slowest = null;
    this._stream = new StatusStream((status) => {
      onLost(null);
      this._status = status;
      this._lost = null;
      this._draw();
    }, (error) => {
      this._lost = error;
      onLost(error);
      this._draw();
    });
  }

  /** Open the stream and ask for what it does not have. */
  open() {
    this.close();
    this._stream.open();
    this._ticks = 0;
    this._timer = setInterval(() => this._tick(), SAMPLED_MS);
    this._tick();
  }

  close() {
    this._stream.close();
    clearInterval(this._timer);
    this._before = null;
  }

  _tick() {
    if (this._ticks % ASKED_EVERY === 0) this._ask();
    this._ticks += 1;
    if (!this._status || this._lost) return;
    const sum = (name) => this._status.engines.reduce((all, { engine }) => all + engine[name], 0);
    const now = { at: performance.now(), generated: sum("num_output_tokens"), prompt: sum("num_prompt_tokens") };
    if (this._before) {
      const passed = (now.at - this._before.at) / 1000;
      this._rates = ["generated", "prompt"].map((name) => Math.max(0, (now[name] - this._before[name]) / passed));
      this._speed.add(this._rates);
      this._load.add([this._status.num_running, this._status.num_waiting]);
    }
    this._before = now;
    this._draw();
  }

  async _ask() {
    const view = async (path, make) => {
      try {
        return make(await getJson(path));
      } catch (error) {
        return error.status ? el("p.quiet", {}, error.message) : null;
      }
    };
    const [cache, slow] = await Promise.all([
      view("v1/cache", views.cache),
      view(`v1/requests?slowest=${NUM_SLOWEST}`, ({ data }) => views.slowest(data)),
    ]);
    this._cache = cache ?? this._cache;
    this._slowest = slow ?? this._slowest;
    this._draw();
  }

  _draw() {
    const status = this._status;
    if (!status) {
      const text = this._lost ? this._lost.message : "Asking the server…";
      return show(this._place, [el("p.note", {}, text)]);
    }
    const copy = (part) => part?.cloneNode(true);
    show(this._place, [
      this._head(status),
      el("div.cards", {},
        views.card("Tokens a second", this._speedWords(), this._speed.draw(), scale(this._speed)),
        views.card("Rows and queue", this._loadWords(status), this._load.draw(), scale(this._load)),
        ...views.nodes(status.engines), views.queue(status), ...[copy(this._cache)].filter(Boolean),
        views.drafts(status.engines), views.use(status), ...[copy(this._slowest)].filter(Boolean)),
    ]);
  }

  _head({ model, ready, key, is_administrative: isAdministrative, ingress }) {
    const who = key ? `You use the key “${key}”` : "You use no key";
    const sees = isAdministrative ? "and see everything." : "and see figures only, no texts, names and ids.";
    const inFlight = ingress.reduce((all, { num_in_flight: num }) => all + num, 0);
    const drains = ingress.some(({ is_draining: is }) => is) ? " The server is shutting down." : "";
    return el("p.head", { role: "status" },
      `${model} is ${ready ? "ready" : "not ready"}; ${plural(inFlight, "answer")} in progress.${drains} ${who} ${sees}`);
  }

  _speedWords() {
    const [generated, prompt] = this._rates ?? [0, 0];
    return el("p", {}, el("span.mark.line0"), `${count(generated)} generated `, el("span.mark.line1"), `${count(prompt)} of prompts computed`);
  }

  _loadWords({ num_running: running, num_waiting: waiting }) {
    return el("p", {}, el("span.mark.line0"), `${plural(running, "row")} `, el("span.mark.line1"), `${plural(waiting, "request")} in the queue`);
  }
}

const scale = (chart) => el("p.quiet", {}, `the last ${chart.minutes} minutes; the height is ${count(chart.most)}`);
