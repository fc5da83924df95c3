// Line icons on a 24 by 24 grid. Decoration only: the button around one carries the name.
import { h, s } from './dom.js';

const PATHS = {
  again: 'M20 11a8 8 0 1 0-2.3 5.7M20 5v6h-6',
  book: 'M4 5.5c3-1 5.5-1 8 .8 2.5-1.8 5-1.8 8-.8V18.5c-3-1-5.5-1-8 .8-2.5-1.8-5-1.8-8-.8zM12 6.3v13',
  check: 'M5 12.5l4.5 4.5L19 7.5',
  close: 'M6 6l12 12M18 6L6 18',
  copy: 'M9 9h10v11H9zM5 15V4h10',
  down: 'M12 5v14M6 13l6 6 6-6',
  clip: 'M18.5 11.5l-7 7a4 4 0 0 1-6-6l8-8a2.7 2.7 0 0 1 4 4l-8 8a1.3 1.3 0 0 1-2-2l7-7',
  edit: 'M4 20h4L19.5 8.5l-4-4L4 16zM13.5 6.5l4 4',
  file: 'M7 3h7l4 4v14H7zM14 3v4h4M10 12h5M10 16h5',
  help: 'M9 9.2a3 3 0 1 1 4.3 2.7c-.9.5-1.3 1-1.3 2.1M12 17.5h.01M3 12a9 9 0 1 0 18 0a9 9 0 1 0-18 0',
  import: 'M12 16V5M7 9.5l5-5 5 5M5 20h14',
  key: 'M4 15.5a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0-7 0M10 13l8-8M15 8l3 3M18 5l2 2',
  left: 'M14.5 6l-6 6 6 6',
  menu: 'M4 7h16M4 12h16M4 17h16',
  more: 'M5 12h.01M12 12h.01M19 12h.01',
  plus: 'M12 5v14M5 12h14',
  right: 'M9.5 6l6 6-6 6',
  sliders: 'M4 7h9M19 7h1M4 17h1M11 17h9M13 7a3 3 0 1 0 6 0a3 3 0 1 0-6 0M5 17a3 3 0 1 0 6 0a3 3 0 1 0-6 0',
  stop: 'M7 7h10v10H7z',
  play: 'M7 5.5v13l11-6.5z',
  tool: 'M14.5 5.5a4.5 4.5 0 0 0-5.8 5.8L4 16v4h4l4.7-4.7a4.5 4.5 0 0 0 5.8-5.8L15.5 12 12 8.5z',
  trash: 'M5 7h14M10 7V4.5h4V7M7 7l.8 12.5h8.4L17 7M10.5 10.5v6M13.5 10.5v6',
  up: 'M12 19V5M6 11l6-6 6 6',
};

export function icon(name) {
  return s('svg', { viewBox: '0 0 24 24', class: `icon icon-${name}`, 'aria-hidden': 'true' }, s('path', { d: PATHS[name] }));
}

/** A button that shows an icon and is called `label`. */
export function iconButton(name, label, onclick, attributes = {}) {
  return h('button', { type: 'button', class: 'quiet', 'aria-label': label, title: label, onclick, ...attributes }, icon(name));
}

/** Draws the icons that index.html names in data-icon. */
export function drawIcons() {
  for (const element of document.querySelectorAll('[data-icon]')) element.prepend(icon(element.dataset.icon));
}
