// What a screen reader hears. An answer is announced paragraph by paragraph as each is finished, not token by token.
import { byId, h } from './dom.js';

const KEPT_MAX = 20;

export function announce(text) {
  if (!text.trim()) return;
  const region = byId('announcer');
  region.append(h('p', {}, text));
  while (region.childElementCount > KEPT_MAX) region.firstElementChild.remove();
}
