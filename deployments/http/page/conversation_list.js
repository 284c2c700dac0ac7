/** The list of the conversations, with export and removal of each. */

import { el } from "./dom.js";

/**
 * @param {HTMLElement} list
 * @param {import("./store.js").Head[]} heads
 * @param {string} current Id of the open conversation.
 * @param {{open: (id: string) => void, remove: (id: string) => void, save: (id: string, form: string) => void}} actions
 */
export function showConversations(list, heads, current, { open, remove, save }) {
  list.replaceChildren(...heads.map(({ id, title }) => {
    const chosen = id === current ? { "aria-current": "true" } : {};
    const action = (words, act) => el("button.small", { type: "button", on: { click: act } }, words);
    return el("li", {},
      el("button.title", { type: "button", ...chosen, on: { click: () => open(id) } }, title),
      id === current && el("div.row", {},
        action("Markdown", () => save(id, "markdown")), action("JSON", () => save(id, "json")),
        action("Delete", () => remove(id))));
  }));
}
