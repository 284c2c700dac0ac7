/** Files that go with the next message: images and videos by drop, paste or the file button. */

import { el } from "./dom.js";

const KINDS = ["image", "video"];

/** @param {{kind: string, name: string, url: string}} file @returns {HTMLElement} */
export function preview({ kind, name, url }) {
  if (kind === "video") return el("video", { src: url, controls: true, "aria-label": name });
  return el("img", { src: url, alt: name, title: name });
}

/** The list of attached files. */
export class Attachments {
  /**
   * @param {HTMLElement} list Where they are shown.
   * @param {(text: string) => void} onRefused Called with the reason why a file is not taken.
   */
  constructor(list, onRefused) {
    this._list = list;
    this._onRefused = onRefused;
    this._files = [];
  }

  /** Take the files of a file button, a drop or a paste. @param {Iterable<File>} files */
  async add(files) {
    for (const file of files) {
      const kind = file.type.split("/")[0];
      if (!KINDS.includes(kind)) this._onRefused(`${file.name}: only images and videos can be attached.`);
      else this._files.push({ kind, name: file.name, url: await dataUrl(file) });
    }
    this._show();
  }

  /** @returns {object[]} The files, which are then no longer attached. */
  take() {
    const taken = this._files;
    this.put([]);
    return taken;
  }

  /** @param {object[]} files What is to be attached. */
  put(files) {
    this._files = [...files];
    this._show();
  }

  /**
   * Take files that are dropped on an element.
   * @param {HTMLElement} target
   */
  acceptDrops(target) {
    target.addEventListener("dragover", (event) => {
      event.preventDefault();
      target.classList.add("dropping");
    });
    target.addEventListener("dragleave", () => target.classList.remove("dropping"));
    target.addEventListener("drop", (event) => {
      event.preventDefault();
      target.classList.remove("dropping");
      this.add(event.dataTransfer.files);
    });
  }

  _show() {
    this._list.replaceChildren(...this._files.map((file) => el("li", {}, preview(file),
      el("button.icon", {
        type: "button", "aria-label": `Remove ${file.name}`,
        on: { click: () => this.put(this._files.filter((one) => one !== file)) },
      }, "×"))));
  }
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}
