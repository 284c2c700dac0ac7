/**
 * Markdown of answers as elements. A model's text may be hostile: its HTML is shown as text, what remains is sanitized,
 * nothing is loaded, and links open in a window of their own.
 */

import { Marked } from "./vendor/marked.js";
import { el } from "./dom.js";

const purify = globalThis.DOMPurify;

const SAFE = {
  ALLOWED_TAGS: [
    "a", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "li", "ol", "p", "pre",
    "strong", "table", "tbody", "td", "th", "thead", "tr", "ul",
  ],
  ALLOWED_ATTR: ["href", "start"],
  ALLOWED_URI_REGEXP: /^(?:https?:\/\/|mailto:)/i,
  RETURN_DOM_FRAGMENT: true,
};

const escaped = (text) => text.replace(/[&<>"]/g, (sign) => `&#${sign.charCodeAt(0)};`);

const marked = new Marked({
  gfm: true,
  breaks: true,
  renderer: {
    html: ({ text }) => escaped(text),
    image: ({ href, text }) => `<a href="${escaped(href)}">image: ${escaped(text || href)}</a>`,
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
  },
});

/**
 * @param {string} text
 * @returns {DocumentFragment}
 */
export function rendered(text) {
  const fragment = purify.sanitize(marked.parse(text), SAFE);
  for (const link of fragment.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer";
  }
  for (const block of fragment.querySelectorAll("pre")) {
    block.tabIndex = 0;
    const frame = el("div.code");
    block.replaceWith(frame);
    frame.append(block, copyButton(() => block.textContent));
  }
  for (const table of fragment.querySelectorAll("table")) {
    const frame = el("div.scroll", { tabIndex: 0, role: "group", "aria-label": "Table" });
    table.replaceWith(frame);
    frame.append(table);
  }
  return fragment;
}

/** @param {() => string} text @returns {HTMLElement} A button that copies a text. */
export function copyButton(text) {
  const button = el("button.copy", { type: "button" }, "Copy");
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text());
      button.textContent = "Copied";
    } catch {
      button.textContent = "Not allowed here";
    }
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  });
  return button;
}
