/** An answer of the model: its thought, folded, its text, its tool calls, and below it the figures. */

import { el } from "./dom.js";
import { errorView } from "./error_view.js";
import { copyButton, rendered } from "./markdown.js";
import { fetchTimeline, timelineView } from "./timeline_view.js";
import { count, plural, seconds } from "./words.js";

const ENDS = {
  length: "The answer ends here because it has as many tokens as allowed.",
  stopped: "You have stopped this answer.",
};

const LEAST_PAUSE_MS = 40, SHARE_OF_TIME = 4;

/** No speed is shown for a shorter time. */
const LEAST_DECODE_S = 0.02;

/** Shows one answer. */
export class AnswerView {
  /**
   * @param {object} answer See conversation.js.
   * @param {{regenerate: () => void, retry: () => void, openSettings: () => void,
   *          returnResult: (call: object, text: string) => void}} actions
   */
  constructor(answer, actions) {
    this._answer = answer;
    this._actions = actions;
    this._text = el("div.text");
    this._thought = el("div.text");
    this._summary = el("summary");
    this._reasoning = el("details.thought", { hidden: true }, this._summary, this._thought);
    this._calls = el("div.calls");
    this._foot = el("div.foot");
    this.element = el("article.answer", { "aria-label": "Answer" },
      this._reasoning, this._text, this._calls, this._foot);
    this._drawnAt = 0;
    this._pauseMs = LEAST_PAUSE_MS;
  }

  /** Show what has arrived, as often as drawing it takes at most a part of the time. */
  changed() {
    if (this._waiting) return;
    this._waiting = setTimeout(() => {
      this._waiting = null;
      if (this._isRunning) this.draw(true);
    }, Math.max(0, this._drawnAt + this._pauseMs - performance.now()));
  }

  /** @param {boolean} isRunning Whether more may come. */
  draw(isRunning) {
    const began = performance.now();
    this._isRunning = isRunning;
    this.element.setAttribute("aria-busy", String(isRunning));
    this.element.classList.toggle("running", isRunning);
    this._drawReasoning();
    this._text.replaceChildren(rendered(this._answer.text));
    this._drawCalls(isRunning);
    this._foot.replaceChildren(...(isRunning ? [] : this._footer()));
    this._drawnAt = performance.now();
    this._pauseMs = Math.max(LEAST_PAUSE_MS, SHARE_OF_TIME * (this._drawnAt - began));
  }

  /** @param {string} text What is going on before the first token. */
  note(text) {
    this._foot.replaceChildren(el("p.quiet", {}, text));
  }

  _drawReasoning() {
    const { reasoning, text, figures } = this._answer;
    this._reasoning.hidden = !reasoning;
    if (!reasoning) return;
    const isThinking = this._isRunning && !text;
    this._summary.textContent = isThinking ? "Thinking…" : `Thought${figures?.reasoning ? `, ${plural(figures.reasoning, "token")}` : ""}`;
    this._thought.replaceChildren(rendered(reasoning));
  }

  _drawCalls(isRunning) {
    const { calls } = this._answer;
    const state = `${isRunning} ${calls.map((call) => call.arguments.length)}`;
    if (this._callsDrawn === state) return;
    this._callsDrawn = state;
    this._calls.replaceChildren(...calls.map((call) => this._callView(call, isRunning)));
  }

  _callView(call, isRunning) {
    const result = el("textarea", { rows: 2, "aria-label": `Result of ${call.name}` });
    const give = () => this._actions.returnResult(call, result.value);
    const isOpen = !isRunning && this._actions.isLast() && this._answer.finish === "tool_calls";
    return el("div.call", {},
      el("p", {}, "The model calls ", el("code", {}, call.name)),
      el("pre", { tabIndex: 0 }, indented(call.arguments)),
      isOpen && result,
      isOpen && el("button", { type: "button", on: { click: give } }, "Return this result"));
  }

  _footer() {
    const { figures, finish, error, requestId, ignored, text } = this._answer;
    const why = el("div");
    const button = (words, click) => el("button.small", { type: "button", on: { click } }, words);
    return [
      ENDS[finish] && el("p.quiet", {}, ENDS[finish]),
      error && errorView(error, this._actions),
      ignored && el("p.quiet", {}, `The server has ignored: ${ignored}.`),
      figures && el("p.figures", {}, figureWords(figures)),
      el("div.row", {},
        text && copyButton(() => text),
        button("Regenerate", this._actions.regenerate),
        requestId && button("Why was this slow?", () => this._explain(why))),
      why,
    ].filter(Boolean);
  }

  async _explain(place) {
    place.replaceChildren(el("p.quiet", {}, "Asking the server…"));
    try {
      place.replaceChildren(timelineView(await fetchTimeline(this._answer.requestId)));
    } catch (error) {
      place.replaceChildren(el("p.quiet", { role: "alert" }, error.message));
    }
  }
}

function indented(json) {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json;
  }
}

function figureWords({ prompt, cached, skipped, tokens, drafted, accepted, firstS, decodeS }) {
  return [
    decodeS > LEAST_DECODE_S && tokens > 1 && `${((tokens - 1) / decodeS).toFixed(1)} tokens/s`,
    firstS !== null && `first token after ${seconds(firstS)}`,
    plural(tokens, "token"),
    `${count(cached)} of ${plural(prompt, "prompt token")} cached`,
    skipped > 0 && `${count(skipped)} skipped`,
    drafted > 0 && `${count(accepted)} of ${plural(drafted, "draft token")} accepted`,
  ].filter(Boolean).join(" · ");
}
