// Formulas. KaTeX is fetched when the first one appears; until then, and where it cannot be read, its source is shown.
import { h } from '../dom.js';

const SOURCE_CHARS_MAX = 5000;
const KEPT_MAX = 500;

/** `trust` is off: no links, no images, no styles of the model's own. The limits end what would grow without bound. */
const OPTIONS = { throwOnError: true, strict: 'ignore', trust: false, maxSize: 20, maxExpand: 300 };

let katex = null;
let loading = null;
const kept = new Map(); // what a paragraph that grows draws again and again

/** Fetches KaTeX, once. */
export function loadMaths() {
  loading ??= fetchMaths().catch((error) => {
    console.warn('Formulas are shown as text:', error);
  });
  return loading;
}

/** The element of a formula; with `display` it has a line of its own, which scrolls if it is too narrow. */
export function renderMaths(tag, source, display) {
  const element = h(tag, display ? { class: 'maths display', tabindex: '0', role: 'group', 'aria-label': 'Formula' } : { class: 'maths' });
  element.append(drawn(source, display));
  if (!katex && source.length <= SOURCE_CHARS_MAX) loadMaths().then(() => katex && element.replaceChildren(drawn(source, display)));
  return element;
}

/** The text of an element for a screen reader: formulas as their source. */
export function spokenText(element) {
  const copy = element.cloneNode(true);
  for (const formula of copy.querySelectorAll('.katex')) formula.replaceWith(formula.querySelector('annotation')?.textContent ?? '');
  return copy.textContent;
}

function drawn(source, display) {
  if (!katex || source.length > SOURCE_CHARS_MAX) return h('code', {}, source);
  const key = `${display} ${source}`;
  if (!kept.has(key)) {
    if (kept.size >= KEPT_MAX) kept.delete(kept.keys().next().value);
    kept.set(key, draw(source, display));
  }
  return kept.get(key).cloneNode(true);
}

function draw(source, display) {
  try {
    const tree = katex.__renderToDomTree(source, { ...OPTIONS, displayMode: display });
    deferStyles(tree);
    const node = tree.toNode();
    for (const element of node.querySelectorAll('[data-style]')) {
      element.style.cssText = element.dataset.style;
      element.removeAttribute('data-style');
    }
    return node;
  } catch (error) {
    return h('code', { title: error.message }, source);
  }
}

/** KaTeX writes a few style attributes, which the page's policy refuses; the same through an element's `style` it allows. */
function deferStyles({ attributes, children = [] }) {
  if (attributes?.style) {
    attributes['data-style'] = attributes.style;
    delete attributes.style;
  }
  for (const child of children) deferStyles(child);
}

async function fetchMaths() {
  const { katex: script, katexCss: style } = document.querySelector('script[data-katex]').dataset;
  const sheet = h('link', { rel: 'stylesheet', href: style });
  const styled = new Promise((resolve, reject) => {
    sheet.addEventListener('load', resolve);
    sheet.addEventListener('error', () => reject(new Error('the style was not found')));
  });
  document.head.append(sheet);
  await Promise.all([styled, import(new URL(script, document.baseURI).href)]);
  katex = globalThis.katex;
}
