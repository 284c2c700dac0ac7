/** The parameters of requests and the API key, kept in this browser. */

const SETTINGS = "orchard.settings", KEY = "orchard.key";

export const DEFAULTS = {
  model: "", system: "", temperature: "", topP: "", seed: "", maxTokens: "", effort: "", tools: "",
};

/** @returns {typeof DEFAULTS} What the user has chosen; "" stands for the server's default. */
export function settings() {
  try {
    return { ...DEFAULTS, ...JSON.parse(localStorage.getItem(SETTINGS) ?? "{}") };
  } catch {
    return { ...DEFAULTS };
  }
}

/** @param {typeof DEFAULTS} chosen */
export function keepSettings(chosen) {
  localStorage.setItem(SETTINGS, JSON.stringify(chosen));
}

/** @returns {string} The API key, "" without one. */
export const apiKey = () => sessionStorage.getItem(KEY) ?? localStorage.getItem(KEY) ?? "";

/** @returns {boolean} Whether the key is kept when the browser is closed. */
export const isKeyKept = () => localStorage.getItem(KEY) !== null;

/**
 * @param {string} key "" to forget it.
 * @param {boolean} isKept Whether to keep it when the browser is closed.
 */
export function keepKey(key, isKept) {
  for (const place of [sessionStorage, localStorage]) place.removeItem(KEY);
  if (key) (isKept ? localStorage : sessionStorage).setItem(KEY, key);
}

const NUMBERS = { temperature: "temperature", topP: "top_p", seed: "seed", maxTokens: "max_tokens" };

/**
 * @param {typeof DEFAULTS} chosen
 * @returns {object} The fields of a chat completion that the settings set.
 * @throws {SyntaxError} The tools are not JSON.
 */
export function requestFields(chosen) {
  const fields = {};
  for (const [name, field] of Object.entries(NUMBERS)) if (chosen[name] !== "") fields[field] = Number(chosen[name]);
  if (chosen.effort) fields.reasoning_effort = chosen.effort;
  if (chosen.tools.trim()) fields.tools = JSON.parse(chosen.tools);
  return fields;
}
