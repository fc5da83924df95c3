// Copying, also where the page came over plain HTTP from another machine and navigator.clipboard does not exist.
import { h } from './dom.js';
import { icon } from './icons.js';
import { announce } from './announcer.js';

const SHOWN_MS = 1500;

/** A button that copies what `text()` gives when pressed. */
export function copyButton(text, label) {
  const button = h('button', { type: 'button', class: 'quiet copy', 'aria-label': label, title: label }, icon('copy'));
  button.addEventListener('click', async () => {
    const copied = await copy(text());
    button.replaceChildren(icon(copied ? 'check' : 'close'));
    announce(copied ? 'Copied' : 'The browser did not let us copy');
    setTimeout(() => button.replaceChildren(icon('copy')), SHOWN_MS);
  });
  return button;
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copyBySelection(text);
  }
}

function copyBySelection(text) {
  const focused = document.activeElement;
  const area = h('textarea', { class: 'unseen', 'aria-hidden': 'true' });
  area.value = text;
  document.body.append(area);
  area.select();
  const copied = document.execCommand('copy');
  area.remove();
  focused?.focus();
  return copied;
}
