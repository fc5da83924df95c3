// How full the model's context is, below the message box.
import { startOf, tokensUsed } from './context.js';
import { byId, setText } from './dom.js';
import { count } from './units.js';

/** From this share on the meter warns. */
const NEARLY_FULL = 0.75;

/** Shows the tokens of `path` and those that the context has; nothing before the first answer. */
export function showContext(path, context) {
  const meter = byId('context');
  const used = tokensUsed(path);
  meter.hidden = used === null || !context;
  if (meter.hidden) return;
  const share = Math.min(used / context, 1);
  meter.setAttribute('aria-valuenow', String(Math.min(used, context)));
  meter.setAttribute('aria-valuemax', String(context));
  meter.setAttribute('aria-valuetext', `${count(used)} of ${count(context)} tokens`);
  meter.title = startOf(path) > 0 ? 'The context is full: the oldest messages are no longer sent' : 'Tokens of this conversation, and of the model’s context';
  meter.classList.toggle('nearly', share >= NEARLY_FULL);
  meter.querySelector('i').style.width = `${share * 100}%`;
  setText(meter.querySelector('.words'), `${count(used)} / ${count(context)} tokens`);
}
