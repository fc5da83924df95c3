// The colour of a machine: it keeps its own, wherever it stands in the chain, also after a reload. Machines get colours in the order
// in which they were first seen.
import { recall, remember } from './memory.js';

const TONES = 8;
const KEPT_MAX = 200;

let known = null; // [identity, tone] of each machine

/** The classes of what has the colour of this machine. `identity`: see identityOf. */
export function toneOf(identity) {
  if (identity === '') return 'tone tone-0'; // the server
  known ??= recall('tones', []).filter((entry) => Array.isArray(entry) && typeof entry[0] === 'string' && Number.isInteger(entry[1]));
  let found = known.find(([other]) => other === identity);
  if (!found) {
    found = [identity, 1 + (known.length ? known.at(-1)[1] : 0) % (TONES - 1)];
    known = [...known, found].slice(-KEPT_MAX);
    remember('tones', known);
  }
  return `tone tone-${found[1]}`;
}

/** What tells a machine from others: names are not unique. Empty for the server. */
export function identityOf({ coordinator, address, name, peer }) {
  return coordinator ? '' : (peer?.id ?? address ?? name ?? 'a machine');
}
