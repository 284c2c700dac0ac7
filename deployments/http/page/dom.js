/** Builds and updates elements. Styles are set as properties, since the page's policy forbids style attributes. */

/**
 * Create an element.
 * @param {string} tag Name, with classes behind dots: "p.quiet".
 * @param {object} [given] Properties; `on` has listeners, `style` properties of the style, names with "-" are attributes.
 * @param {...(Node|string|null|undefined|false)} children Left out if null, undefined or false.
 * @returns {HTMLElement}
 */
export function el(tag, given = {}, ...children) {
  const [name, ...classes] = tag.split(".");
  const element = document.createElement(name);
  if (classes.length) element.className = classes.join(" ");
  for (const [key, value] of Object.entries(given)) {
    if (key === "on") for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    else if (key === "style") Object.assign(element.style, value);
    else if (key.includes("-") || key === "role") element.setAttribute(key, value);
    else element[key] = value;
  }
  element.append(...children.filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/**
 * Make the children of an element like new ones and keep those that are there, so that focus and open details remain.
 * @param {Element} parent
 * @param {Node[]} children
 */
export function show(parent, children) {
  children.forEach((child, i) => {
    const there = parent.childNodes[i];
    if (!there) parent.append(child);
    else if (!become(there, child)) there.replaceWith(child);
  });
  while (parent.childNodes.length > children.length) parent.lastChild.remove();
}

function become(there, wanted) {
  if (there.nodeName !== wanted.nodeName || there.className !== wanted.className || there.id !== wanted.id) return false;
  if (there.nodeType === Node.TEXT_NODE) {
    if (there.data !== wanted.data) there.data = wanted.data;
    return true;
  }
  for (const { name, value } of wanted.attributes) {
    if (name !== "style" && name !== "open" && there.getAttribute(name) !== value) there.setAttribute(name, value);
  }
  if (there.style.cssText !== wanted.style.cssText) there.style.cssText = wanted.style.cssText;
  show(there, [...wanted.childNodes]);
  return true;
}

/**
 * Offer a text as a file.
 * @param {string} name
 * @param {string} type
 * @param {string} text
 */
export function download(name, type, text) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  el("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}
