// A short note above the page, which makes room for it, that goes away by itself, with at most one thing to do about it.
import { byId, h } from './dom.js';
import { iconButton } from './icons.js';

const SHOWN_MS = 8000;

export function toast(text, action = null) {
  const note = h('div', { class: 'toast' }, h('span', {}, text));
  let gone = 0;
  const wait = () => {
    clearTimeout(gone);
    gone = setTimeout(() => note.remove(), SHOWN_MS);
  };
  const stay = () => clearTimeout(gone);
  // It does not vanish from under a pointer or a focus.
  for (const event of ['pointerenter', 'focusin']) note.addEventListener(event, stay);
  for (const event of ['pointerleave', 'focusout']) note.addEventListener(event, wait);
  wait();
  if (action) {
    note.append(h('button', {
      type: 'button',
      class: 'plain',
      onclick: () => {
        stay();
        note.remove();
        action.run();
      },
    }, action.label));
  }
  note.append(iconButton('close', 'Dismiss', () => note.remove()));
  byId('toasts').replaceChildren(note);
}
