/** Numbers in words. */

const whole = new Intl.NumberFormat("en");

/** @param {number} value @returns {string} With separators of thousands. */
export const count = (value) => whole.format(Math.round(value));

/** @param {number} value @param {string} one @param {string} [many] @returns {string} "1 token", "2 tokens". */
export const plural = (value, one, many = one + "s") => `${count(value)} ${value === 1 ? one : many}`;

/** @param {number} value @returns {string} "1.2 GB", in powers of 1024. */
export function bytes(value) {
  const units = ["B", "KB", "MB", "GB", "TB"];
  let rest = Math.abs(value), unit = 0;
  while (rest >= 1024 && unit < units.length - 1) { rest /= 1024; unit += 1; }
  return `${value < 0 ? "−" : ""}${rest < 10 && unit ? rest.toFixed(1) : Math.round(rest)} ${units[unit]}`;
}

/** @param {number} value @returns {string} "12 ms", "1.24 s", "3 min 5 s". */
export function seconds(value) {
  if (value < 0.1) return `${(value * 1000).toFixed(value < 0.01 ? 1 : 0)} ms`;
  if (value < 10) return `${value.toFixed(2)} s`;
  if (value < 60) return `${value.toFixed(1)} s`;
  return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
}

/** @param {number} part @param {number} all @returns {string} "12 %", "–" of nothing. */
export const share = (part, all) => (all ? `${Math.round((100 * part) / all)} %` : "–");
