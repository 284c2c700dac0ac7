/** The tab of the chat: one conversation is open, and at most one answer is being generated. */

import { ApiError, getJson } from "./api.js";
import { AnswerView } from "./answer_view.js";
import { Attachments } from "./attachments.js";
import { complete, newAnswer } from "./completion.js";
import { newConversation, titleOf, toMarkdown, wireMessages } from "./conversation.js";
import { showConversations } from "./conversation_list.js";
import { download, el } from "./dom.js";
import { questionView, resultView } from "./question_view.js";
import { requestFields, settings } from "./settings.js";

const NEAR_END_PX = 80;

/** The chat; `start` opens the newest conversation. */
export class Chat {
  /**
   * @param {object} store See store.js.
   * @param {() => void} openSettings
   * @param {() => void} onLost Called when the server does not answer.
   */
  constructor(store, openSettings, onLost) {
    this._store = store;
    this._onLost = onLost;
    this._openSettings = openSettings;
    const part = (id) => document.getElementById(id);
    [this._log, this._prompt, this._send, this._list] = ["log", "prompt", "send", "list"].map(part);
    this._attached = new Attachments(part("attached"), (text) => this._say(text));
    this._running = null;
    this._listen(part);
  }

  async start() {
    const [newest] = await this._store.list();
    await this._open(newest && await this._store.get(newest.id));
  }

  _listen(part) {
    part("new").addEventListener("click", () => this._open());
    part("composer").addEventListener("submit", (event) => { event.preventDefault(); this._submit(); });
    part("attach").addEventListener("click", () => part("files").click());
    part("files").addEventListener("change", ({ target }) => {
      this._attached.add([...target.files]).then(() => { target.value = ""; });
    });
    this._attached.acceptDrops(part("chat"));
    this._prompt.addEventListener("paste", ({ clipboardData }) => this._attached.add([...clipboardData.files]));
    this._prompt.addEventListener("input", () => this._fit());
    this._prompt.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing || isTouch()) return;
      event.preventDefault();
      if (!this._running) this._submit();
    });
    document.addEventListener("keydown", ({ key }) => {
      if (key === "Escape" && !document.querySelector("dialog[open]")) this._stop();
    });
  }

  _fit() {
    this._prompt.style.height = "auto";
    this._prompt.style.height = `${this._prompt.scrollHeight + 2}px`;
  }

  async _open(conversation = newConversation()) {
    this._stop();
    this._now = conversation;
    this._draw();
    await this._showList();
    if (!isTouch()) this._prompt.focus();
  }

  async _showList() {
    const withTitle = async (id) => this._store.get(id);
    showConversations(this._list, await this._store.list(), this._now.id, {
      open: async (id) => this._open(await withTitle(id)),
      remove: async (id) => {
        await this._store.remove(id);
        await this.start();
      },
      save: async (id, form) => {
        const found = await withTitle(id);
        if (form === "json") download("conversation.json", "application/json", JSON.stringify(found, null, 2));
        else download("conversation.md", "text/markdown", toMarkdown(found));
      },
    });
  }

  _draw() {
    this._log.replaceChildren(...this._now.messages.map((message, i) => this._view(message, i)));
    if (!this._now.messages.length) this._log.append(el("p.empty", {}, "Ask the model something, or drop an image here."));
    this._log.scrollTop = this._log.scrollHeight;
  }

  _view(message, i) {
    if (message.role === "tool") return resultView(message);
    if (message.role === "user") return questionView(message, { edit: (text) => this._edit(i, text) });
    const view = this._answerView(message, i);
    view.draw(false);
    return view.element;
  }

  _answerView(answer, i) {
    const regenerate = () => this._continue(i);
    return new AnswerView(answer, {
      regenerate,
      retry: regenerate,
      openSettings: this._openSettings,
      isLast: () => i === this._now.messages.length - 1,
      returnResult: (call, text) => this._return(call, text),
    });
  }

  _submit() {
    if (this._running) return this._stop();
    const text = this._prompt.value.trim(), files = this._attached.take();
    if (!text && !files.length) return;
    this._prompt.value = "";
    this._fit();
    this._now.messages.push({ role: "user", text, files });
    this._continue(this._now.messages.length);
  }

  _edit(i, text) {
    this._now.messages[i] = { ...this._now.messages[i], text: text.trim() };
    this._continue(i + 1);
  }

  /** Give the result of a call; the model goes on when all calls of its answer have one. */
  _return(call, text) {
    const { messages } = this._now;
    messages.push({ role: "tool", callId: call.id, name: call.name, text });
    const asked = messages.findLast(({ role }) => role === "assistant").calls;
    const isAnswered = ({ id }) => messages.some(({ callId }) => callId === id);
    if (asked.every(isAnswered)) this._continue(messages.length);
    else this._draw();
  }

  /** Replace all messages from number `i` on by a new answer. */
  async _continue(i) {
    this._stop();
    const conversation = this._now, { messages } = conversation;
    const sent = messages.slice(0, i), answer = newAnswer();
    messages.splice(i, messages.length, answer);
    this._draw();
    const view = this._answerView(answer, i);
    this._log.lastChild.replaceWith(view.element);
    await this._keep(conversation);
    await this._generate(sent, answer, view);
    await this._keep(conversation);
  }

  async _generate(sent, answer, view) {
    const running = this._running = new AbortController();
    const waiting = tellWait(answer, view);
    this._mark();
    view.draw(true);
    try {
      const chosen = settings();
      const model = chosen.model || (await getJson("v1/models")).data[0].id;
      const body = { model, messages: wireMessages(sent, chosen.system), ...requestFields(chosen) };
      await complete(answer, body, running.signal, () => this._changed(view));
    } catch (error) {
      if (error.name === "AbortError") answer.finish = "stopped";
      else answer.error = kept(error);
      if (error.status === 0) this._onLost();
    } finally {
      clearInterval(waiting);
      if (this._running === running) this._running = null;
      this._mark();
    }
    const isAtEnd = this._isAtEnd();
    view.draw(false);
    this._follow(isAtEnd);
  }

  _changed(view) {
    const isAtEnd = this._isAtEnd();
    view.changed();
    this._follow(isAtEnd);
  }

  _isAtEnd() {
    return this._log.scrollHeight - this._log.scrollTop - this._log.clientHeight < NEAR_END_PX;
  }

  _follow(isAtEnd) {
    if (isAtEnd) requestAnimationFrame(() => { this._log.scrollTop = this._log.scrollHeight; });
  }

  _stop() {
    this._running?.abort();
    this._running = null;
    this._mark();
  }

  _mark() {
    this._send.textContent = this._running ? "Stop" : "Send";
  }

  async _keep(conversation) {
    Object.assign(conversation, { title: titleOf(conversation), updated: Date.now() });
    try {
      await this._store.put(conversation);
    } catch (error) {
      this._say(`The conversation cannot be kept in this browser: ${error.message}`);
    }
    await this._showList();
  }

  _say(text) {
    this._log.append(el("p.note", { role: "alert" }, text));
    this._log.scrollTop = this._log.scrollHeight;
  }
}

const isTouch = () => matchMedia("(pointer: coarse)").matches;

function tellWait(answer, view) {
  const began = Date.now();
  return setInterval(() => {
    const waited = Math.round((Date.now() - began) / 1000);
    if (!answer.text && !answer.reasoning && waited) view.note(`Waiting for the first token, ${waited} s`);
  }, 1000);
}

function kept(error) {
  if (!(error instanceof ApiError)) return { message: error.message, status: 400, retryAfter: null };
  const { message, status, code, param, retryAfter, requestId } = error;
  const until = retryAfter ? Date.now() + 1000 * retryAfter : null;
  return { message, status, code, param, retryAfter, requestId, until };
}
