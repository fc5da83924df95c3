// Small values that outlive the page: the theme, the key, the last settings. Works, forgetfully, without storage.

const PREFIX = 'consort.';
const unsaved = new Map();

export function recall(name, otherwise) {
  try {
    const text = localStorage.getItem(PREFIX + name);
    if (text !== null) return JSON.parse(text);
  } catch {
    // Storage is closed to us, or holds something that is not ours.
  }
  return unsaved.has(name) ? unsaved.get(name) : otherwise;
}

export function remember(name, value) {
  unsaved.set(name, value);
  try {
    localStorage.setItem(PREFIX + name, JSON.stringify(value));
  } catch {
    // Full or closed: the value lasts as long as the page.
  }
}
