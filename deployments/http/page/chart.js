/** A chart of the last minutes, as lines in SVG. */

const NAMESPACE = "http://www.w3.org/2000/svg";
const WIDTH = 300, HEIGHT = 60, KEPT = 240;

/** A chart of some series with one scale, to which a value of each is added once a second. */
export class Chart {
  /** @param {string[]} names Names of the series. */
  constructor(names) {
    this._names = names;
    this._values = names.map(() => []);
  }

  /** @param {number[]} values One value for each series. */
  add(values) {
    this._values.forEach((kept, i) => {
      kept.push(values[i]);
      if (kept.length > KEPT) kept.shift();
    });
  }

  /** @returns {number} Minutes that are shown. */
  get minutes() {
    return KEPT / 60;
  }

  /** @returns {number} The largest value that is shown, at least 1. */
  get most() {
    return Math.max(1, ...this._values.flat());
  }

  /** @returns {SVGElement} */
  draw() {
    const { most } = this;
    const drawn = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img",
      "aria-label": `${this._names.join(" and ")} of the last ${this.minutes} minutes, at most ${most.toFixed(1)}` });
    this._values.forEach((kept, i) => {
      const start = KEPT - kept.length;
      const points = kept.map((value, at) => (
        `${((start + at) * WIDTH) / (KEPT - 1)},${(HEIGHT - 2 - (value * (HEIGHT - 4)) / most).toFixed(1)}`));
      drawn.append(svg("polyline", { class: `line line${i}`, points: points.join(" ") }));
    });
    return drawn;
  }
}

function svg(name, attributes) {
  const element = document.createElementNS(NAMESPACE, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}
