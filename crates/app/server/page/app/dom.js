// Elements from values. There is no way in from a string of HTML, so text from a model stays text.

const SVG = 'http://www.w3.org/2000/svg';

/** An element with attributes; names that begin with "on" are listeners. Null and false leave an attribute out. */
export function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** The same for SVG. */
export function s(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

/** The element with this id; a missing one is a mistake in index.html. */
export function byId(id) {
  const element = document.getElementById(id);
  if (!element) throw new Error(`no element #${id}`);
  return element;
}

/** Writes text only when it differs, so that a page that polls does not disturb selections or screen readers. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith('on')) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? '' : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}
