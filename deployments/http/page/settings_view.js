/** The dialog of the settings: parameters of the requests, tools, and the API key. */

import { getJson } from "./api.js";
import { el } from "./dom.js";
import { apiKey, DEFAULTS, isKeyKept, keepKey, keepSettings, settings } from "./settings.js";

const EFFORTS = { "": "default", none: "none", low: "low", medium: "medium", high: "high" };

const NUMBERS = [
  ["temperature", "Temperature", { min: 0, max: 2, step: "any" }, "0: always the likeliest token"],
  ["topP", "Top p", { min: 0, max: 1, step: "any" }, ""],
  ["seed", "Seed", { step: 1 }, "the same seed gives the same answer"],
  ["maxTokens", "Most tokens", { min: 1, step: 1 }, "of an answer, thoughts included"],
];

/** Opens the dialog. */
export class SettingsDialog {
  /**
   * @param {HTMLDialogElement} dialog
   * @param {() => void} onChange Called when settings or key were saved.
   */
  constructor(dialog, onChange) {
    this._dialog = dialog;
    this._onChange = onChange;
  }

  async open() {
    this._build(settings());
    this._dialog.showModal();
    try {
      const { data } = await getJson("v1/models");
      this._model.append(...data.map(({ id }) => el("option", { value: id, selected: id === settings().model }, id)));
    } catch { /* the page says elsewhere that the server does not answer */ }
  }

  _build(now) {
    const fields = this._fields = {};
    const keep = (name, input) => { fields[name] = input; input.id = `set-${name}`; return input; };
    this._model = keep("model", el("select", {}, el("option", { value: "" }, "the server's model")));
    const options = Object.entries(EFFORTS).map(([value, text]) => el("option", { value, selected: value === now.effort }, text));
    const numbers = NUMBERS.map(([name, label, limits, hint]) => labelled(label, keep(name, el("input", {
      type: "number", inputMode: "decimal", placeholder: "default", value: now[name], ...limits })), hint));
    this._key = el("input", { type: "password", id: "set-key", autocomplete: "off", value: apiKey() });
    this._isKept = el("input", { type: "checkbox", checked: isKeyKept() });
    this._fault = el("p", { role: "alert" });
    const button = (words, click, kind = "button") => el(kind, { type: "button", on: { click } }, words);
    this._dialog.replaceChildren(
      el("h2", { id: "settings-title" }, "Settings"),
      labelled("Model", this._model),
      labelled("System prompt", keep("system", el("textarea", { rows: 2, value: now.system }))),
      el("div.pairs", {}, ...numbers, labelled("Reasoning effort", keep("effort", el("select", {}, ...options)))),
      labelled("Tools, as in a chat completion", keep("tools", el("textarea", { rows: 2, value: now.tools, spellcheck: false })),
        "A JSON array. You are asked for the results of the calls."),
      labelled("API key", this._key, "Only a server with keys needs one. It stays in this browser."),
      el("label.check", {}, this._isKept, "Keep the key when the browser is closed"),
      this._fault,
      el("div.row.actions", {}, button("Save", () => this._save(), "button.main"), button("Cancel", () => this._dialog.close()),
        button("Defaults", () => this._build({ ...DEFAULTS }))));
  }

  _save() {
    const fault = this._faultOf();
    this._fault.textContent = fault;
    if (fault) return;
    const chosen = Object.fromEntries(Object.entries(this._fields).map(([name, { value }]) => [name, value]));
    keepSettings(chosen);
    keepKey(this._key.value.trim(), this._isKept.checked);
    this._dialog.close();
    this._onChange();
  }

  _faultOf() {
    for (const [name, label] of NUMBERS) {
      if (!this._fields[name].validity.valid) return `${label}: ${this._fields[name].validationMessage}`;
    }
    try {
      const tools = this._fields.tools.value.trim();
      if (tools && !Array.isArray(JSON.parse(tools))) return "The tools must be a JSON array.";
    } catch (error) {
      return `The tools are not JSON: ${error.message}`;
    }
    return /^[!-~]*$/.test(this._key.value.trim()) ? "" : "The API key has characters that no key has.";
  }
}

function labelled(words, input, hint = "") {
  const name = `${input.id}-hint`;
  if (hint) input.setAttribute("aria-describedby", name);
  return el("div.field", {}, el("label", { htmlFor: input.id }, words), input, hint && el("span.quiet", { id: name }, hint));
}
