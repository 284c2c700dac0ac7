/** A message of the user, which can be edited, and the result of a tool. */

import { preview } from "./attachments.js";
import { el } from "./dom.js";

/**
 * @param {object} message
 * @param {{edit: (text: string) => void}} actions
 * @returns {HTMLElement}
 */
export function questionView(message, { edit }) {
  const article = el("article.question", { "aria-label": "Your message" });
  const read = () => {
    article.replaceChildren(
      message.files.length ? el("div.files", {}, ...message.files.map(preview)) : "",
      el("div.text", {}, message.text),
      el("div.foot", {}, el("button.small", { type: "button", on: { click: write } }, "Edit")));
  };
  const write = () => {
    const text = el("textarea", { value: message.text, rows: 4, "aria-label": "Your message" });
    const send = () => edit(text.value);
    text.addEventListener("keydown", (event) => {
      if (event.key === "Escape") { event.stopPropagation(); read(); }
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
    });
    article.replaceChildren(text, el("div.row", {},
      el("button.main", { type: "button", on: { click: send } }, "Send again"),
      el("button", { type: "button", on: { click: read } }, "Keep as it was"),
      el("span.quiet", {}, "What follows this message is replaced.")));
    text.focus();
  };
  read();
  return article;
}

/** @param {object} message @returns {HTMLElement} */
export function resultView({ name, text }) {
  return el("article.question", { "aria-label": `Result of ${name}` },
    el("p.quiet", {}, "Result of ", el("code", {}, name)), el("pre", { tabIndex: 0 }, text));
}
