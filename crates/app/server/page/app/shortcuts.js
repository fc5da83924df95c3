// Keys for what is done often. All but Escape have a modifier, so that they never take a letter from somebody who writes or
// speaks; `?` outside of a field lists them.
import { byId, h } from './dom.js';

const IS_APPLE = /Mac|iPhone|iPad/.test(navigator.platform);
const SHOWN = { Mod: IS_APPLE ? '⌘' : 'Ctrl', Shift: IS_APPLE ? '⇧' : 'Shift' };

/** `actions`: create(), search(), stop(), write(). */
export function startShortcuts(actions) {
  const shortcuts = [
    { keys: ['Mod', 'Shift', 'O'], words: 'New chat', run: () => actions.create() },
    { keys: ['Mod', 'K'], words: 'Search conversations', run: () => actions.search() },
    { keys: ['Mod', 'Shift', 'L'], words: 'Go to the message box', run: () => actions.write() },
    { keys: ['Esc'], words: 'Stop the answer' }, // composer.js listens for it
    { keys: ['Enter'], words: 'Send' },
    { keys: ['Shift', 'Enter'], words: 'New line' },
    { keys: ['?'], words: 'Show this list', run: show },
  ];
  byId('shortcuts-list').append(...shortcuts.flatMap(({ keys, words }) => [
    h('dt', {}, ...keys.map((key) => h('kbd', {}, SHOWN[key] ?? key))), h('dd', {}, words)]));
  byId('open-shortcuts').addEventListener('click', show);
  const dialog = byId('shortcuts');
  dialog.querySelector('[data-cancel]').addEventListener('click', () => dialog.close());
  dialog.addEventListener('pointerdown', (event) => {
    if (event.target === dialog) dialog.close();
  });
  document.addEventListener('keydown', (event) => {
    if (event.isComposing || event.defaultPrevented || document.querySelector('dialog[open]')) return;
    const found = shortcuts.find(({ keys, run }) => run && matches(keys, event));
    if (!found) return;
    event.preventDefault();
    found.run();
  });

  function show() {
    dialog.showModal();
  }
}

function matches(keys, event) {
  const key = keys.at(-1);
  if (key === '?') return event.key === '?' && !event.ctrlKey && !event.metaKey && !event.altKey && !isField(event.target);
  const mod = IS_APPLE ? event.metaKey && !event.ctrlKey : event.ctrlKey && !event.metaKey;
  return mod === keys.includes('Mod') && event.shiftKey === keys.includes('Shift') && !event.altKey && event.key.toUpperCase() === key;
}

function isField(element) {
  return element.matches?.('input, textarea, select, [contenteditable]');
}
