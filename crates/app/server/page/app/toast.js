// A short note at the edge of the page that goes away by itself, with at most one thing to do about it.
import { byId, h } from './dom.js';

const SHOWN_MS = 8000;

export function toast(text, action = null) {
  const note = h('div', { class: 'toast' }, h('span', {}, text));
  const gone = setTimeout(() => note.remove(), SHOWN_MS);
  if (action) {
    note.append(h('button', {
      type: 'button',
      class: 'plain',
      onclick: () => {
        clearTimeout(gone);
        note.remove();
        action.run();
      },
    }, action.label));
  }
  byId('toasts').replaceChildren(note);
}
